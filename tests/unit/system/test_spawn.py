"""Tests that only few modules start programs, because the working directory is untrusted."""

from __future__ import annotations

import ast

from tests.support.machine import ROOT

STARTERS = {"subprocesses.py", "srun.py", "node.py", "handoff.py", "command.py", "setup.py"}
CALLS = ("subprocess.", "asyncio.create_subprocess", "os.exec", "os.spawn", "os.posix_spawn")


def test_modules_that_start_programs() -> None:
    """Only `spawn` builds commands with sys.executable, and only the starters run commands."""
    for path in (ROOT / "reserve_gpu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.List | ast.Tuple) and path.name != "spawn.py":
                assert "sys.executable" not in map(ast.unparse, node.elts), path
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(CALLS):
                assert path.name in STARTERS, path
