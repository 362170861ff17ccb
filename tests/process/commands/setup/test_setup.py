"""`reserve-gpu setup` as a command: its result, and the cases that it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup import setup
from tests.support.locked import needs_root
from tests.support.profiles import Home, without_override

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.promise
def test_setup_and_undo(home: Home) -> None:
    """A second run changes nothing, and --undo restores the file."""
    home.write(b"x = 1\n")
    before = home.configuration()
    first = home.setup().stdout
    for word in (str(home.config), sys.executable, "%reserve_gpu"):
        assert word in first
    added = home.configuration()
    assert f"# for {setup.python_name()}\n" in home.config.read_text()
    again = home.setup().stdout
    assert again.splitlines()[1:] == first.splitlines()[1:]
    assert again.startswith("Nothing was changed")
    assert home.configuration() == added
    assert str(home.config) in home.setup("--undo").stdout
    assert home.configuration() == before
    assert "no added lines" in home.setup("--undo").stdout


def test_unwritable_home_is_refused(home: Home) -> None:
    prefix = without_override()
    home.path.chmod(0o555)
    assert f"{home.path} is not a writable folder" in home.fail_setup(prefix=prefix)
    assert home.files() == {}


@needs_root
@pytest.mark.parametrize("words", [[], ["--undo"]])
def test_root_is_refused_in_the_home_of_another_user(words: list[str], home: Home) -> None:
    """The error tells the other user which command to run."""
    os.chown(home.path, 65501, 65501)  # an account without a name
    line = home.fail_setup(*words)
    assert f"{home.path} belongs to user 65501" in line
    assert line.endswith(" ".join(["setup", *words]))
    assert not (home.path / ".ipython").exists()


def make_bare_environment(folder: Path) -> Path:
    """Make an environment without packages, and return its Python."""
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


@pytest.mark.parametrize("mark", ["uv-receipt.toml", "../CACHEDIR.TAG"])
def test_environment_of_a_tool_is_refused(mark: str, home: Home, tmp_path: Path) -> None:
    """In an environment that uv or pipx made for one tool, setup changes nothing."""
    environment = tmp_path / "tools" / "reserve-gpu"
    python = make_bare_environment(environment)
    (environment / mark).touch()
    assert f"{environment}." in home.fail_setup(python=python, code=2)
    assert home.files() == {}


def test_signal_while_ipython_starts_leaves_no_file(home: Home) -> None:
    temporary = home.path / "temporary"
    temporary.mkdir()
    home.write(b"import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()\n")
    done = subprocess.run(
        [sys.executable, "-m", "reserve_gpu", "setup"],
        env=home.environ(TMPDIR=temporary), cwd="/", check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 128 + 15
    assert list(temporary.iterdir()) == []
