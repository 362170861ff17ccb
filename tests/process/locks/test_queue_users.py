"""The queue with tickets of several users, and the limits on files of one user."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.locks import files
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.lock import read_record
from reserve_gpu.model.errors import LockError
from reserve_gpu.model.holders import Record
from reserve_gpu.system import procfs
from tests.support.locked import (
    WRITE_LOCK,
    have,
    needs_root,
    opened,
    watched,
)

if TYPE_CHECKING:
    from pathlib import Path

from tests.support.queues import UUIDS, Queue, counting, locked_gpu

OTHER_UID = 65534
names_of_files = pytest.mark.parametrize(
    "uid", [0, OTHER_UID], ids=["this user's names", "own names"]
)


def of_another_user(path: Path, text: str = "") -> None:
    """Create a file that belongs to another user."""
    path.write_text(text)
    os.chown(path, OTHER_UID, -1)


def write_locked(path: Path) -> int:
    """Create a file of another user, and lock it as its owner can."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WRITE_LOCK)
    os.chown(descriptor, OTHER_UID, -1)
    return descriptor


@pytest.mark.parametrize(
    ("owner", "lister", "left", "counts"),
    [
        (OTHER_UID, 0, "", True),
        (OTHER_UID, 0, " {now}", True),
        (OTHER_UID, 0, " 5", False),  # it left 5 s after the boot
        (OTHER_UID, OTHER_UID, "", False),
        (0, 0, "", True),
    ],
)
@needs_root
def test_a_listed_ticket_counts_if_its_waiter_left_lately(
    queue: Queue, owner: int, lister: int, left: str, *, counts: bool
) -> None:
    """A left ticket is ahead of a new waiter if another user's ticket lists it as left lately."""
    ticket = queue.file(0, owner)
    with have(ticket, b"{}"):
        os.chown(ticket, owner, -1)
    ticket.chmod(0o644)
    entry = f"{ticket.name} {ticket.stat().st_mtime_ns}{left.format(now=int(procfs.now().boot))}"
    with have(queue.file(9, lister), json.dumps({"behind": [entry]}).encode()):
        os.chown(queue.file(9, lister), lister, -1)
        queue.file(9, lister).chmod(0o644)
        place = queue.join()
        with have(ticket, b"{}"):
            ticket.chmod(0o644)
            os.utime(ticket, ns=2 * (int(entry.split()[1]),))
            ahead = queue.ahead(place)
    assert (ticket.name in ahead) == counts


@needs_root
@pytest.mark.parametrize("between", [0, OTHER_UID - 1])
def test_own_tickets_do_not_move_a_waiter_ahead_of_other_users(queue: Queue, between: int) -> None:
    """The list of a waiter's own user puts no ticket of another user behind the waiter."""
    queue.join(command="python a.py").__exit__()
    entry = f"{queue.file(0).name} {queue.file(0).stat().st_mtime_ns}"
    with ExitStack() as stack:
        for number, uid in ((9, between), (0, OTHER_UID)):
            path = queue.file(number, uid)
            stack.enter_context(have(path, json.dumps({"behind": [entry]}).encode()))
            os.chown(path, uid, -1)
            path.chmod(0o644)
            entry = f"{path.name} {path.stat().st_mtime_ns}"
        again = queue.join(command="python a.py")
        assert queue.ahead(again) == ([] if between else [path.name])


@needs_root
def test_a_waiter_rejoins_despite_files_of_another_user(queue: Queue) -> None:
    """A waiter finds its left ticket although another user has files with its usual names."""
    for number in range(2 * MOST_OF_ONE_USER):
        queue.file(number).touch()
        os.chown(queue.file(number), OTHER_UID, -1)
    first, second = queue.join(command="python a.py"), queue.join()
    first.__exit__()
    assert queue.ahead(second) == []
    again = queue.join(command="python a.py")
    assert queue.ahead(again) == []
    assert len(queue.ahead(second)) == 1


# -- limits on the files of one user ---------------------------------------------------------------


def test_one_user_has_at_most_64_tickets(queue: Queue) -> None:
    """A user can have 64 tickets; another waiter can join when one of them is released."""
    places = [queue.join() for _ in range(MOST_OF_ONE_USER)]
    with pytest.raises(LockError, match="64"):
        queue.join()
    assert len(queue.tickets()) == MOST_OF_ONE_USER
    places[7].__exit__()
    assert queue.ahead(queue.join()) == [
        queue.file(number).name for number in range(MOST_OF_ONE_USER) if number != 7
    ]


@needs_root
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.full)])
@names_of_files
def test_the_files_of_another_user_count_for_64_tickets(queue: Queue, uid: int, count: int) -> None:
    """Thousands of files of another user, 100 of them locked, count as 64 tickets."""
    with ExitStack() as stack:
        for number in range(count):
            path = queue.file(number, uid)
            if number < 100:
                stack.enter_context(have(path))
                os.utime(path, ns=(number, number))  # before the waiters of this test
            else:
                path.touch()
            os.chown(path, OTHER_UID, -1)
        first, second = queue.join(), queue.join()
        assert len([path for path in queue.path.glob("queue-*") if not path.stat().st_uid]) == 2
        theirs = {queue.file(number, uid).name for number in range(MOST_OF_ONE_USER)}
        assert {*queue.ahead(first)} == theirs
        with counting(files.open_to_read) as reads:
            assert theirs < {*queue.ahead(second)}
        assert len(reads) <= 2 * (MOST_OF_ONE_USER + 2)  # one for the lock, one for the record


@needs_root
@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("name", ["queue-0-{}.lock", "queue-{}-0.lock", "{}.lock", "x-{}"])
def test_unlocked_files_of_another_user_are_not_opened(queue: Queue, name: str) -> None:
    """Thousands of unlocked files of another user are listed, but not opened."""
    for number in range(2000):
        of_another_user(queue.path / name.format(number))
    place = queue.join()
    with counting(files.open_to_read, files.status_of) as reads:
        assert queue.ahead(place) == []
        with queue.directory.mutex():
            assert queue.directory.holders_of_other_devices([]) == ()
            assert queue.directory.listed_numbers() == {}
    assert len(reads) < 20


@needs_root
@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("name", ["share-0-{}.lock", "share-{}-0.lock"])
def test_unlocked_files_of_sharers_are_read_up_to_a_limit(queue: Queue, name: str) -> None:
    """If a GPU has thousands of files of sharers, only locked ones and usual names are read."""
    with ExitStack() as stack:
        for number in range(100, 3000):
            of_another_user(queue.path / f"{UUIDS[0]}.{name.format(number)}")
        lock = stack.enter_context(locked_gpu(queue, share=True))
        lock.write(Record(label="GPU1", index=1))
        random_name = f"{UUIDS[0]}.share-{OTHER_UID}-1234567890.lock"
        stack.callback(os.close, write_locked(queue.path / random_name))
        with (
            queue.directory.mutex(),
            counting(files.open_to_read, files.status_of, files.sole_owner) as reads,
        ):
            holders = queue.directory.sharers_of(UUIDS[0])
            is_recorded = queue.directory.is_number_recorded(1, UUIDS[1])
    assert {holder.file for holder in holders} == {lock.name, random_name}
    assert is_recorded
    assert len(reads) < 500


# Locks files and ends, but leaves a process that has them open.
LEAVE_LOCKS = """
import fcntl, os, subprocess, sys
files = [os.open(f"{sys.argv[1]}/GPU-{n}.lock", os.O_CREAT | os.O_RDWR, 0o666) for n in range(100)]
for file in files:
    fcntl.flock(file, fcntl.LOCK_EX)
print(subprocess.Popen(["sleep", "1000"], pass_fds=files, stdout=subprocess.DEVNULL).pid)
"""


@pytest.mark.usefixtures("told")
def test_locks_of_processes_that_have_ended_cost_one_pass(queue: Queue) -> None:
    """The processes that keep a hundred locks of an ended one are found in one pass over /proc."""
    argv = [sys.executable, "-c", LEAVE_LOCKS, str(queue.path)]
    keeper = int(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
    try:
        with counting(procfs.LockedFiles.holders) as passes, queue.directory.mutex():
            holders = queue.directory.holders_of_other_devices([])
        assert [holder.listed_pid for holder in holders] == [keeper] * 100
        assert len(passes) == 1
    finally:
        os.kill(keeper, signal.SIGKILL)


# Opens one file as often as a user can, without locking it.
OPEN_OFTEN = """
import os, signal
for _ in range(12_000):
    os.open("/proc/self/fd/0", os.O_RDONLY)
print("open", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@needs_root
@pytest.mark.usefixtures("told")
def test_open_files_of_one_user_are_read_up_to_a_limit(queue: Queue) -> None:
    """Any number of open files of one user neither delays nor hides another user's holder."""
    path = queue.path / "GPU-0.lock"
    path.touch()
    path.chmod(0o666)
    user = f"setpriv --reuid={OTHER_UID} --regid={OTHER_UID} --clear-groups"
    script = f'ulimit -n 20000 && exec {user} "$@"'
    crowd_argv = ["sh", "-ec", script, "sh", sys.executable, "-c", OPEN_OFTEN]
    keeper_argv = [sys.executable, "-c", LEAVE_LOCKS, str(queue.path)]
    read: list[str] = []
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        crowd = subprocess.Popen(crowd_argv, stdin=file, stdout=subprocess.PIPE)
        stack.enter_context(crowd)
        stack.callback(crowd.kill)
        if not (crowd.stdout and crowd.stdout.readline()):
            pytest.skip("this user may not open so many files, or not run this Python")
        keeper = int(subprocess.run(keeper_argv, stdout=subprocess.PIPE, check=True).stdout)
        stack.callback(os.kill, keeper, signal.SIGKILL)

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and f"/{crowd.pid}/fdinfo/" in str(arguments[0]):
                read.append(arguments[0])

        with watched(note):
            found = procfs.LockedFiles({path.stat().st_ino}).holders()
    assert {*found.values()} == {keeper}
    assert len(read) <= procfs.MOST_OPEN


@needs_root
@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    "name", ["zzz.share-{}-{}.lock", "{1}.share-{0}-0.lock", "{1}.record-{0}-0"]
)
@names_of_files
def test_64_locked_files_of_each_owner_are_read(queue: Queue, name: str, uid: int) -> None:
    """At most 64 locked files of one user are read, and holders of other users are found."""
    about = {"label": "GPU5", "index": 5, "mounts": procfs.mount_namespace()}
    with ExitStack() as stack:
        for number in range(300):
            file = write_locked(queue.path / name.format(uid, number))
            stack.callback(os.close, file)
        stack.enter_context(have(queue.path / "zzz.share-0-9999.lock", json.dumps(about).encode()))
        with (
            queue.directory.mutex(),
            counting(files.open_to_read) as reads,
            opened("locks") as readings,
        ):
            numbers = queue.directory.listed_numbers()
    assert list(numbers) == ["GPU5"]
    assert len(reads) <= 3 * (MOST_OF_ONE_USER + 1)
    assert len(readings) <= 2


@needs_root
@pytest.mark.usefixtures("told")
def test_records_that_another_user_created_for_a_holder_are_not_read(queue: Queue) -> None:
    """Record files of another user with the holder's UID in their names are not read."""
    for number in range(2000):
        of_another_user(queue.path / f"{UUIDS[0]}.record-0-{number}")
    with locked_gpu(queue) as lock:
        lock.write(Record.from_dict({"note": "the thesis"}))
        with queue.directory.mutex(), counting(files.status_of, files.open_to_read) as reads:
            (holder,) = queue.directory.holders_of(UUIDS[0])
    assert (holder.record.terms.note, holder.record_owner) == ("the thesis", 0)
    assert len(reads) < 20


@needs_root
@pytest.mark.usefixtures("told")
def test_unlocked_records_of_another_user_are_not_parsed(queue: Queue) -> None:
    """Unlocked records are not parsed in the search for renumbered GPUs."""
    record = json.dumps({"label": "GPU0", "index": 0})
    for number in range(100):
        of_another_user(queue.path / f"GPU-{number:08x}.record-{OTHER_UID}-0", record)
    with queue.directory.mutex(), counting(read_record) as parsed:
        assert not queue.directory.is_number_recorded(0, UUIDS[0])
    assert not parsed
