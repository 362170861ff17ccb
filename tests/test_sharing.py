"""Sharing takes two: who may be on a GPU together, and how each of them is known."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import MOST_OF_ONE_USER, LockDirectory
from reserve_gpu.locks.lock import Lock
from reserve_gpu.locks.queue import Place
from reserve_gpu.model import Record
from tests.locked import have, held, locked, needs_root, obstacles, obstructed, texts
from tests.reserving import got, of_gpu, refused, variables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.here import Here
    from tests.machine import Machine

BUSY = "gpu\n  compute 4321000 3500\n"
UID = os.geteuid()
WHOLE_OR_SHARED = pytest.mark.parametrize("share", [False, True], ids=["whole", "shared"])


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


def shared() -> str:
    """Share a GPU with somebody; returns the warning that names them."""
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        reserve_gpu.reserve(share=True)
    (warning,) = texts(caught)
    return warning


@contextmanager
def awaited(here: Here, number: str = "0") -> Iterator[None]:
    """Let somebody wait for a GPU."""
    with (
        LockDirectory(str(here.locks)) as directory,
        Place(directory, [here.uuid(number)], Record.from_dict({"user": "carol"})) as place,
    ):
        with directory.mutex():
            place.join()
        yield


# -- who may be on it ------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [None, "0"], ids=["any", "named"])
@WHOLE_OR_SHARED
def test_whole_is_for_nobody_else(one: Here, devices: str | None, *, share: bool) -> None:
    """A GPU that somebody has reserved for themselves is shared with nobody, named or not."""
    with one.rival("0"):
        text = refused(devices, share=share)
    assert of_gpu(text).startswith("reserved: ")
    assert variables() == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("devices", [None, "0"], ids=["any", "named"])
def test_sharers_keep_out_who_wants_it_whole(one: Here, devices: str | None) -> None:
    """A GPU that somebody shares is given to nobody as a whole, and the sharer is named."""
    with one.rival("0", share=True, note="till noon"):
        assert "till noon" in of_gpu(refused(devices))
    assert got(devices) == "0"


def test_sharers_that_come_later(one: Here) -> None:
    """Who has looked before sees whoever shares since, in a new file: one of others, or its own."""
    uuid = one.uuid("0")
    with LockDirectory(str(one.locks)) as directory:
        with directory.mutex():
            assert directory.holders_of(uuid) == ()
        with one.rival("0", share=True), directory.mutex():
            assert not isinstance(directory.lock_device(uuid, share=False), Lock)
            own = directory.lock_device(uuid, share=True)
            assert len(directory.holders_of(uuid)) == 2
        assert isinstance(own, Lock)
        with directory.mutex():
            assert len(directory.holders_of(uuid)) == 1
        own.release()


def test_sharers_are_together(one: Here) -> None:
    """Those who share a GPU have it together; each has a lock, and is told of the others."""
    with one.rival("0", share=True, note="first"), one.rival("0", share=True, note="second"):
        warning = shared()
        assert warning.startswith("You share GPU0: it is reserved by ")
        assert "first" in warning
        assert "second" in warning
        assert sharer_files(one) == [f".share-{UID}-{number}.lock" for number in range(3)]
        assert locked(one.locks) == {f"{one.uuid('0')}{name}" for name in sharer_files(one)}
    assert held(one) == [0]
    reserve_gpu.release()
    assert held(one) == []


def test_who_shares_alone_is_not_warned(one: Here) -> None:
    """Who shares a GPU that nobody is on gets it without a warning, and says so to others."""
    assert got(share=True) == "0"
    with one.rival("0", share=True):
        assert got(share=True) == "0"  # what is held already is not warned of again


def test_use_that_nobody_has_agreed_to_share(one: Here) -> None:
    """What processes use without a reservation is shared only by name; with sharers it may be."""
    one.write(BUSY)
    assert of_gpu(refused(share=True)).startswith("busy")
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="You share GPU0: it is busy"):
        reserve_gpu.reserve("0", share=True)
    reserve_gpu.release()
    with one.rival("0", share=True, note="first"):
        assert "first" in shared()


@pytest.mark.parametrize("mode", ["prohibited", "exclusive_process"])
def test_where_cuda_lets_nobody_on(one: Here, mode: str) -> None:
    """A GPU that CUDA would not let one more process onto is not shared, whoever shares it."""
    one.write(f"{BUSY}  mode {mode}")
    with one.rival("0", share=True):
        for devices in (None, "0"):
            refused(devices, share=True)


@pytest.mark.parametrize("devices", [None, "0"], ids=["any", "named"])
@pytest.mark.parametrize("beside", ["alone", "beside a sharer"])
@WHOLE_OR_SHARED
def test_what_others_wait_for_is_not_shared(
    one: Here, devices: str | None, beside: str, *, share: bool
) -> None:
    """A GPU that somebody waits for goes to nobody who does not wait, not to be shared either."""
    with ExitStack() as others:
        if beside == "beside a sharer":
            others.enter_context(one.rival("0", share=True))
        others.enter_context(awaited(one))
        text = of_gpu(refused(devices, share=share))
        expected = "reserved" if beside == "beside a sharer" and not share else "awaited"
        assert text.startswith(f"{expected}: ")


def test_several_are_shared(here: Here) -> None:
    """Several GPUs are shared together, all or none."""
    with here.rival("1"):
        text = refused(count=2, share=True)
        assert of_gpu(text).startswith("free: ")
        assert "1 can be had now: reserve_gpu.reserve(count=1, share=True)" in text
        assert sharer_files(here) == [f".share-{UID}-0.lock"]
        assert held(here) == [1]
    assert got(count=2, share=True) == "0,1"
    assert held(here) == [0, 1]


# -- from whole to shared, and back ----------------------------------------------------------------


def test_to_have_it_whole(one: Here) -> None:
    """Who shares a GPU alone can have it whole: then nobody else can share it."""
    assert got(share=True) == "0"
    assert got("0") == "0"
    assert locked(one.locks) == {f"{one.uuid('0')}.lock"}
    with LockDirectory() as directory, directory.mutex():
        assert not isinstance(directory.lock_device(one.uuid("0"), share=True), Lock)


def test_to_have_it_whole_beside_others(one: Here) -> None:
    """Who shares a GPU with others can't have it whole, is told of them, and goes on sharing it."""
    assert got(share=True) == "0"
    before = variables()
    with one.rival("0", share=True, note="till noon"):
        text = refused("0")
        assert "till noon" in of_gpu(text)
        assert "This process keeps GPU0" in text
        assert variables() == before
        assert locked(one.locks) == {f"{one.uuid('0')}{name}" for name in sharer_files(one)}
    assert got("0") == "0"


def test_to_share_what_is_held_whole(one: Here) -> None:
    """Who has a GPU whole can open it to others, and is never without it meanwhile."""
    assert got() == "0"
    with pytest.raises(AssertionError), one.rival("0", share=True):
        pass
    assert got(share=True) == "0"
    assert locked(one.locks) == {f"{one.uuid('0')}.share-{UID}-0.lock"}
    with one.rival("0", share=True):
        assert held(one) == [0]


@WHOLE_OR_SHARED
def test_a_change_is_not_hindered(one: Here, *, share: bool) -> None:
    """Who changes how it holds a GPU comes before who waits, and its own use is no obstacle."""
    assert got(share=not share) == "0"
    one.write(BUSY)
    with awaited(one):
        assert got("0", share=share) == "0"


def test_one_of_several_goes_from_shared_to_whole(here: Here) -> None:
    """Of several that are shared one can be had whole; the others are released."""
    assert got("0,1", share=True) == "0,1"
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
            assert child.reserve(f"share=True, note={note!r}").value == "0"
        assert third.run(holders).value == [[first.pid, "one", True], [second.pid, "two", True]]
        assert f"pid {first.pid}" in third.reserve().text
        first.kill()
        assert third.run(holders).value == [[second.pid, "two", True]]
        assert f"pid {second.pid}" in third.reserve("0").text
        assert third.reserve("share=True, note='three'").value == "0"
        both = [[second.pid, "two", True], [third.pid, "three", True]]  # its own first
        assert second.run(holders).value == both


def test_the_note_of_each(one: Here) -> None:
    """What one sharer says of itself, or takes back, leaves what others say as it is."""
    with one.rival("0", share=True, note="theirs"):
        shared()
        reserve_gpu.reserve(share=True, note="mine")
        notes = [holder.note for holder in reserve_gpu.status().rows[0].holders]
        assert notes == ["theirs", "mine"]
        reserve_gpu.release()
        (holder,) = reserve_gpu.status().rows[0].holders
        assert holder.note == "theirs"


def test_files_of_sharers_are_their_own(one: Here) -> None:
    """A sharer's file can be written to by its user alone, is emptied, kept and used again."""
    assert got(share=True) == "0"
    (path,) = one.locks.glob("*.share-*")
    before = path.stat()
    assert stat.S_IMODE(before.st_mode) == 0o644
    assert (before.st_uid, json.loads(path.read_bytes())["pid"]) == (UID, os.getpid())
    reserve_gpu.release()
    assert path.read_bytes() == b""
    assert got(share=True) == "0"
    assert [path.stat().st_ino for path in one.locks.glob("*.share-*")] == [before.st_ino]


# -- whom to ask -----------------------------------------------------------------------------------


def test_whom_to_ask(here: Here) -> None:
    """A refusal to who holds the GPUs in another process says that, and what releases them."""
    here.write(f"gpu\ngpu\n compute {os.getpid()} 3500")
    now = time.time()
    with here.rival("0", since=now - 900, notebook="old.ipynb"), here.rival("1", since=now - 86400):
        where = f"old.ipynb (pid {os.getpid()})"
        for wishes in ({}, {"devices": "0,1"}, {"share": True}):
            advice, wait = refused(**wishes).splitlines()[-3:-1]
            held = f"You hold GPU0 and GPU1 yourself, in {where}"
            assert advice == f"{held}: reserve-gpu release old.ipynb"
            assert wait.startswith("Or wait in the queue: reserve_gpu.reserve(")
        advice, _ = refused("0").splitlines()[-3:-1]
        held = f"You hold GPU0 yourself, in {where}, idle for 15 min"
        assert advice == f"{held}: reserve-gpu release old.ipynb"


@WHOLE_OR_SHARED
def test_no_refusal_advises_to_take_it(one: Here, *, share: bool) -> None:
    """Nothing that a refusal says tells to share, or to name, what another person has."""
    for scenario in ("gpu", BUSY, f"{BUSY}  mps 99 100"):
        one.write(scenario)
        for is_shared in (False, True):
            if is_shared and share:
                continue  # that would be let in
            with one.rival("0", share=is_shared):
                text = refused(share=share)
            assert "--share" not in text
            assert "anyway" not in text


# -- what else may stand there ---------------------------------------------------------------------


@obstacles
@WHOLE_OR_SHARED
def test_what_is_no_file_does_no_harm(one: Here, obstacle: str, *, share: bool) -> None:
    """What stands in the place of a sharer's file is passed by, not followed and not written to."""
    with obstructed(one.locks / f"{one.uuid('0')}.share-{UID}-0.lock", obstacle):
        assert got(share=share) == "0"
        assert [row.state.value for row in reserve_gpu.status().rows] == ["reserved"]
        if share:
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
            with have(path, b'{"user": "root", "pid": 1}'):
                os.chown(path, 65534, 65534)
            if state == "locked":
                stack.enter_context(have(path))
        shared() if state == "locked" else reserve_gpu.reserve(share=True)
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
        assert f"This user has {MOST_OF_ONE_USER} locks" in of_gpu(refused(share=True))
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
