"""The table of commands: what is in it is known everywhere, and what is not is known nowhere."""

from __future__ import annotations

import ast
import json
import shutil
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.table import COMMANDS, NAMES, Form, OptionOfMagic, Subcommand, Words, load
from tests.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.machine import Machine

# Each of them can be deleted: its folder here and there, and its row.
DELETABLE = sorted(NAMES & {"top", "hosts", "kernels", "report", "export"})
TABLE = ROOT / "reserve_gpu" / "commands" / "table.py"
PLACES = ("reserve_gpu", "tests", "benchmarks", "docs", "labextension/jupyterlab_reserve_gpu")


def test_what_a_row_names_is_there() -> None:
    """Each name in a row is a subcommand, or something that can be called, in its own folder."""
    for command in COMMANDS:
        for part in (part for part in command.parts if part.home):
            assert part.home.startswith(f"{command.name}.")
            found = load(part.home)
            assert isinstance(found, Subcommand) if isinstance(part, Words) else callable(found)


def imported(path: Path) -> Iterator[str]:
    """Yield the names that a file imports, late or for types as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Late":
            yield f"reserve_gpu.{ast.unparse(node.args[0]).strip(chr(39))}"


@pytest.mark.full
@pytest.mark.parametrize("name", DELETABLE)
def test_nobody_else_imports_it(name: str) -> None:
    """No module outside of a command's folders imports it, and its row alone names it."""
    own = (ROOT / "reserve_gpu" / "commands" / name, ROOT / "tests" / "commands" / name)
    package = f"reserve_gpu.commands.{name}"
    for path in (path for place in PLACES for path in (ROOT / place).rglob("*.py")):
        if not {*path.parents}.intersection(own):
            found = {f"{each}." for each in imported(path)}
            assert not [each for each in found if each.startswith(f"{package}.")], path


def without(name: str, package: Path) -> None:
    """Delete a command in a copy of the package: its folder and its row."""
    shutil.rmtree(package / "commands" / name)
    calls = [node for node in ast.walk(ast.parse(TABLE.read_text())) if isinstance(node, ast.Call)]
    (row,) = (call for call in calls if ast.unparse(call).startswith(f"Command('{name}'"))
    lines = enumerate(TABLE.read_text().splitlines(keepends=True), 1)
    gone = range(row.lineno, (row.end_lineno or row.lineno) + 1)
    left = "".join(line for number, line in lines if number not in gone)
    (package / "commands" / "table.py").write_text(left)


SHOW = """
import contextlib, io, json, sys
import reserve_gpu
from reserve_gpu.cli import main; from reserve_gpu import request_options
from reserve_gpu.ipython import completion
words, flags, forms = json.loads(KNOWN)

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
for each in words:
    code, said = typed(*each.split())
    assert code == 2 and "There is no command" in said, said
    assert f"\\n    {each.split()[0]} " not in page or each.split()[0] == "kernel"
_, offered = completion.complete("--")
manual = request_options.magic_parser().format_help()
for each in flags:
    assert each not in offered and each not in manual
    try:
        request_options.magic_parser().parse_args([each])
        raise SystemExit(f"{each} is known")
    except reserve_gpu.RequestError as error:
        assert "There is no option" in str(error), error
    code, said = typed("status", each)
    assert code == 2 and "There is no option" in said, said
for each in forms:
    code, said = typed("status", "--format", each)
    assert code == 2 and "There are: text, json." in said, said
assert typed("status")[0] == 0
print(reserve_gpu.reserve())
print(reserve_gpu.__file__)
"""


@pytest.mark.process
@pytest.mark.parametrize("name", DELETABLE)
def test_what_has_no_row_is_unknown(machine: Machine, tmp_path: Path, name: str) -> None:
    """Without its folder and its row a command is unknown, and a GPU is reserved as before."""
    package = tmp_path / "reserve_gpu"
    shutil.copytree(ROOT / "reserve_gpu", package, ignore=shutil.ignore_patterns("__pycache__"))
    without(name, package)
    (command,) = (each for each in COMMANDS if each.name == name)
    known = [
        [part.typed for part in command.parts if isinstance(part, Words)],
        [part.flag for part in command.parts if isinstance(part, OptionOfMagic)],
        [part.name for part in command.parts if isinstance(part, Form)],
    ]
    done = machine.python(SHOW.replace("KNOWN", repr(json.dumps(known))), PYTHONPATH=str(tmp_path))
    assert not done.stderr
    assert done.stdout.startswith("Reserving GPU0: ")
    assert str(tmp_path) in done.stdout
