"""The commands that messages name: they work in the environment of who reads them."""

from __future__ import annotations

import shlex
import venv
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine

ASK = (
    "from reserve_gpu.model import errors; print(errors.install_command('six', instead_of='five'))"
)
UV = "uv = 0.13.9\n"


def environment(folder: Path, *, configuration: str = "") -> Path:
    """Return an environment without pip, with what uv leaves in its own; its Python."""
    venv.create(folder, symlinks=True, with_pip=False)
    with (folder / "pyvenv.cfg").open("a") as file:
        file.write(configuration)
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    ("name", "configuration", "expected"),
    [
        ("uv", UV, "uv pip uninstall --python {} five && uv pip install --python {} six"),
        ("no pip", "", "{} -m pip uninstall -y five && {} -m pip install six"),
    ],
)
def test_commands(machine: Machine, name: str, configuration: str, expected: str) -> None:
    """A package is installed by what made the environment, named for the shell."""
    folder = machine.folder / name
    python = environment(folder, configuration=configuration)
    done = machine.command(str(python), "-c", ASK, PYTHONPATH=str(ROOT))
    assert done.stdout == expected.replace("{}", shlex.quote(str(python))) + "\n", done.stderr


def test_bindings_missing_in_an_environment_of_uv(machine: Machine) -> None:
    """Where NVML's bindings are missing the message names uv, as there is no pip."""
    python = environment(machine.folder / "uv", configuration=UV)
    code = "import reserve_gpu; reserve_gpu.reserve()"
    done = machine.command(str(python), "-c", code, PYTHONPATH=str(ROOT))
    assert done.stderr.endswith(f"Run: uv pip install --python {python} nvidia-ml-py\n")
