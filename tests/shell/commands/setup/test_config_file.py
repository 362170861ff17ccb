"""Changes of `reserve-gpu setup` to a real ipython_config.py."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.commands.setup.config_file import Config, SetupError, added
from tests.support.locked import needs_root, watched
from tests.support.profiles import BLOCK_OF_ANOTHER, CONFIG_FILE, OLD_BLOCK, Home

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    assert home.configuration() == {CONFIG_FILE: b"x = 1\n"}


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


@pytest.mark.parametrize(
    ("verb", "data", "mode", "left"),
    [("add", b"x = 1\n", "w", b"y = 2"), ("remove", BLOCK, "a", BLOCK + b"y = 2")],
)
def test_change_of_an_editor_is_not_overwritten(
    verb: str, data: bytes, mode: str, left: bytes, home: Home
) -> None:
    """A change that an editor saves during a step stays, and the step fails."""
    home.write(data)
    saved: list[str] = []

    def save(event: str, arguments: tuple[Any, ...]) -> None:
        is_copy = event == "open" and "before-reserve" in str(arguments[0])
        is_moved = event in ("os.rename", "os.remove") and arguments[0] == str(home.config)
        if (is_copy or is_moved) and not saved:
            saved.append(event)
            with home.config.open(mode) as file:
                file.write("y = 2")

    with watched(save), pytest.raises(SetupError, match="was changed by another program"):
        getattr(config_of(home), verb)()
    assert home.files()[CONFIG_FILE] == left


@pytest.mark.parametrize("verb", ["check_add", "add", "remove"])
def test_large_file_is_not_read(verb: str, home: Home) -> None:
    """A file of more than 1 MiB is neither parsed nor changed."""
    home.write(b"")
    os.truncate(home.config, 1 << 40)
    with pytest.raises(SetupError, match="larger than 1 MiB"):
        getattr(config_of(home), verb)()
    assert home.config.stat().st_size == 1 << 40


# -- other users -----------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("owned", [".", "dotfile"])
def test_root_does_not_change_the_home_of_another_user(owned: str, home: Home) -> None:
    """The error tells the other user which command to run; links are followed."""
    home.config.parent.mkdir(parents=True)
    (home.path / "dotfile").touch()
    home.config.symlink_to(home.path / "dotfile")
    os.chown(home.path / owned, OTHER_UID, OTHER_UID)
    with pytest.raises(SetupError, match=rf"belongs to user {OTHER_UID}\b.*run: COMMAND$"):
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


@pytest.fixture
def open_home() -> Iterator[Home]:
    """Make a home directory that other users can reach."""
    with tempfile.TemporaryDirectory() as folder:
        yield Home(Path(folder))


@contextmanager
def as_other_user(home: Home) -> Iterator[None]:
    """Run the test process as another user with write access to the home directory."""
    for path in (home.path, *home.path.rglob("*")):
        path.chmod(path.stat().st_mode | 0o777 * path.is_dir())
    os.seteuid(OTHER_UID)
    try:
        yield
    finally:
        os.seteuid(0)


@needs_root
@pytest.mark.parametrize("verb", ["add", "remove"])
def test_file_of_another_user_is_not_replaced(verb: str, open_home: Home) -> None:
    """A user who may write another user's file does not become its owner."""
    before = b"x = 1\n" + BLOCK * (verb == "remove")
    open_home.write(before).chmod(0o777)
    with as_other_user(open_home), pytest.raises(SetupError, match="belongs to root"):
        getattr(config_of(open_home), verb)()
    assert open_home.configuration() == {CONFIG_FILE: before}
