"""The working directory may be another user's: nothing is started or imported from there."""

from __future__ import annotations

import ast

from tests.support.machine import ROOT

# -- one way --------------------------------------------------------------------------------------


def test_one_module_builds_the_command_of_a_python() -> None:
    """Only `spawn` makes sys.executable a word of a command."""
    for path in (ROOT / "reserve_gpu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List | ast.Tuple) and path.name != "spawn.py":
                assert "sys.executable" not in map(ast.unparse, node.elts), path


def test_few_modules_start_programs() -> None:
    """A module that starts a program has its path from `spawn`, or from the user's own command."""
    starters = {"subprocesses.py", "srun.py", "node.py", "handoff.py", "command.py", "setup.py"}
    calls = ("subprocess.", "asyncio.create_subprocess", "os.exec", "os.spawn", "os.posix_spawn")
    for path in (ROOT / "reserve_gpu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(calls):
                assert path.name in starters, path
