"""`reserve-gpu setup`: its output, the place of the file, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup import setup
from tests.support.profiles import (
    BLOCK_OF_ANOTHER,
    OLD_BLOCK,
    OWN_LINE,
    Home,
    without_override,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.promise
def test_setup_and_undo(home: Home) -> None:
    """A second run changes nothing, and --undo restores the file; each names what it did."""
    home.write(b"x = 1\n")
    before = home.configuration()
    loads = (
        f"Whenever IPython or a Jupyter kernel of {sys.executable} starts, it loads the extension."
    )
    tries = f"Try it: {sys.executable} -m IPython -c '%reserve_gpu'"
    assert home.run().stdout.splitlines() == [f"Added lines to {home.config}", loads, tries]
    once = home.configuration()
    assert f"# for {setup.python_name()}\n" in home.config.read_text()
    assert home.run().stdout.splitlines() == [
        f"Nothing was changed. The lines are already in {home.config}", loads, tries,
    ]  # fmt: skip
    assert home.configuration() == once
    assert home.run("--undo").stdout == (
        f"Removed the added lines from {home.config}. The rest of the file is unchanged.\n"
    )
    assert home.configuration() == before
    assert home.run("--undo").stdout == f"{home.config} contains no added lines.\n"


@pytest.mark.parametrize(
    ("data", "output"),
    [
        (OLD_BLOCK, "Removed {}, which contained nothing else.\n"),
        (
            OLD_BLOCK.replace(b"import", b"x = 1\nimport", 1),
            (
                "Removed the added lines from {}. The rest of the file and 1 line that you added "
                "between them are unchanged.\n"
            ),
        ),
        (
            BLOCK_OF_ANOTHER,
            (
                "The lines in {} are not for this Python, and are kept for /x/bin/python3.9.\n"
                "While they are there, this Python also loads the extension if it is installed.\n"
            ),
        ),
        (
            OWN_LINE,
            (
                "{0} contains no added lines.\n"
                "Not removed: your own line in {0} that mentions reserve_gpu.\n"
            ),
        ),
    ],
)
def test_undo_reports_what_it_keeps(data: bytes, output: str, home: Home) -> None:
    """--undo names what it removed, and what it kept for other Pythons or for the user."""
    home.write(data)
    assert home.run("--undo").stdout == output.format(home.config)


def test_undo_for_one_of_two_pythons(home: Home) -> None:
    """--undo keeps the lines if they are also for another Python."""
    mine = f"# for {setup.python_name()}\n".encode()
    home.write(BLOCK_OF_ANOTHER.replace(b"import", mine + b"import", 1))
    assert "are no longer for this Python, and are kept for /x/" in home.run("--undo").stdout
    assert home.config.read_bytes() == BLOCK_OF_ANOTHER


# -- refusals: one line, and nothing changed -------------------------------------------------------


def make_folder(path: Path) -> None:
    path.mkdir(parents=True)


def make_pipe(path: Path) -> None:
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def make_dead_link(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to("no folder/of this name")


def make_loop(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(path.name)


def make_file_for_folder(path: Path) -> None:
    path.parents[1].write_text("a file")


@pytest.mark.parametrize(
    "make", [make_folder, make_pipe, make_dead_link, make_loop, make_file_for_folder]
)
def test_file_that_cannot_be_created(make: Callable[[Path], object], home: Home) -> None:
    """A configuration that can't be created is refused in one line; --undo finds no lines."""
    make(home.config)
    names = set(home.path.rglob("*"))
    assert f"{home.config} can't be created" in home.refused()
    assert "contains no added lines" in home.run("--undo").stdout
    assert set(home.path.rglob("*")) == names


def test_home_that_cannot_be_written(home: Home) -> None:
    """A home directory without write permission is refused in one line."""
    prefix = without_override()
    home.path.chmod(0o555)
    assert f"{home.path} is not a writable folder" in home.refused(prefix=prefix)
    assert home.files() == {}


@pytest.mark.parametrize(
    ("data", "words", "output"),
    [
        (OWN_LINE, ["--undo"], "your own line"),
        (b"x = 1\n", ["--undo"], "no added lines"),
        (BLOCK_OF_ANOTHER, ["--undo"], "are kept for /x/bin/python3.9"),
        (b"x = 1\n", [], None),
        (OLD_BLOCK, [], None),
        (OLD_BLOCK, ["--undo"], None),
    ],
)
def test_read_only_file(data: bytes, words: list[str], output: str | None, home: Home) -> None:
    """A read-only file is refused only if it has to be changed."""
    prefix = without_override()
    home.write(data)
    home.config.chmod(0o444)
    home.config.parent.chmod(0o555)
    before = home.files()
    if output:
        assert output in home.run(*words, prefix=prefix).stdout
    else:
        line = home.refused(*words, prefix=prefix)
        assert line == f"{home.config} can't be changed: Permission denied."
    assert home.files() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
@pytest.mark.parametrize("words", [[], ["--undo"]])
def test_root_in_the_home_of_another_user(words: list[str], home: Home) -> None:
    """In another user's home, root is refused, and the line names the command for that user."""
    os.chown(home.path, 65501, 65501)  # an account without a name
    line = home.refused(*words)
    assert f"{home.path} belongs to user 65501" in line
    assert line.endswith(" ".join(["setup", *words]))
    assert not (home.path / ".ipython").exists()


@pytest.mark.parametrize("mark", ["uv-receipt.toml", "pipx_metadata.json", "../CACHEDIR.TAG"])
def test_environment_of_a_tool(mark: str, home: Home, tmp_path: Path) -> None:
    """In an environment that uv or pipx made for a tool, it says that IPython runs elsewhere."""
    python = make_bare_environment(tmp_path / "tools" / "reserve-gpu")
    (tmp_path / "tools" / "reserve-gpu" / mark).touch()
    line = home.refused(python=python, code=2)
    assert f"in a separate environment, {tmp_path / 'tools' / 'reserve-gpu'}." in line
    assert home.files() == {}


def test_environment_of_a_tool_that_provides_ipython(home: Home, tmp_path: Path) -> None:
    """If `ipython` on PATH runs in the tool's environment, setup is not refused."""
    python = make_bare_environment(tmp_path / "ipython")
    (tmp_path / "ipython" / "uv-receipt.toml").touch()
    (tmp_path / "ipython" / "bin" / "ipython").write_text(f"#!{python}\n")
    (tmp_path / "ipython" / "bin" / "ipython").chmod(0o755)
    (home.path / "bin").mkdir()
    (home.path / "bin" / "ipython").symlink_to(tmp_path / "ipython" / "bin" / "ipython")
    line = home.refused(python=python, PATH=f"{home.path}/bin:/usr/bin:/bin")
    assert (
        line == f"The lines were not added to {home.config}. IPython is not installed for {python}."
    )


def make_bare_environment(folder: Path) -> Path:
    """Make an environment without packages, and return its Python."""
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def test_a_signal_while_ipython_starts(home: Home) -> None:
    """SIGTERM while IPython starts leaves no temporary file."""
    temporary = home.path / "temporary"
    temporary.mkdir()
    home.write(b"import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()\n")
    done = subprocess.run(
        [sys.executable, "-m", "reserve_gpu", "setup"],
        env=home.environ(TMPDIR=temporary), cwd="/", check=False, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 128 + 15
    assert list(temporary.iterdir()) == []
