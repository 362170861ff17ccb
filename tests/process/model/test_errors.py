"""Commands in messages run with the Python that prints them."""

from __future__ import annotations

import os
import shlex
import sys
import venv
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine

SYSTEM_PATH = "/usr/bin:/bin"  # PATH without the scripts of this Python

# -- reserve-gpu -----------------------------------------------------------------------------------

PRINT_COMMAND = "from reserve_gpu.model import errors; print(errors.program_command())"
SCRIPT = "#!{}\nimport sys\nfrom reserve_gpu.__main__ import main\nsys.exit(main())\n"
SCRIPT_OF_SH = "#!/bin/sh\n'''exec' {} \"$0\" \"$@\"\n' '''\n" + SCRIPT.partition("\n")[2]


def environment(folder: Path, script: str | None = SCRIPT) -> Path:
    """Return the Python of a new environment, with or without a script `reserve-gpu`."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    real = os.path.realpath(sys.executable)
    python.symlink_to(real)
    (folder / "pyvenv.cfg").write_text(f"home = {os.path.dirname(real)}\n")
    if script:
        path = folder / "bin" / "reserve-gpu"
        path.write_text(script.format(shlex.quote(str(python))))
        path.chmod(0o755)
    return python


def program_command(machine: Machine, python: Path, path: str, code: str = PRINT_COMMAND) -> str:
    """Return the command that this Python's hints name, after checking that it starts."""
    home = {} if code == PRINT_COMMAND else {"PYTHONPATH": ""}
    done = machine.command(str(python), "-c", code, PATH=path, **home)
    assert done.returncode == 0, done.stderr
    command = done.stdout.removesuffix("\n")
    started = machine.command("sh", "-c", f"{command} --version", PATH=path, **home)
    assert started.stdout.startswith("reserve-gpu"), started.stderr
    return command


def test_script_of_the_environment(machine: Machine) -> None:
    """The name alone is printed if PATH leads to this Python's script, else the script's path."""
    mine, other = environment(machine.folder / "mine"), environment(machine.folder / "other")
    (machine.home / "bin").mkdir()
    (machine.home / "bin" / "reserve-gpu").symlink_to(mine.parent / "reserve-gpu")
    script = f"{mine.parent}/reserve-gpu"
    for first, expected in (
        (mine.parent, "reserve-gpu"),
        (machine.home / "bin", "reserve-gpu"),
        ("/bin", script),
        (f"{other.parent}:{mine.parent}", script),
    ):
        assert program_command(machine, mine, f"{first}:{SYSTEM_PATH}") == expected


def test_fifo_on_path_does_not_block_a_hint(machine: Machine) -> None:
    mine, folder = environment(machine.folder / "mine"), machine.folder / "bin"
    folder.mkdir()
    for path in (machine.folder, folder):
        os.mkfifo(path / "reserve-gpu")
        (path / "reserve-gpu").chmod(0o777)
    for first in (".", "", str(folder)):
        command = program_command(machine, mine, f"{first}:{SYSTEM_PATH}")
        assert command == f"{mine.parent}/reserve-gpu"


def test_module_is_named_without_a_script(machine: Machine) -> None:
    mine, other = environment(machine.folder / "mine", None), environment(machine.folder / "other")
    (mine.parent / "reserve-gpu").symlink_to(other.parent / "reserve-gpu")
    for folder in (other.parent, mine.parent):
        command = program_command(machine, mine, f"{folder}:{SYSTEM_PATH}")
        assert command == f"{mine} -m reserve_gpu"
    # A path that only this process has added is part of the command.
    code = f"import sys; sys.path.append({str(ROOT)!r}); {PRINT_COMMAND}"
    command = program_command(machine, mine, SYSTEM_PATH, code)
    assert command == f"env PYTHONPATH={ROOT} {mine} -m reserve_gpu"


def test_path_with_a_space_is_quoted(machine: Machine) -> None:
    mine = environment(machine.folder / "my env", SCRIPT_OF_SH)
    assert program_command(machine, mine, SYSTEM_PATH) == f"'{mine.parent}/reserve-gpu'"
    assert program_command(machine, mine, f"{mine.parent}:{SYSTEM_PATH}") == "reserve-gpu"


# -- pip and uv ------------------------------------------------------------------------------------

INSTALL = (
    "from reserve_gpu.model import errors; print(errors.install_command('six', instead_of='five'))"
)
UV = "uv = 0.13.9\n"


def environment_without_pip(folder: Path, configuration: str = "") -> Path:
    """Return the Python of a new environment, with these lines in its configuration."""
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
    ids=["uv", "no pip"],
)
def test_packages_are_installed_with_uv_or_pip(
    machine: Machine, name: str, configuration: str, expected: str
) -> None:
    python = environment_without_pip(machine.folder / name, configuration)
    done = machine.command(str(python), "-c", INSTALL, PYTHONPATH=str(ROOT))
    assert done.stdout == expected.replace("{}", shlex.quote(str(python))) + "\n", done.stderr
