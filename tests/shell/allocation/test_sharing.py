"""Sharing a GPU in one process: which processes can hold it together, and their lock files."""

from __future__ import annotations

import json
import os
import stat
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.lock import Lock
from reserve_gpu.model.devices import State
from tests.support.locked import have, locked, needs_root, obstacles, obstructed
from tests.support.reserving import got, would_be_refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here

UID, OTHER_UID = os.geteuid(), 65534


@pytest.fixture
def one(here: Here) -> Here:
    """Return a machine with one idle GPU."""
    here.write("gpu")
    return here


def part_file(here: Here, number: int) -> Path:
    """Return the lock file with this number in its name for a part of GPU 0."""
    return here.locks / f"{here.uuid('0')}.share-{UID}-{number}.lock"


def lock_part_files(here: Here, count: int) -> ExitStack:
    """Lock as many of this user's lock files for parts of GPU 0."""
    with ExitStack() as stack:
        for number in range(count):
            stack.enter_context(have(part_file(here, number)))
        return stack.pop_all()


def count_holders(here: Here) -> int:
    """Return the number of holders of GPU 0."""
    with LockDirectory(str(here.locks)) as directory, directory.mutex():
        return len(directory.holders_of(here.uuid("0")))


def test_new_holders_of_parts_are_noticed(one: Here) -> None:
    """A lock directory that was already read notices a new lock file of any process."""
    uuid = one.uuid("0")
    with LockDirectory(str(one.locks)) as directory:
        with directory.mutex():
            assert directory.holders_of(uuid) == ()
        with one.rival("0", part_mib=1024), directory.mutex():
            assert not isinstance(directory.lock_device(uuid, share=False), Lock)
            own = directory.lock_device(uuid, share=True)
            assert len(directory.holders_of(uuid)) == 2
        assert isinstance(own, Lock)
        with directory.mutex():
            assert len(directory.holders_of(uuid)) == 1
        own.release()


def test_one_of_several_shared_gpus_can_be_reserved_whole(here: Here) -> None:
    """The other GPUs are released."""
    assert got("0,1", memory="1GB") == "0,1"
    assert got("1") == "1"
    assert locked(here.locks) == {f"{here.uuid('1')}.lock"}


def test_only_its_user_can_write_to_the_lock_file_of_a_part(one: Here) -> None:
    """The file stays after a release, and is used again."""
    assert got(memory="1GB") == "0"
    path = part_file(one, 0)
    before = path.stat()
    assert stat.S_IMODE(before.st_mode) == 0o644
    assert (before.st_uid, json.loads(path.read_bytes())["pid"]) == (UID, os.getpid())
    reserve_gpu.release()
    released = json.loads(path.read_bytes())
    assert released["released"] is True
    assert "part_mib" not in released
    assert got(memory="1GB") == "0"
    assert json.loads(path.read_bytes())["released"] is False
    assert [each.stat().st_ino for each in one.locks.glob("*.share-*")] == [before.st_ino]


# -- limits and obstacles --------------------------------------------------------------------------


def test_a_user_can_have_a_limited_number_of_parts_of_a_gpu(one: Here) -> None:
    """A request beyond the limit is refused, and locked files beyond it do not count."""
    with lock_part_files(one, MOST_OF_ONE_USER):
        (row,) = would_be_refused(memory="1GB").rows
        assert str(MOST_OF_ONE_USER) in (row.reason or "")
    with lock_part_files(one, MOST_OF_ONE_USER + 6):
        assert count_holders(one) == MOST_OF_ONE_USER


@needs_root
@pytest.mark.parametrize("state", ["locked", "not locked"])
def test_other_users_files_with_this_users_number_are_skipped(one: Here, state: str) -> None:
    with ExitStack() as stack:
        for number in range(3):
            record = b'{"user": "root", "pid": 1, "part_mib": 1}'
            with have(part_file(one, number), record):
                os.chown(part_file(one, number), OTHER_UID, OTHER_UID)
            if state == "locked":
                stack.enter_context(have(part_file(one, number), record))
        assert got(memory="1GB") == "0"
        assert part_file(one, 3).name in locked(one.locks)


def test_a_lock_under_a_second_name_is_not_a_part(one: Here) -> None:
    """It makes no room either, whatever size its record contains."""
    with one.rival("0", part_mib=1024), have(one.locks / "other.lock", b'{"part_mib": -1}'):
        part_file(one, 9).hardlink_to(one.locks / "other.lock")
        assert count_holders(one) == 1
    with have(one.locks / "other.lock"):
        assert got() == "0"


@pytest.mark.parametrize("name", [".share-0-0x.lock", "x.share-0-0.lock"])
def test_a_file_with_another_name_is_not_a_part(one: Here, name: str) -> None:
    with have(one.locks / f"{one.uuid('0')}{name}"):
        assert got() == "0"


@obstacles
@pytest.mark.parametrize("memory", [None, "100%"], ids=["whole", "part"])
def test_an_obstacle_in_place_of_a_lock_file_is_skipped(
    one: Here, obstacle: str, *, memory: str | None
) -> None:
    """A link is not followed, nothing is written to it, and it takes up no memory."""
    with obstructed(part_file(one, 0), obstacle):
        assert got(memory=memory) == "0"
        assert [row.state for row in reserve_gpu.status().rows] == [State.RESERVED]
        assert part_file(one, 1).exists() is (memory is not None)
        reserve_gpu.release()
