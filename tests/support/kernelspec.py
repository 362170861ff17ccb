"""Install the kernelspec that reserves a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.commandline import CommandLine
    from tests.support.here import Here
    from tests.support.machine import Machine

# An old ipykernel sets an environment variable when it is first imported, so import it now.
pytest.importorskip("ipykernel.kernelspec")


def install_kernelspec(here: Here, typed: CommandLine, *options: str) -> dict[str, Any]:
    """Install the kernelspec in the machine's folder, and return its content."""
    done = typed("kernel", "install", "--prefix", ".", *options)
    assert (done.code, done.stderr) == (0, "")
    return read_kernelspec(here)


def read_kernelspec(machine: Machine) -> dict[str, Any]:
    """Return the content of the installed kernelspec."""
    spec: dict[str, Any] = json.loads((kernelspec_folder(machine) / "kernel.json").read_text())
    return spec


def kernelspec_folder(machine: Machine) -> Path:
    """Return the folder of the kernelspec that `--prefix .` installs."""
    return machine.folder / "share" / "jupyter" / "kernels" / "python3-gpu"
