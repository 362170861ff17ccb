"""`python -m tools.without NAME`: cut a feature or a command out of a copy, and check the rest.

What can be cut is a folder, its tests, its page of the documents and its row in a table. These are
deleted in the copy, and nothing else: whatever breaks then has known of it without need.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).parent.parent
# An installed one would lend mypy what a copy lacks. An editable one is not there.
INSTALLED = Path(sysconfig.get_path("purelib"), "reserve_gpu")
# Where rows stand. Those of pages are in zensical.toml, those for other programs in pyproject.toml.
TABLES = {
    "features": "reserve_gpu/core/features.py",
    "commands": "reserve_gpu/commands/table.py",
}
IN_A_FILE = {"dask": "reserve_gpu/dask.py"}  # people type it: --preload reserve_gpu.dask
# What can't be cut, and why.
KEPT = {
    "run": "the command line is there for it, and other commands start programs by it",
    "status": "it is the picture of every refusal",
    "check": "reserve_gpu.check() is public",
    "reservations": "without it no notebook could release its GPU",
}
# Of --quick: the rules of the house, both tables, and what is asked for, reserved and refused.
QUICK = (
    *("test_rooms.py", "test_documents.py", "test_features.py"),
    *("test_request.py", "test_magic.py", "commands/test_table.py::test_what_a_row_names_is_there"),
)


class MissingError(Exception):
    """What does not hold in the copy, in plain words."""


class Capability(NamedTuple):
    """What can be cut. kind: `features` or `commands`."""

    kind: str
    name: str

    @property
    def code(self) -> str:
        """Return its folder, or its only file."""
        return IN_A_FILE.get(self.name, f"reserve_gpu/{self.kind}/{self.name}")

    def rows(self, table: str) -> set[int]:
        """Return which lines of a table are its row, or its rows; counted from 0."""
        text, module = (ROOT / table).read_text(), self.code.removesuffix(".py").replace("/", ".")
        if table.endswith(".toml"):
            row = re.compile(rf' # {self.name}$|^[\w-]+ = "{module}\b')
            return {n for n, line in enumerate(text.splitlines()) if row.search(line)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                first = str(node.args[0].value)
                if first == self.name or f"reserve_gpu.{first}".startswith(f"{module}."):
                    return {*range(node.lineno - 1, node.end_lineno or 0)}
        return set()

    def row(self, table: str) -> str:
        """Return the text of its row in a table."""
        rows = self.rows(table)
        lines = enumerate((ROOT / table).read_text().splitlines(keepends=True))
        return "".join(line for number, line in lines if number in rows)

    def parts(self) -> list[str]:
        """Return its files and folders. Its pages have its name behind them in zensical.toml."""
        pages = re.findall(r'"(docs/[\w.]+)"', self.row("zensical.toml"))
        return [self.code, f"tests/{self.kind}/{self.name}", *pages]

    def texts(self) -> list[str]:
        """Return what stands in its files, in the order of their names, and its row."""
        code = ROOT / self.code
        files = [code] if code.is_file() else sorted(code.rglob("*.py"))
        return [*(path.read_text() for path in files), self.row(TABLES[self.kind])]


def capabilities() -> dict[str, Capability]:
    """Return all that can be cut, by name."""
    folders = [path.parent for kind in TABLES for path in ROOT.glob(f"*/{kind}/*/__init__.py")]
    found = [Capability(each.parent.name, each.name) for each in folders]
    found += [Capability("commands", name) for name in IN_A_FILE]
    return {each.name: each for each in sorted(found) if each.name not in KEPT}


def copy(folder: Path) -> None:
    """Copy what git knows, or would add, and what ruff and mypy remember of it."""
    git = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for cache in (".mypy_cache", ".ruff_cache"):
        if (ROOT / cache).exists():
            shutil.copytree(ROOT / cache, folder / cache)


def cut(folder: Path, capability: Capability) -> list[str]:
    """Delete it in the copy; returns what was deleted."""
    deleted = capability.parts()
    for part in deleted:
        path = folder / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for table in (TABLES[capability.kind], "zensical.toml", "pyproject.toml"):
        if rows := capability.rows(table):
            lines = enumerate((ROOT / table).read_text().splitlines(keepends=True))
            (folder / table).write_text("".join(line for n, line in lines if n not in rows))
            deleted.append(f"{table}:{min(rows) + 1}")
    return deleted


def named(what: str, texts: Iterable[str]) -> set[str]:
    """Return what code names for people: each Option, or the Words of a shell with their help."""
    found = re.findall(rf'\b{what}\w*\(\s*"([^"]+)",(?! "")', "\n".join(texts))
    return {re.sub(r"^-\w | [A-Z]+$", "", each) for each in found}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a module in the copy, without the settings of who has called this."""
    foreign = ("CUDA_", "RESERVE_GPU_", "PYTEST_", "XDG_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    with tempfile.TemporaryDirectory() as home:
        own = {"HOME": home, "IPYTHONDIR": home, "RESERVE_GPU_LOCK_DIR": f"{home}/locks"}
        return subprocess.run(
            (sys.executable, "-m", *command),
            cwd=folder,
            env={**environ, **own, "PYTHONPATH": str(folder), "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


def passes(folder: Path, missing: str, *command: str) -> str:
    """Return the last line of a check that passes. missing: the pattern of what it misses."""
    done = run(folder, *command)
    lines = done.stdout.splitlines() or [f"it has ended with {done.returncode}"]
    if done.returncode:
        raise MissingError(next((each for each in lines if re.search(missing, each)), lines[-1]))
    return lines[-1].strip("= ")


def cell(folder: Path, scenario: str, text: str, *patterns: str) -> str:
    """Return what a cell shows on a machine of the stand-in driver, with these patterns in it."""
    shell = (sys.executable, "-m", "IPython", "--ext", "reserve_gpu", "-c", text)
    shown = run(folder, "tests.driver", scenario, "--", *shell).stdout
    for pattern in patterns:
        if not re.search(pattern, shown, re.MULTILINE):
            raise MissingError(f"{text!r} does not show {pattern!r}, but:\n{shown.rstrip()}")
    return shown


@contextmanager
def step(text: str) -> Iterator[list[str]]:
    """Say in one line what holds, and how long that took. The list is for more of the line."""
    began, more = time.monotonic(), list[str]()
    try:
        yield more
    except MissingError as error:
        raise MissingError(f"it is not so that {text.rstrip(': ')}: {error}") from error
    print(f"{time.monotonic() - began:6.1f} s  {text}{', '.join(more)}", flush=True)


def check(folder: Path, capability: Capability, tests: list[str]) -> None:
    """Check what has to hold in the copy. tests: by default README's. Raises MissingError."""
    with step("mypy --strict finds nothing missing"):
        passes(folder, "error:", "mypy")
    with step("ruff finds nothing missing"):
        passes(folder, r"^\S+:\d+:\d+", "ruff", "check", "--output-format=concise", ".")
    with step("%reserve_gpu reserves, and --status shows it"):
        text = "%reserve_gpu\n%reserve_gpu --status"
        cell(folder, "two", text, "^Reserving GPU0: ", "^This kernel has GPU0")
    with step("a refusal shows who has what"):
        cell(folder, "busy", "%reserve_gpu", "^0 +busy .*pid 4321000", "^No free GPU devices")
    left = [path.read_text() for path in folder.glob("reserve_gpu/**/*.py")]
    with step("%reserve_gpu? does not know its options: ") as more:
        options = sorted(named("Option", capability.texts()) - named("Option", left))
        more.append(" ".join(options) or "it has none")
        page = cell(folder, "two", "%reserve_gpu?", "--memory SIZE")
        if known := {*options}.intersection(page.replace(",", " ").split()):
            raise MissingError(f"it knows {', '.join(known)}")
    with step("reserve-gpu does not know its commands: ") as more:
        commands = sorted(named("Words", capability.texts()))
        more.append(", ".join(commands) or "it has none")
        for each in commands:
            if "There is no command" not in run(folder, "reserve_gpu", *each.split()).stdout:
                raise MissingError(f"it knows {each}")
    with step("the quickest tests pass: " if tests else "all other tests pass: ") as more:
        more.append(passes(folder, "^(FAILED|ERROR) ", "pytest", "-q", *tests))


def main(words: list[str]) -> int:
    """Cut what is named; returns 0 if all holds without it."""
    parser = argparse.ArgumentParser("python -m tools.without", description=__doc__)
    parser.add_argument("name", nargs="?", help="what to cut")
    parser.add_argument("--list", action="store_true", help="say what can be cut")
    parser.add_argument("--into", metavar="FOLDER", type=Path, help="leave the copy there")
    parser.add_argument("--quick", action="store_true", help="run the quickest tests alone")
    asked, known = parser.parse_args(words), capabilities()
    if asked.list:
        for each in known.values():
            print(f"{each.name:10}{ast.get_docstring(ast.parse(each.texts()[0]))}".splitlines()[0])
        return 0
    if asked.name not in known:
        why = KEPT.get(asked.name, f"it is none of {', '.join(known)}")
        print(f"{asked.name} can't be cut: {why}.", file=sys.stderr)
        return 2
    if INSTALLED.exists():
        print(
            f"mypy would find in {INSTALLED} what a copy lacks: pip uninstall reserve_gpu",
            file=sys.stderr,
        )
        return 2
    if asked.into and asked.into.exists() and any(asked.into.iterdir()):
        parser.error(f"{asked.into} is not empty")
    quick = ["-n0", "-m", "not process and not full", *(f"tests/{each}" for each in QUICK)]
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary).chmod(0o755)  # some tests run as other users
        folder = (asked.into or Path(temporary, "copy")).resolve()
        try:
            copy(folder)
            with step("cut: ") as more:
                more.extend(cut(folder, known[asked.name]))
            check(folder, known[asked.name], quick if asked.quick else [])
        except MissingError as error:
            print(f"Without {asked.name} {error}", file=sys.stderr)
            return 1
    print(f"Without {asked.name} all holds.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
