"""Sharing takes two: who may be on a GPU together, and how each of them is known."""

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
from tests.locked import have, held, locked, needs_root, obstacles, obstructed
from tests.reserving import got, of_gpu, refused

if TYPE_CHECKING:
    from tests.here import Here
    from tests.machine import Machine

BUSY = "gpu\n  compute 4321000 3500\n"
UID = os.geteuid()
WHOLE_OR_SHARED = pytest.mark.parametrize("memory", [None, "1GB"], ids=["whole", "shared"])


@pytest.fixture
def one(here: Here) -> Here:
    """Make a machine with one idle GPU, and the test process is on it."""
    here.write("gpu")
    return here


def sharer_files(here: Here, number: str = "0") -> list[str]:
    """Return the names of the files of those who share a GPU, without its UUID."""
    uuid = here.uuid(number)
    names = [path.name for path in here.locks.iterdir() if ".share-" in path.name]
    return sorted(name.removeprefix(uuid) for name in names)


# -- who may be on it ------------------------------------------------------------------------------


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


# -- how each is known -----------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.process
def test_each_sharer_has_a_record_and_a_pid(machine: Machine) -> None:
    """Every sharer is listed with its own pid and note; one that is killed takes no other along."""
    machine.write("gpu")
    holders = "[(h.pid, h.note, h.confirmed) for h in reserve_gpu.status().rows[0].holders]"
    with machine.child() as first, machine.child() as second, machine.child() as third:
        for child, note in ((first, "one"), (second, "two")):
            assert child.reserve(f"memory='1GB', note={note!r}").value == "0"
        assert third.run(holders).value == [[first.pid, "one", True], [second.pid, "two", True]]
        assert f"pid {first.pid}" in third.reserve().text
        first.kill()
        assert third.run(holders).value == [[second.pid, "two", True]]
        assert f"pid {second.pid}" in third.reserve("0").text
        assert third.reserve("memory='1GB', note='three'").value == "0"
        both = [[second.pid, "two", True], [third.pid, "three", True]]  # its own first
        assert second.run(holders).value == both


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


# -- what else may stand there ---------------------------------------------------------------------


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


def test_a_second_name_of_a_locked_file_shares_nothing(one: Here) -> None:
    """Somebody's lock under a second name, which anybody may give it, counts for no sharer."""
    with have(one.folder / "other.lock"):
        path = one.locks / f"{one.uuid('0')}.share-{UID}-0.lock"
        one.locks.mkdir(mode=0o1777)
        path.hardlink_to(one.folder / "other.lock")
        assert got() == "0"


@needs_root
@pytest.mark.parametrize("state", ["locked", "not locked"])
def test_names_that_others_have_taken(one: Here, state: str) -> None:
    """Files of others that bear this user's number are passed by: they take no place of ours."""
    with ExitStack() as stack:
        for number in range(3):
            path = one.locks / f"{one.uuid('0')}.share-{UID}-{number}.lock"
            about = b'{"user": "root", "pid": 1, "part_mib": 1}'
            with have(path, about):
                os.chown(path, 65534, 65534)
            if state == "locked":
                stack.enter_context(have(path, about))
        assert got(memory="1GB") == "0"
        assert f"{one.uuid('0')}.share-{UID}-3.lock" in locked(one.locks)


def sharers(here: Here, count: int, owner: int = UID) -> ExitStack:
    """Make so many sharers of a GPU, of one user."""
    with ExitStack() as stack:
        for number in range(count):
            path = here.locks / f"{here.uuid('0')}.share-{owner}-{number}.lock"
            stack.enter_context(have(path))
            if owner != UID:
                os.chown(path, owner, owner)
        return stack.pop_all()


def holders_of(here: Here) -> int:
    """Return how many have the first GPU."""
    with LockDirectory(str(here.locks)) as directory, directory.mutex():
        return len(directory.holders_of(here.uuid("0")))


def test_so_many_sharers_of_one_user_count(one: Here) -> None:
    """Of one user 64 may share a GPU: who comes after them is told so, and more files mean none."""
    with sharers(one, MOST_OF_ONE_USER):
        assert f"You already have {MOST_OF_ONE_USER} locks" in of_gpu(refused(memory="1GB"))
    with sharers(one, MOST_OF_ONE_USER + 6):
        assert holders_of(one) == MOST_OF_ONE_USER


@needs_root
def test_many_files_of_another_user(one: Here) -> None:
    """However many files a user makes, those of others still count."""
    with sharers(one, MOST_OF_ONE_USER + 6, 65534), sharers(one, 2):
        assert holders_of(one) == MOST_OF_ONE_USER + 2


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
