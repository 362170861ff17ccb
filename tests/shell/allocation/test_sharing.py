"""Sharing a GPU in one process: which processes can hold it together, and their lock files."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.lock import Lock
from reserve_gpu.model.devices import State
from tests.support.locked import have, held, locked, needs_root, obstacles, obstructed
from tests.support.reserving import got, of_gpu, refused, would_be_refused

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here

UID, OTHER_UID = os.geteuid(), 65534


@pytest.fixture
def one(here: Here) -> Here:
    """Return a machine with one idle GPU."""
    here.write("gpu")
    return here


def part_file(here: Here, number: int, owner: int = UID) -> Path:
    """Return the lock file with this number in its name for a part of GPU 0."""
    return here.locks / f"{here.uuid('0')}.share-{owner}-{number}.lock"


def lock_part_files(here: Here, count: int, owner: int = UID) -> ExitStack:
    """Lock as many lock files of a user for parts of GPU 0."""
    with ExitStack() as stack:
        for number in range(count):
            path = part_file(here, number, owner)
            stack.enter_context(have(path))
            if owner != UID:
                os.chown(path, owner, owner)
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


def test_each_holder_of_a_part_has_a_lock_file(one: Here) -> None:
    with one.rival("0", part_mib=1024), one.rival("0", part_mib=1024):
        assert got(memory="1GB") == "0"
        assert locked(one.locks) == {part_file(one, number).name for number in range(3)}
    assert held(one) == [0]
    reserve_gpu.release()
    assert held(one) == []


def test_parts_of_several_gpus_are_reserved_together_or_not_at_all(here: Here) -> None:
    """The refusal names the free GPU and the request that would be granted."""
    with here.rival("1"):
        text = refused(count=2, memory="1GB")
        assert of_gpu(text).startswith("free")
        assert "reserve_gpu.reserve(count=1, memory='1GB')" in text
        assert part_file(here, 0).exists()
        assert held(here) == [1]
    assert got(count=2, memory="1GB") == "0,1"
    assert held(here) == [0, 1]


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


@pytest.mark.usefixtures("terminal")
def test_a_refusal_names_the_users_other_process_and_how_to_release(here: Here) -> None:
    here.write(f"gpu\ngpu\n compute {os.getpid()} 3500")
    now = time.time()
    with here.rival("0", since=now - 900, notebook="old.ipynb"), here.rival("1", since=now - 86400):
        for request in ({}, {"devices": "0,1"}, {"memory": "1GB"}):
            advice = refused(**request).splitlines()[1]
            assert f"GPU0 and GPU1 in old.ipynb (pid {os.getpid()})" in advice
            assert advice.endswith(f"reserve-gpu release {os.getpid()}")
        advice = refused("0").splitlines()[1]
        assert "idle for 15 min" in advice
        assert advice.endswith(f"reserve-gpu release {os.getpid()}")


# -- limits and obstacles --------------------------------------------------------------------------


def test_a_user_can_have_a_limited_number_of_parts_of_a_gpu(one: Here) -> None:
    """A request beyond the limit is refused, and locked files beyond it do not count."""
    with lock_part_files(one, MOST_OF_ONE_USER):
        (row,) = would_be_refused(memory="1GB").rows
        assert str(MOST_OF_ONE_USER) in (row.reason or "")
    with lock_part_files(one, MOST_OF_ONE_USER + 6):
        assert count_holders(one) == MOST_OF_ONE_USER


@needs_root
def test_files_of_one_user_do_not_hide_the_parts_of_another(one: Here) -> None:
    with lock_part_files(one, MOST_OF_ONE_USER + 6, OTHER_UID), lock_part_files(one, 2):
        assert count_holders(one) == MOST_OF_ONE_USER + 2


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


@pytest.mark.parametrize(
    "name",
    [
        *(".share--0.lock", ".share-0-0.lock.old", ".share-0-0x.lock", ".share-0-99999999999.lock"),
        *(".share-a-0.lock", "x.share-0-0.lock"),
    ],
)
def test_a_file_with_another_name_is_not_a_part(one: Here, name: str) -> None:
    with have(one.locks / f"{one.uuid('0')}{name}"):
        assert got() == "0"


def test_a_uuid_can_contain_slashes(one: Here) -> None:
    """Old drivers gave such UUIDs to MIG instances."""
    uuid = "MIG-GPU-8f2a/7/0"
    with LockDirectory(str(one.locks)) as directory, directory.mutex():
        lock = directory.lock_device(uuid, share=True)
        assert isinstance(lock, Lock)
        assert [holder.pid for holder in directory.holders_of(uuid)] == [os.getpid()]
        assert not isinstance(directory.lock_device(uuid, share=False), Lock)
        lock.release()


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
