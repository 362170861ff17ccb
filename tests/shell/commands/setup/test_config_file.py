"""Changes of `reserve-gpu setup` to a real ipython_config.py."""

from __future__ import annotations

import os
from fcntl import LOCK_EX, flock
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup.config_file import Config, SetupError, added
from tests.support.locked import needs_root
from tests.support.profiles import BLOCK_OF_ANOTHER, OLD_BLOCK, OWN_LINE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.profiles import Home

PYTHON = b"/one/bin/python3.11"
BLOCK = added(b"", PYTHON)
OTHER_UID = 65501  # an account without a name


def config_of(home: Home) -> Config:
    """Return the configuration file, for one Python."""
    return Config(str(home.config), PYTHON)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"x = 1\n" + BLOCK, b"x = 1\n"),
        (OLD_BLOCK.replace(b"import", b"x = 1\nimport", 1), b"x = 1\n"),
        (BLOCK_OF_ANOTHER, BLOCK_OF_ANOTHER),
        (BLOCK_OF_ANOTHER.replace(b"import", b"# for %s\nimport" % PYTHON, 1), BLOCK_OF_ANOTHER),
        (OWN_LINE, OWN_LINE),
        (OLD_BLOCK, None),
    ],
)
def test_remove(before: bytes, after: bytes | None, home: Home) -> None:
    """Other lines stay, and a file with nothing else is deleted."""
    home.write(before)
    config_of(home).remove()
    assert [*home.files().values()] == ([] if after is None else [after])


def test_file_is_replaced(home: Home) -> None:
    """The old file is never overwritten: a second name of it still has the old content."""
    home.write(b"x = 1\n")
    old = home.path / "old"
    old.hardlink_to(home.config)
    assert config_of(home).add()
    assert not config_of(home).add()
    assert old.read_bytes() == b"x = 1\n"
    old.unlink()
    old.hardlink_to(home.config)
    config_of(home).remove()
    assert old.read_bytes() == b"x = 1\n" + BLOCK
    assert home.configuration() == {".ipython/profile_default/ipython_config.py": b"x = 1\n"}


@pytest.mark.parametrize("verb", ["add", "remove"])
def test_concurrent_run_is_refused(verb: str, home: Home) -> None:
    """A run fails and changes nothing while another run is changing the file."""
    home.write(b"x = 1\n")
    folder = os.open(home.config.parent, os.O_RDONLY)
    try:
        flock(folder, LOCK_EX)
        with pytest.raises(SetupError, match="Try again"):
            getattr(config_of(home), verb)()
    finally:
        os.close(folder)
    assert [*home.files().values()] == [b"x = 1\n"]


def make_folder(path: Path) -> None:
    """Create a folder in place of the file."""
    path.mkdir(parents=True)


def make_pipe(path: Path) -> None:
    """Create a pipe in place of the file."""
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def make_dead_link(path: Path) -> None:
    """Create a link to a file that can't be created."""
    path.parent.mkdir(parents=True)
    path.symlink_to("no folder/of this name")


def make_file_for_folder(path: Path) -> None:
    """Create a file in place of the folder of profiles."""
    path.parents[1].write_text("a file")


@pytest.mark.parametrize("make", [make_folder, make_pipe, make_dead_link, make_file_for_folder])
def test_file_that_cannot_be_created(make: Callable[[Path], None], home: Home) -> None:
    """Lines are refused if the file can't be created, and `--undo` finds no lines."""
    make(home.config)
    names = set(home.path.rglob("*"))
    with pytest.raises(SetupError, match="can't be created"):
        config_of(home).check_add()
    assert len(config_of(home).remove()) == 1
    assert set(home.path.rglob("*")) == names


def test_folder_that_cannot_be_created(home: Home) -> None:
    make_file_for_folder(home.config)
    with pytest.raises(SetupError, match=r"profile_default can't be created"):
        config_of(home).add()


@needs_root
@pytest.mark.parametrize("owned", [".", ".ipython", ".ipython/profile_default"])
def test_root_does_not_change_the_home_of_another_user(owned: str, home: Home) -> None:
    """The error tells the other user which command to run."""
    home.config.parent.mkdir(parents=True)
    os.chown(home.path / owned, OTHER_UID, OTHER_UID)
    with pytest.raises(SetupError, match=rf"belongs to user {OTHER_UID}\b.*run: COMMAND$"):
        config_of(home).check_owner("COMMAND")


@needs_root
def test_root_does_not_change_the_file_of_another_user_behind_a_link(home: Home) -> None:
    dotfile = home.path / "dotfile"
    dotfile.touch()
    os.chown(dotfile, OTHER_UID, OTHER_UID)
    home.config.parent.mkdir(parents=True)
    home.config.symlink_to(dotfile)
    with pytest.raises(SetupError, match=rf"{dotfile} belongs to user {OTHER_UID}"):
        config_of(home).check_owner("COMMAND")


@needs_root
@pytest.mark.parametrize("verb", ["add", "remove"])
def test_file_keeps_its_owner_and_mode(verb: str, home: Home) -> None:
    """The owner, group and mode stay if root replaces the file, and a link stays a link."""
    dotfile = home.path / "dotfile"
    dotfile.write_bytes(b"x = 1\n" + BLOCK * (verb == "remove"))
    os.chown(dotfile, OTHER_UID, OTHER_UID + 1)
    dotfile.chmod(0o640)
    home.config.parent.mkdir(parents=True)
    home.config.symlink_to("../../dotfile")
    getattr(config_of(home), verb)()
    status = dotfile.stat()
    assert (status.st_uid, status.st_gid) == (OTHER_UID, OTHER_UID + 1)
    assert status.st_mode & 0o777 == 0o640
    assert home.config.is_symlink()
