"""A command loads no other one, and can be removed from the package."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.registry import COMMANDS
from tests.support.machine import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine

NOT_FOR_STATUS = {
    *("reserve_gpu.commands.run", "reserve_gpu.commands.hosts.remote_status", "reserve_gpu.api"),
    *("reserve_gpu.allocation.attempt", "reserve_gpu.request_options"),
    *("reserve_gpu.render.progress", "tomllib"),
}


def modules_loaded_by(machine: Machine, *words: str) -> set[str]:
    """Return the modules that a command loads."""
    done = machine.python(
        "import atexit, sys\n"
        "from reserve_gpu.cli import main\n"
        "atexit.register(lambda: print(*sys.modules))\n"
        f"main.main({words!r})\n"
    )
    return {*done.stdout.splitlines()[-1].split()}


def test_run_loads_no_other_command(machine: Machine) -> None:
    loaded = modules_loaded_by(machine, "run", "--help")
    names = {name.split(".")[2] for name in loaded if name.startswith("reserve_gpu.commands.")}
    assert names == {"registry", "output", "run"}


def test_status_loads_neither_run_nor_ssh(machine: Machine) -> None:
    loaded = modules_loaded_by(machine, "status")
    assert "reserve_gpu.commands.status.status" in loaded
    assert loaded & NOT_FOR_STATUS == set()


USE_THE_PACKAGE = """
import contextlib, io, json, sys
import reserve_gpu
from reserve_gpu.cli import main

def output_of(*words):
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main.main(words)
        except SystemExit as end:  # raised by argparse after the help
            code = end.code
    out.seek(0)
    return code, out.read()

code, page = output_of("--help")
assert code == 0 and "status" in page, page
for name in json.loads(REMOVED):
    code, error = output_of(*name.split())
    assert code == 2 and name.split()[0] in error, error
    assert f"\\n    {name} " not in page
assert output_of("status")[0] == 0
print(reserve_gpu.reserve())
print(reserve_gpu.__file__)
"""


@pytest.mark.parametrize("folder", ["top", "report", "agents"])
def test_the_package_works_without_a_command(machine: Machine, tmp_path: Path, folder: str) -> None:
    """Its folder and its rows in the registry are removed; the command is unknown then."""
    package = tmp_path / "reserve_gpu"
    shutil.copytree(ROOT / "reserve_gpu", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(package / "commands" / folder)
    removed = [name for name, row in COMMANDS.items() if row.module.startswith(f"{folder}.")]
    with (package / "commands" / "registry.py").open("a") as file:
        file.writelines(f"\ndel COMMANDS[{name!r}]\n" for name in removed)
    code = USE_THE_PACKAGE.replace("REMOVED", repr(json.dumps(removed)))
    done = machine.python(code, PYTHONPATH=str(tmp_path))
    assert not done.stderr
    assert done.stdout.startswith("Reserving GPU0: ")
    assert str(tmp_path) in done.stdout
