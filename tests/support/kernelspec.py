"""Helpers of tests: kernelspec."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commandline import CommandLine
    from tests.support.here import Here
    from tests.support.machine import Machine


def install(here: Here, typed: CommandLine, *options: str) -> dict[str, Any]:
    """Install the kernel below the machine's folder; returns what its kernel.json says."""
    done = typed("kernel", "install", "--prefix", ".", *options)
    assert (done.code, done.stderr) == (0, "")
    spec: dict[str, Any] = json.loads((folder(here) / "kernel.json").read_text())
    return spec


def folder(machine: Machine) -> Path:
    return machine.folder / "share" / "jupyter" / "kernels" / "python3-gpu"
