"""Misspell calls into our own modules at random places of a copy, and ask mypy which it sees.

    python -m tests.misspelling [SEED]

A name gets other letters, `module.name`, or a call an argument that it does not take. Prints those
that mypy does not see; the exit code is 1 if there are any.
"""

from __future__ import annotations

import ast
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COUNT = 60
MARK = "misspelt_"
# Their classes have bases of other packages: what mypy sees there depends on what is installed.
OTHERS = ("dask.py", "provisioner.py")
CACHED = {
    "is_wsl",
    "remember_over_fork",
}  # what functools.cache makes takes all that can be hashed, to mypy


class Place(NamedTuple):
    """Where something can be misspelt.

    first: the line in which it begins. line, column: where letters go in, in bytes.
    name: what is misspelt. before, after: what goes in there too.
    """

    path: str
    first: int
    line: int
    column: int
    name: str
    before: str = "_"
    after: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.name}{self.after and '()'}"


def places() -> list[Place]:
    """Return all places of the package."""
    return [
        place
        for path in sorted((ROOT / "reserve_gpu").rglob("*.py"))
        if path.name not in OTHERS
        for place in _places(str(path.relative_to(ROOT)), path.read_bytes())
    ]


def _places(path: str, source: bytes) -> Iterator[Place]:
    tree, lines = ast.parse(source), source.splitlines()
    ours = list(_imported(tree))
    modules, names = ({name for name, is_one in ours if is_one is kind} for kind in (True, False))

    def is_ours(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return isinstance(node.value, ast.Name) and node.value.id in modules
        return isinstance(node, ast.Name) and node.id in names

    def is_cached(node: ast.expr) -> bool:
        return ast.unparse(node).rpartition(".")[2] in CACHED

    for node in _seen_by_types(tree):
        if isinstance(node, ast.Attribute) and is_ours(node):
            yield Place(path, node.lineno, *_end(node), node.attr)
        elif isinstance(node, ast.Call) and is_ours(node.func) and (comma := _comma(node, lines)):
            if is_cached(node.func):
                continue
            line, column = _end(node)
            yield Place(path, node.lineno, line, column - 1, ast.unparse(node.func), comma, "=0")


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _comma(call: ast.Call, lines: Sequence[bytes]) -> str | None:
    """Return what comes before one more argument, None where none can follow."""
    line, column = _end(call)
    before = b"\n".join(
        [*lines[call.lineno - 1 : line - 1], lines[line - 1][: column - 1]]
    ).rstrip()
    if b"#" in before or any(isinstance(each, ast.GeneratorExp) for each in call.args):
        return None
    return " " if before.endswith((b",", b"(")) else ", "


def _seen_by_types(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that only count at run time, and what types say can't come."""
    yield tree
    skipped: list[ast.stmt] = []
    if isinstance(tree, ast.If):
        test = ast.unparse(tree.test)
        skipped += tree.orelse if test == "TYPE_CHECKING" else []
        is_told = ("not TYPE_CHECKING", "not isinstance(", "not callable(", "sys.platform")
        skipped += tree.body if any(text in test for text in is_told) else []
    for node in ast.iter_child_nodes(tree):
        if node not in skipped:
            yield from _seen_by_types(node)


def _imported(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield what a file imports of ours: the names, and whether each is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("reserve_gpu"):
            folder = ROOT / str(node.module).replace(".", "/")
            for alias in node.names:
                yield alias.asname or alias.name, (folder / f"{alias.name}.py").exists()


def chosen(seed: int) -> list[Place]:
    """Return all places in some order, but of those that begin in the same line only one."""
    every = places()
    random.Random(seed).shuffle(every)  # noqa: S311 - nothing secret
    return list({(place.path, place.first): place for place in every}.values())


def unseen(misspelt: Sequence[Place]) -> list[Place]:
    """Misspell all of them at once in a copy; returns those that mypy does not report."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "reserve_gpu", Path(folder, "reserve_gpu"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for number, place in sorted(enumerate(misspelt), key=lambda each: each[1], reverse=True):
            file = Path(folder, place.path)
            lines = file.read_bytes().splitlines(keepends=True)
            line, text = lines[place.line - 1], f"{place.before}{MARK}{number}{place.after}"
            lines[place.line - 1] = line[: place.column] + text.encode() + line[place.column :]
            file.write_bytes(b"".join(lines))
        command = [sys.executable, "-m", "mypy", "reserve_gpu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 1:  # it saw nothing at all, or could not look
        raise RuntimeError(done.stdout + done.stderr)
    seen = {int(number) for number in re.findall(rf"{MARK}(\d+)", done.stdout)}
    return [place for number, place in enumerate(misspelt) if number not in seen]


def main(seed: int) -> int:
    """Print what mypy does not see of some places."""
    left = unseen(chosen(seed)[:COUNT])
    print(*left, f"{COUNT - len(left)} of {COUNT} are seen", sep="\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
