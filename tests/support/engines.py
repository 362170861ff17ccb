"""What the tests of ipyparallel, Dask and Ray share: examples, hosts, what CUDA shows."""

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
LIMIT_S = 200  # Ray alone starts seven processes, each with all of Python, on however few cores


def examples(title: str) -> list[str]:
    """Return the code blocks of the section with that title in docs/clusters.md."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```\w+\n(.*?)```", section, re.DOTALL)


def host(folder: Path, number: int = 0, gpus: int = GPUS) -> Machine:
    """Return a machine with GPUs of its own, and locks of its own."""
    folder.mkdir(exist_ok=True)
    machine = Machine(folder)
    devices = [f"gpu\n  uuid {name}" for name in uuids(number, gpus)]
    machine.write("\n".join(["driver 550.54.15", "cuda 12040", *devices]))
    return machine


def uuids(number: int = 0, gpus: int = GPUS) -> list[str]:
    """Return the UUIDs of a host's GPUs."""
    return [f"GPU-{uuid.UUID(int=(number + 1) * 256 + index)}" for index in range(gpus)]


def run(machine: Machine, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run Python with engines below it to its end."""
    return subprocess.run(
        [sys.executable, *argv], env=machine.environ(**extra), cwd=machine.folder, text=True,
        capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def said(output: str) -> list[Any]:
    """Return what a script told with `say`, in the midst of what engines print."""
    return [json.loads(line[5:]) for line in output.splitlines() if line.startswith("SAID ")]


def say(fact: object) -> None:
    print("\nSAID", json.dumps(fact), flush=True)


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cuda() -> list[str]:
    """Return the UUIDs of the GPUs that CUDA shows this process; starts CUDA."""
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


def look(_task: object = None) -> tuple[int, list[str]]:
    """Return which process this is, and which GPUs CUDA shows it."""
    return os.getpid(), cuda()
