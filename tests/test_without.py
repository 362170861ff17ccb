"""What `python -m tools.without` says: of what can be cut, and of what knows of it without need."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.machine import ROOT
from tools import without

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs("lint"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no repository"),
    pytest.mark.skipif(
        without.INSTALLED.exists(), reason="reserve_gpu is installed, and lends mypy"
    ),
]


def tool(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the tool of a checkout."""
    return without.run(folder, "tools.without", *words)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout of its own, which git knows."""
    without.copy(tmp_path)
    for words in (("init", "-q"), ("add", "-A")):
        subprocess.run(("git", *words), cwd=tmp_path, check=True)
    return tmp_path


def test_the_smallest_feature_can_be_cut(tmp_path: Path) -> None:
    """Without who waits all holds, step by step, and the copy that is left lacks just that."""
    folder = tmp_path / "copy"
    done = tool(ROOT, "waiters", "--quick", "--into", str(folder))
    assert done.returncode == 0, done.stdout
    assert "mypy --strict finds nothing missing\n" in done.stdout
    assert "%reserve_gpu reserves, and --status shows it\n" in done.stdout
    assert done.stdout.splitlines()[-1] == "Without waiters all holds."
    assert not (folder / "reserve_gpu/features/waiters").exists()
    assert not (folder / "tests/features/waiters").exists()
    changed = {
        path.relative_to(folder).as_posix()
        for path in (*folder.rglob("*.py"), *folder.rglob("*.md"), *folder.rglob("*.toml"))
        if path.read_bytes() != (ROOT / path.relative_to(folder)).read_bytes()
    }
    assert changed == {"reserve_gpu/core/features.py"}


def test_who_knows_of_it_without_need_is_said(checkout: Path) -> None:
    """A module of the core that imports a feature is named, with the line of the import."""
    core = checkout / "reserve_gpu/core/use.py"
    line = "from reserve_gpu.features.waiters import teller\n"
    core.write_text(f"{core.read_text()}\n{line}")
    done = tool(checkout, "waiters", "--quick")
    assert done.returncode == 1
    said = done.stdout.splitlines()[-1]
    assert said.startswith("Without waiters it is not so that mypy --strict finds nothing missing:")
    number = core.read_text().splitlines().index(line.strip()) + 1
    assert f"reserve_gpu/core/use.py:{number}: error: " in said


@pytest.mark.parametrize(
    ("name", "why"),
    [("run", "the command line is there for it"), ("nonsense", "it is none of ")],
)
def test_what_can_not_be_cut(name: str, why: str) -> None:
    """A name that can't be cut is answered in one line, with the reason or with those that can."""
    done = tool(ROOT, name)
    assert (done.returncode, done.stdout.count("\n")) == (2, 1)
    assert done.stdout.startswith(f"{name} can't be cut: {why}")


def test_the_list() -> None:
    """Each folder of a feature or a command is listed with its sentence, less what can't be cut."""
    lines = tool(ROOT, "--list").stdout.splitlines()
    folders = [path.parent.name for path in ROOT.glob("reserve_gpu/[fc]*s/*/__init__.py")]
    named = [line.split()[0] for line in lines]
    assert sorted([*named, *without.KEPT]) == sorted([*folders, *without.IN_A_FILE])
    assert all(len(line.split()) > 2 for line in lines)


def test_each_has_tests() -> None:
    """Whatever can be cut has a folder of tests, which goes with it."""
    for each in without.capabilities().values():
        assert all((ROOT / part).exists() for part in each.parts()), each
        assert each.rows(without.TABLES[each.kind]) or each.name in without.IN_A_FILE
