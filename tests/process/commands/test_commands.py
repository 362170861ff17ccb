"""The registry of commands: what has a row is known, and a command imports no other one."""

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
NOT_FOR_STATUS = {"reserve_gpu.commands.run", "reserve_gpu.commands.hosts.remote_status"}
NOT_FOR_STATUS |= {"reserve_gpu.api", "reserve_gpu.allocation.attempt"}
NOT_FOR_STATUS |= {"reserve_gpu.request_options", "reserve_gpu.render.progress", "tomllib"}


LOADED = """
import atexit, sys
from reserve_gpu.cli import main
atexit.register(lambda: print(*sys.modules))
main.main(WORDS)
"""


def loaded_by(machine: Machine, *words: str) -> set[str]:
    """Return the modules that a command loads."""
    done = machine.python(LOADED.replace("WORDS", repr(words)))
    return {*done.stdout.splitlines()[-1].split()}


def test_run_imports_no_other_command(machine: Machine) -> None:
    """`reserve-gpu run` loads only its own command."""
    ours = "reserve_gpu.commands."
    loaded = loaded_by(machine, "run", "--help")
    names = {name.split(".")[2] for name in loaded if name.startswith(ours)}
    assert names == {"registry", "output", "run"}


def test_status_loads_only_what_it_shows(machine: Machine) -> None:
    """`reserve-gpu status` loads neither the run command nor ssh."""
    loaded = loaded_by(machine, "status")
    assert "reserve_gpu.commands.status.status" in loaded
    assert loaded & NOT_FOR_STATUS == set()


SHOW = """
import contextlib, io, json, sys
import reserve_gpu
from reserve_gpu.cli import main

def typed(*words):
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main.main(words)
        except SystemExit as end:  # as argparse ends where it has shown the help
            code = end.code
    said.seek(0)
    return code, said.read()

code, page = typed("--help")
assert code == 0 and "status" in page, page
for each in json.loads(KNOWN):
    code, said = typed(*each.split())
    assert code == 2 and "Unknown command" in said, said
    assert f"\\n    {each} " not in page
assert typed("status")[0] == 0
print(reserve_gpu.reserve())
print(reserve_gpu.__file__)
"""


@pytest.mark.parametrize("folder", ["top", "report", "agents"])
def test_what_has_no_row_is_unknown(machine: Machine, tmp_path: Path, folder: str) -> None:
    """Without its folder and its rows a command is unknown, and a GPU is reserved as before."""
    package = tmp_path / "reserve_gpu"
    shutil.copytree(ROOT / "reserve_gpu", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(package / "commands" / folder)
    gone = [name for name, row in COMMANDS.items() if row.module.startswith(f"{folder}.")]
    with (package / "commands" / "registry.py").open("a") as file:
        file.writelines(f"\ndel COMMANDS[{name!r}]\n" for name in gone)
    done = machine.python(SHOW.replace("KNOWN", repr(json.dumps(gone))), PYTHONPATH=str(tmp_path))
    assert not done.stderr
    assert done.stdout.startswith("Reserving GPU0: ")
    assert str(tmp_path) in done.stdout
