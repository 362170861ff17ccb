"""No test writes outside of its temporary folder: the guard that sees to it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

pytestmark = pytest.mark.process

BAIT = ROOT / "written-by-a-careless-test"
CARELESS = {
    "open": "open({bait!r}, 'w')",
    "os.open": "os.open({bait!r}, os.O_CREAT | os.O_WRONLY)",
    "relative": "os.chdir({root!r}); open({name!r}, 'a')",
    "relative to a descriptor": "os.open({name!r}, os.O_CREAT | os.O_WRONLY, dir_fd=folder)",
    "through a link": "link.symlink_to({root!r}); (link / {name!r}).write_text('')",
    "through a link to the file": "link.symlink_to({bait!r}); link.write_text('')",
    "folder": "os.mkdir({bait!r})",
    "link": "os.symlink('/', {bait!r})",
    "rename": "link.touch(); link.rename({bait!r})",
    "remove": "os.remove({root!r} + '/README.md')",
    "mode": "os.chmod({root!r} + '/README.md', 0o644)",
    "database": "sqlite3.connect({bait!r})",
    "lock directory": "os.mkdir('/tmp/reserve_gpu')",
}
HARMLESS = {
    "temporary": "link.write_text('')",
    "temporary, relative": "os.open('x', os.O_CREAT, dir_fd=os.open(tmp_path, os.O_RDONLY))",
    "device": "open('/dev/null', 'w').write('x')",
    "reading": "open({root!r} + '/README.md').read()",
    "cache": "py_compile.compile({root!r} + '/tests/__init__.py')",
    "memory": "sqlite3.connect(':memory:')",
}
MARKED = "wrote outside of its temporary folder"
HEAD = """
import os, py_compile, sqlite3, subprocess
import pytest

@pytest.fixture(autouse=True)
def _folder(monkeypatch):
    monkeypatch.chdir('.')  # and back

"""
TEST = """
def test_{number}(tmp_path):
    link, folder = tmp_path / 'link', os.open({root!r}, os.O_RDONLY)
    try:
        {statement}
    except PermissionError:
        pass
"""


def run(
    folder: Path, statements: Iterable[str], **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run tests with one statement each under the guard, in a pytest of its own."""
    names = {"bait": str(BAIT), "root": str(ROOT), "name": BAIT.name}
    tests = (
        TEST.format(number=number, statement=statement.format(**names), **names)
        for number, statement in enumerate(statements)
    )
    (folder / "test_it.py").write_text(HEAD + "".join(tests))
    options = ["-rA", "-p", "tests.guard", "-p", "no:cacheprovider", "-c", os.devnull]
    options += ["--rootdir", str(folder), "--basetemp", str(folder / "base"), "test_it.py"]
    variables = {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options], env={**os.environ, **variables, **environ},
        cwd=folder, text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip


def test_careless(tmp_path: Path) -> None:
    """A test that writes to the checkout or to the real locks fails, and nothing is written."""
    done = run(tmp_path, CARELESS.values())
    failed = {f"ERROR test_it.py::test_{number}" for number in range(len(CARELESS))}
    assert {line.partition(" - ")[0] for line in done.stdout.splitlines()} >= failed
    assert done.stdout.count(f"Failed: {MARKED}") == len(CARELESS), done.stdout
    assert done.returncode == 1
    assert not os.path.lexists(BAIT)


def test_harmless(tmp_path: Path) -> None:
    """A test may write to its temporary folder, to devices and to caches, and read anything."""
    done = run(tmp_path, HARMLESS.values())
    assert done.returncode == 0, done.stdout


def test_elsewhere(tmp_path: Path) -> None:
    """What is neither temporary nor the machine's is written, and the test fails all the same."""
    temporary, elsewhere = tmp_path / "temporary", tmp_path / "elsewhere"
    temporary.mkdir()
    done = run(tmp_path, [f"open({str(elsewhere)!r}, 'w').close()"], TMPDIR=str(temporary))
    assert done.returncode == 1, done.stdout
    assert f"{MARKED}:\nopen {elsewhere}" in done.stdout
    assert elsewhere.exists()


@pytest.mark.parametrize(
    "name", [".ipython/profile_default/ipython_config.py", ".local/share/jupyter/kernels/gpu"]
)
def test_child(tmp_path: Path, name: str) -> None:
    """A session in which a child changes a file of the person's fails, and names what changed."""
    path = tmp_path / "home" / name
    path.parent.mkdir(parents=True)
    statement = f"subprocess.check_call(['touch', {str(path)!r}])"
    done = run(tmp_path, [statement], HOME=str(tmp_path / "home"))
    assert done.returncode == 1, done.stdout
    _, _, summary = done.stdout.partition("changed while the tests ran")
    assert str(path if path.suffix else path.parent) in summary
    assert "1 passed" in summary
