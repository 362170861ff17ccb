"""Helpers of tests: slurm_spec."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from reserve_gpu.system import spawn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commandline import CommandLine
    from tests.support.here import Here


def folder(here: Here, name: str = "python3-gpu-slurm") -> Path:
    return here.folder / "share" / "jupyter" / "kernels" / name


def install(here: Here, typed: CommandLine, *options: str) -> dict[str, Any]:
    """Install the kernel below the machine's folder; returns what its kernel.json says."""
    done = typed("kernel", "install", "--slurm", "--prefix", ".", *options)
    assert (done.code, done.stderr) == (0, "")
    spec: dict[str, Any] = json.loads((folder(here) / "kernel.json").read_text())
    return spec


def words(spec: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the words for the kernel in the job, and the line that starts the job."""
    argv = spec["argv"]
    start = spawn.python("-m", "reserve_gpu", "kernel", "slurm", "-f", "{connection_file}")
    assert argv[: len(start)] == start
    at = argv.index("--")
    return argv[len(start) : at], argv[at + 1 :]
