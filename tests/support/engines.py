"""Examples, hosts and reports for the tests with ipyparallel, Dask and Ray."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

from tests.support.machine import ROOT, Machine

if TYPE_CHECKING:
    from pathlib import Path

GPUS = 4
LIMIT_S = 200  # Ray starts seven Python processes


def examples(title: str) -> list[str]:
    """Return the code blocks of a section of docs/clusters.md."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)


def host(folder: Path, number: int = 0, gpus: int = GPUS) -> Machine:
    """Return a machine with separate GPUs and locks."""
    folder.mkdir(exist_ok=True)
    machine = Machine(folder)
    devices = [f"gpu\n  uuid {name}" for name in uuids(number, gpus)]
    machine.write("\n".join(["driver 550.54.15", "cuda 12040", *devices]))
    return machine


def uuids(number: int = 0, gpus: int = GPUS) -> list[str]:
    """Return the UUIDs of a host's GPUs."""
    return [f"GPU-{uuid.UUID(int=(number + 1) * 256 + index)}" for index in range(gpus)]


def run_python(machine: Machine, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a machine, and wait for its end."""
    return subprocess.run(
        [sys.executable, *argv], env=machine.environ(**extra), cwd=machine.folder, text=True,
        capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def reported(output: str) -> list[Any]:
    """Return the values that a script has passed to `report`."""
    return [json.loads(text) for text in re.findall(r"^REPORTED (.*)$", output, re.MULTILINE)]


def report(fact: object) -> None:
    """Print a value for `reported`, which ignores all other output."""
    print("\nREPORTED", json.dumps(fact), flush=True)


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cuda() -> list[str]:
    """Start CUDA, and return the UUIDs of its GPUs."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuInit(0)
    count, device, data = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    library.cuDeviceGetCount(ctypes.byref(count))
    found = []
    for number in range(count.value):
        library.cuDeviceGet(ctypes.byref(device), number)
        library.cuDeviceGetUuid(ctypes.byref(data), device)
        found.append(f"GPU-{uuid.UUID(bytes=bytes(data))}")
    return found


def pid_and_gpus(_task: object = None) -> tuple[int, list[str]]:
    """Return the pid of this process, and the UUIDs of its GPUs from CUDA."""
    return os.getpid(), cuda()
