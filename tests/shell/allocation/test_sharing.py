"""Sharing takes two: who may be on a GPU together, and how each of them is known."""

from __future__ import annotations

import json
import os
import stat
import time
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.lock import Lock
from tests.support.locked import have, held, locked
from tests.support.reserving import got, of_gpu, refused

if TYPE_CHECKING:
    from tests.support.here import Here

from typing import TYPE_CHECKING

from tests.support.locked import obstacles, obstructed
from tests.support.sharing import holders_of, sharer_files, sharers

if TYPE_CHECKING:
    from tests.support.here import Here

WHOLE_OR_SHARED = pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])


UID = os.geteuid()


# -- who may be on it ------------------------------------------------------------------------------


@pytest.fixture
def one(here: Here) -> Here:
    """Make a machine with one idle GPU, and the test process is on it."""
    here.write("gpu")
    return here


def test_sharers_that_come_later(one: Here) -> None:
    """Who has looked before sees whoever shares since, in a new file: one of others, or its own."""
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


def test_sharers_are_together(one: Here) -> None:
    """Those who share a GPU have it together, each with a lock."""
    with one.rival("0", part_mib=1024), one.rival("0", part_mib=1024):
        assert got(memory="1GB") == "0"
        assert sharer_files(one) == [f".share-{UID}-{number}.lock" for number in range(3)]
        assert locked(one.locks) == {f"{one.uuid('0')}{name}" for name in sharer_files(one)}
    assert held(one) == [0]
    reserve_gpu.release()
    assert held(one) == []


def test_several_are_shared(here: Here) -> None:
    """Several GPUs are shared together, all or none."""
    with here.rival("1"):
        text = refused(count=2, memory="1GB")
        assert of_gpu(text).startswith("free: ")
        assert "1 is available now: reserve_gpu.reserve(count=1, memory='1GB')" in text
        assert sharer_files(here) == [f".share-{UID}-0.lock"]
        assert held(here) == [1]
    assert got(count=2, memory="1GB") == "0,1"
    assert held(here) == [0, 1]


# -- from whole to shared, and back ----------------------------------------------------------------


def test_one_of_several_goes_from_shared_to_whole(here: Here) -> None:
    """Of several that are shared one can be had whole; the others are released."""
    assert got("0,1", memory="1GB") == "0,1"
    assert got("1") == "1"
    assert locked(here.locks) == {f"{here.uuid('1')}.lock"}


def test_files_of_sharers_are_their_own(one: Here) -> None:
    """Only its user can write to a sharer's file, which stays after a release and is used again."""
    assert got(memory="1GB") == "0"
    (path,) = one.locks.glob("*.share-*")
    before = path.stat()
    assert stat.S_IMODE(before.st_mode) == 0o644
    assert (before.st_uid, json.loads(path.read_bytes())["pid"]) == (UID, os.getpid())
    reserve_gpu.release()
    released = json.loads(path.read_bytes())
    assert released["released"] is True
    assert "part_mib" not in released
    assert got(memory="1GB") == "0"
    assert json.loads(path.read_bytes())["released"] is False
    assert [path.stat().st_ino for path in one.locks.glob("*.share-*")] == [before.st_ino]


# -- whom to ask -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("terminal")
def test_whom_to_ask(here: Here) -> None:
    """A refusal to who holds the GPUs in another process says that, and what releases them."""
    here.write(f"gpu\ngpu\n compute {os.getpid()} 3500")
    now = time.time()
    with here.rival("0", since=now - 900, notebook="old.ipynb"), here.rival("1", since=now - 86400):
        where = f"old.ipynb (pid {os.getpid()})"
        for wishes in ({}, {"devices": "0,1"}, {"memory": "1GB"}):
            advice, wait = refused(**wishes).splitlines()[1:3]
            held = f"You hold GPU0 and GPU1 in {where}. To release them"
            assert advice == f"{held}: reserve-gpu release {os.getpid()}"
            assert wait.startswith("Or wait in the queue: reserve_gpu.reserve(")
        advice = refused("0").splitlines()[1]
        held = f"GPU0 has been idle for 15 min in your {where}. To release it"
        assert advice == f"{held}: reserve-gpu release {os.getpid()}"


def test_a_second_name_of_a_locked_file_shares_nothing(one: Here) -> None:
    """Somebody's lock under a second name, which anybody may give it, counts for no sharer."""
    with have(one.folder / "other.lock"):
        path = one.locks / f"{one.uuid('0')}.share-{UID}-0.lock"
        one.locks.mkdir(mode=0o1777)
        path.hardlink_to(one.folder / "other.lock")
        assert got() == "0"


def test_so_many_sharers_of_one_user_count(one: Here) -> None:
    """Of one user 64 may share a GPU: who comes after them is told so, and more files mean none."""
    with sharers(one, MOST_OF_ONE_USER):
        assert f"You already have {MOST_OF_ONE_USER} locks" in of_gpu(refused(memory="1GB"))
    with sharers(one, MOST_OF_ONE_USER + 6):
        assert holders_of(one) == MOST_OF_ONE_USER


@pytest.mark.parametrize(
    "name",
    [
        *(".share--0.lock", ".share-0.lock", ".share-0-0.lock.old", ".share-0-0x.lock"),
        *(".share-0-99999999999.lock", ".share-a-0.lock", "x.share-0-0.lock", ".shared"),
    ],
)
def test_other_names_share_nothing(one: Here, name: str) -> None:
    """A locked file whose name is not quite that of a sharer's keeps nobody out."""
    with have(one.locks / f"{one.uuid('0')}{name}"):
        assert got() == "0"


def test_a_driver_of_old(one: Here) -> None:
    """A UUID with slashes, as MIG instances had, names files like any other."""
    uuid = "MIG-GPU-8f2a/7/0"
    with LockDirectory(str(one.locks)) as directory, directory.mutex():
        lock = directory.lock_device(uuid, share=True)
        assert isinstance(lock, Lock)
        assert [holder.pid for holder in directory.holders_of(uuid)] == [os.getpid()]
        assert not isinstance(directory.lock_device(uuid, share=False), Lock)
        lock.release()


@obstacles
@WHOLE_OR_SHARED
def test_what_is_no_file_does_no_harm(one: Here, obstacle: str, *, memory: str | None) -> None:
    """What stands in the place of a sharer's file is passed by, not followed and not written to."""
    with obstructed(one.locks / f"{one.uuid('0')}.share-{UID}-0.lock", obstacle):
        assert got(memory=memory) == "0"
        assert [row.state.value for row in reserve_gpu.status().rows] == ["reserved"]
        if memory:
            assert sharer_files(one) == [f".share-{UID}-{number}.lock" for number in range(2)]
        reserve_gpu.release()
