"""The queue: places of several in one process, and what makes a waiter look again."""

from __future__ import annotations

import json
import os
import resource
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.lock import Lock
from reserve_gpu.locks.queue import EndOfQueue, QueueEntry, wait_for_news
from reserve_gpu.model.holders import Holder, Record
from reserve_gpu.model.queue import Ticket, in_order
from reserve_gpu.model.requests import TicketAhead
from reserve_gpu.system import procfs
from reserve_gpu.system.executor import POLL_S
from tests.support.locked import (
    have,
    opened,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

from typing import TYPE_CHECKING

from tests.support.locked import (
    obstacles,
    obstructed,
)
from tests.support.queues import Queue, counting, ticket

UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
LONG_S = 30
OTHER_UID = 65534


def served(place: QueueEntry) -> None:
    """Let a waiter leave the queue with what it waited for."""
    place.is_served = True
    place.__exit__()


@contextmanager
def full_disk() -> Iterator[None]:
    """Let not a byte be written to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -- the order -------------------------------------------------------------------------------------


def check_order(queue: Queue) -> None:
    a, b, c = (queue.join() for _ in range(3))
    names = [queue.file(number).name for number in range(3)]
    assert [queue.ahead(place) for place in (a, b, c)] == [[], names[:1], names[:2]]
    a.__exit__()
    d = queue.join()  # after the others
    assert [ticket.name for ticket in queue.tickets()][:2] == names[1:]
    assert [queue.ahead(place) for place in (b, c, d)] == [[], names[1:2], names[1:]]


def test_order(queue: Queue) -> None:
    """Who came first is first, whatever the number of the file; who leaves lets others move up."""
    check_order(queue)


def test_order_on_a_full_disk(queue: Queue) -> None:
    """Where no byte can be written the order is the same, and all wait for any device."""
    with full_disk():
        check_order(queue)
        assert [path.stat().st_size for path in queue.path.iterdir()] == [0, 0, 0, 0]
        assert all(ticket.could_use("GPU-any") for ticket in queue.tickets())


# -- coming back -----------------------------------------------------------------------------------


def test_coming_back(queue: Queue) -> None:
    """Who asks the same again has the old place; meanwhile it stands in nobody's way."""
    first, second = queue.join(command="python a.py"), queue.join()
    first.__exit__()
    assert queue.ahead(second) == []
    third = queue.join()  # in another file
    assert len(queue.ahead(third)) == 1
    again = queue.join(command="python a.py")
    assert queue.ahead(again) == []
    assert queue.ahead(second) == [queue.file(0).name]


@pytest.mark.parametrize(
    "about",
    [{"command": "python b.py"}, {"cwd": "/b"}, {"asks": "2 GPUs"}, {"notebook": "b.ipynb"}],
    ids=lambda about: next(iter(about)),
)
def test_another_has_not_that_place(queue: Queue, about: dict[str, Any]) -> None:
    """Who asks for something else, or from elsewhere, comes last."""
    own: dict[str, Any] = {"command": "python a.py", "cwd": "/a", "asks": "a GPU"}
    first, second = queue.join(**own), queue.join()
    first.__exit__()
    assert queue.ahead(queue.join(**{**own, **about})) == [queue.file(1).name]
    assert queue.ahead(second) == []


def test_coming_back_too_late(queue: Queue) -> None:
    """A place is kept for a while alone, and not for who has got what it asked for."""
    for back_s, is_served in ((0.0, False), (LONG_S, True)):
        first, second = queue.join(command="python a.py", back_s=back_s), queue.join()
        first.is_served = is_served
        assert first.keeps_place is not is_served
        first.__exit__()
        again = queue.join(command="python a.py", back_s=back_s)
        assert len(queue.ahead(again)) == 1
        served(second)
        served(again)


@pytest.mark.parametrize("number", [1, 2**40, 2**62], ids=hex)
def test_a_forged_number_of_a_left_ticket(queue: Queue, number: int) -> None:
    """A waiter that rejoins with a forged number does not pass earlier waiters."""
    first, second = queue.join(), queue.join(command="python a.py")
    second.__exit__()
    os.utime(queue.file(1), ns=(number, number))
    again = queue.join(command="python a.py")
    assert queue.ahead(again) == [queue.file(0).name]
    assert queue.ahead(first) == []
    assert queue.tickets()[0].name == queue.file(0).name


def test_a_forged_record_of_a_left_ticket(queue: Queue) -> None:
    """A waiter that rejoins with a forged ticket does not pass earlier waiters."""
    first, second = queue.join(), queue.join(command="python a.py")
    second.__exit__()
    said = json.loads(queue.file(1).read_bytes())
    assert said["behind"] == [f"{queue.file(0).name} {queue.file(0).stat().st_mtime_ns}"]
    queue.file(1).write_text(json.dumps({**said, "behind": []}))
    again = queue.join(command="python a.py")
    assert queue.ahead(again) == [queue.file(0).name]
    assert queue.ahead(first) == []


def test_a_left_ticket_that_no_waiter_knows(queue: Queue) -> None:
    """A ticket that was left is not ahead of new waiters if no other waiter lists it."""
    queue.join(command="python a.py").__exit__()
    queue.file(0).chmod(0o640)  # which renews its ctime
    queue.file(0).chmod(0o644)
    second = queue.join()
    again = queue.join(command="python a.py")
    assert queue.ahead(again) == [queue.file(1).name]
    assert queue.ahead(second) == []


def test_forged_names_of_tickets(queue: Queue) -> None:
    """Whatever names a ticket lists, others can join the queue behind it."""
    names = [
        "queue\0 1",
        "queue-\ud800 1",
        "../x 1",
        "queue-0-0.lock/ 1",
        "queue",
        7,
        "queue-0-0.lock",
        "queue-0-5.lock 1",
        "queue-0-5.lock 1 7",
        "queue-0-5.lock 1 8",
    ]
    names += [
        f"queue-0-0.lock {number}" for number in ("", "-1", "\u0661", "9" * 5000, "1 left", "1 x")
    ]
    said = json.dumps(
        {"asks": "a GPU", "behind": [*names, *(f"queue-0-{n}.lock {n}" for n in range(900))]}
    )
    with have(queue.file(0), said.encode()):
        assert queue.ahead(queue.join()) == [queue.file(0).name]


def test_a_place_is_lost_for_those_behind_it(queue: Queue) -> None:
    """If a waiter was away for too long, it rejoins behind the waiters that noticed."""
    first, second = queue.join(command="python a.py"), queue.join(back_s=0.0)
    assert queue.ahead(second) == [queue.file(0).name]
    first.__exit__()
    assert queue.ahead(second) == []
    again = queue.join(command="python a.py")
    assert queue.ahead(again) == [queue.file(1).name]
    assert queue.ahead(second) == []


@pytest.mark.usefixtures("told")
def test_the_place_of_a_served_waiter_is_lost(queue: Queue) -> None:
    """A waiter that got a device does not pass others again with a forged file."""
    first, second = queue.join(command="python a.py"), queue.join()
    said, number = queue.file(0).read_bytes(), queue.file(0).stat().st_mtime_ns
    with queue.directory.mutex():
        device = queue.directory.lock_device(UUIDS[0], share=False)
    assert isinstance(device, Lock)
    first.__exit__()  # it is killed before it can empty its file
    assert queue.ahead(second) == []
    device.release()
    with have(queue.file(0), said):
        os.utime(queue.file(0), ns=(number, number))
        assert queue.ahead(second) == []


def test_an_empty_file_of_a_waiter(queue: Queue) -> None:
    """A waiter that emptied its file has been served, and does not get its place again."""
    first, second = queue.join(command="python a.py"), queue.join()
    said, number = queue.file(0).read_bytes(), queue.file(0).stat().st_mtime_ns
    served(first)
    assert queue.ahead(second) == []
    with have(queue.file(0), said):
        os.utime(queue.file(0), ns=(number, number))
        assert queue.ahead(second) == []


def test_a_file_that_another_wait_uses(queue: Queue) -> None:
    """A waiter that rejoins is not ahead of one that lists an earlier ticket of the same file."""
    old, first = queue.join(), queue.join()
    served(old)
    second = queue.join(command="python a.py")  # in the file of the served one
    assert queue.file(0).stat().st_size
    second.__exit__()
    again = queue.join(command="python a.py")
    assert queue.ahead(again) == [queue.file(1).name]
    assert queue.ahead(first) == []


def test_two_waiters_leave_and_rejoin(queue: Queue) -> None:
    """A waiter that rejoins does not pass waiters that were ahead of it and left as well."""
    first, second = queue.join(command="python a.py"), queue.join(command="python b.py")
    first.__exit__()
    second.__exit__()
    second = queue.join(command="python b.py")
    first = queue.join(command="python a.py")
    assert queue.ahead(first) == []
    assert queue.ahead(second) == [queue.file(0).name]


def test_a_copied_ticket_is_one_place(queue: Queue) -> None:
    """If the ticket of a waiter is replaced by a copy, the waiter rejoins at the end."""
    first, second = queue.join(), queue.join()
    said, number = queue.file(0).read_bytes(), queue.file(0).stat().st_mtime_ns
    queue.file(0).rename(queue.path / "moved")
    with have(queue.file(0), said):
        os.utime(queue.file(0), ns=(number, number))
        assert not first.is_valid()
        queue.rejoin(first)
        assert {*queue.ahead(first)} == {queue.file(0).name, queue.file(1).name}
        assert queue.ahead(second) == [queue.file(0).name]


def test_an_edited_list_of_a_waiter(queue: Queue) -> None:
    """A waiter that rejoins passes a later one, once that has written its edited list again."""
    first, second = queue.join(command="python a.py"), queue.join()
    first.__exit__()
    assert queue.ahead(second) == []
    queue.file(1).write_text(json.dumps({"asks": "a GPU", "behind": []}))
    first = queue.join(command="python a.py")
    assert queue.ahead(first) == [queue.file(1).name]
    assert queue.ahead(second) == [queue.file(0).name]
    assert queue.ahead(first) == []


def test_a_return_that_is_seen_late(queue: Queue) -> None:
    """A waiter that rejoins in time keeps its place, even if the others look only later."""
    first, second = queue.join(command="python a.py"), queue.join(back_s=0.1)
    first.__exit__()
    assert queue.ahead(second) == []
    end = procfs.now().boot + 0.1
    queue.join(command="python a.py")
    while procfs.now().boot < end:
        time.sleep(0.01)
    assert queue.ahead(second) == [queue.file(0).name]


@pytest.mark.usefixtures("told")
def test_a_device_file_with_a_second_name(queue: Queue) -> None:
    """A waiter keeps its place if the lock file of its device gets a second name."""
    with queue.directory.mutex():
        device = queue.directory.lock_device(UUIDS[0], share=False)
    assert isinstance(device, Lock)
    first, second = queue.join(command="python a.py"), queue.join()
    os.link(device.path, queue.path / "GPU-other.lock")
    first.__exit__()
    assert queue.ahead(second) == []
    again = queue.join(command="python a.py")
    assert queue.ahead(again) == []
    assert queue.ahead(second) == [queue.file(0).name]
    device.release()


def a_ticket(number: int, *behind: int) -> Ticket:
    """Return a ticket that lists the tickets with these numbers as ahead of it."""
    listed = (TicketAhead(f"{each}", each) for each in behind)
    return Ticket(number, f"{number}", None, Holder(), tickets_ahead="\n".join(map(str, listed)))


def test_the_order_of_tickets() -> None:
    """A ticket follows the tickets that it lists, and the number decides otherwise."""
    orders = {
        "numbers": ([a_ticket(3), a_ticket(1), a_ticket(2)], [1, 2, 3]),
        "a number too low": ([a_ticket(1, 2), a_ticket(2)], [2, 1]),
        "a chain": ([a_ticket(1, 2), a_ticket(2, 3), a_ticket(3)], [3, 2, 1]),
        "each other": ([a_ticket(1, 2), a_ticket(2, 1), a_ticket(3, 1, 2)], [1, 2, 3]),
        "itself, and one that has gone": ([a_ticket(1, 1, 9), a_ticket(2)], [1, 2]),
    }
    for name, (tickets, expected) in orders.items():
        assert [each.number for each in in_order(tickets)] == expected, name


def test_places_that_are_left_are_used_at_last(queue: Queue) -> None:
    """Those who have left keep nobody out of the queue: one user has so many files and no more."""
    for number in range(MOST_OF_ONE_USER):
        queue.join(command=f"python left{number}.py").__exit__()
    assert queue.ahead(queue.join(command="python new.py")) == []
    assert len([*queue.path.glob("queue-*")]) == MOST_OF_ONE_USER


@pytest.mark.parametrize("number", [0, 2**33 - 1, 2**53, 2**62], ids=hex)
def test_forged_number(queue: Queue, number: int) -> None:
    """A ticket with a forged number does not pass earlier waiters, and keeps its own place."""
    first = queue.join()
    forged = queue.file(1)
    with have(forged):
        os.utime(forged, ns=(number, number))
        second, third = queue.join(), queue.join()
        names = [queue.file(number).name for number in (0, 2)]
        assert queue.ahead(first) == []
        assert {*queue.ahead(second)} == {forged.name, names[0]}
        assert {*queue.ahead(third)} == {forged.name, *names}


def test_number_is_restored(queue: Queue) -> None:
    """Who touches the files of a queue delays nobody for longer than a second."""
    first, second = queue.join(), queue.join()
    os.utime(queue.file(0))
    assert queue.ahead(second) == []
    first.heartbeat()
    assert queue.ahead(second) == [queue.file(0).name]
    assert queue.ahead(first) == []


def test_deleted_ticket(queue: Queue) -> None:
    """Whose ticket was deleted takes the old place with the new one."""
    first, second = queue.join(), queue.join()
    queue.file(0).unlink()
    assert not first.is_valid()
    assert queue.ahead(second) == []
    queue.rejoin(first)
    assert first.is_valid()
    assert queue.ahead(second) == [queue.file(0).name]
    assert queue.ahead(first) == []


def test_unused_file_is_no_ticket(queue: Queue) -> None:
    """The file of who has left counts for nothing, whether it is there or deleted."""
    first, second = queue.join(), queue.join()
    first.__exit__()
    assert queue.file(0).exists()
    for _ in range(2):
        assert [ticket.name for ticket in queue.tickets()] == [queue.file(1).name]
        assert queue.ahead(second) == []
        queue.file(0).unlink(missing_ok=True)


def test_files_are_used_again(queue: Queue) -> None:
    """However often somebody waits, there are as many files as ever waited together."""
    queue.join()
    for _ in range(5):
        served(queue.join())
    assert len(list(queue.path.glob("queue-*"))) == 2


# -- who is stopped --------------------------------------------------------------------------------


def test_stopped(queue: Queue) -> None:
    """Who gives no sign of life is passed over after a while, and keeps the place."""
    stopped, other, last = queue.join(), queue.join(), queue.join(stopped_s=0.05)
    names = [queue.file(0).name, queue.file(1).name]
    assert queue.ahead(last) == names
    end = in_s(LONG_S)
    while queue.ahead(last) != names[1:]:
        assert time.monotonic() < end
        other.heartbeat()
        time.sleep(0.01)
    stopped.heartbeat()
    assert queue.ahead(last) == names
    assert queue.ahead(other) == names[:1]


def test_signs_of_life(queue: Queue) -> None:
    """Who gives signs of life is never passed over, and who looks seldom passes over nobody."""
    alive, other = queue.join(), queue.join(stopped_s=0.05)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        time.sleep(0.01)
        alive.heartbeat()
        assert queue.ahead(other) == [queue.file(0).name]
    time.sleep(0.06)
    alive.heartbeat()
    assert queue.ahead(other) == [queue.file(0).name]


def test_listed_tickets_are_compared_as_text(queue: Queue) -> None:
    """The number of calls does not depend on the number of tickets that each waiter lists."""
    calls = []
    for listed in (0, 500):
        ahead = [f"queue-{OTHER_UID}-{number}.lock {number}" for number in range(listed)]
        with ExitStack() as stack:
            for number in range(10):
                present = [f"{queue.file(each).name} {each}" for each in range(number)]
                record = json.dumps({"asks": "a GPU", "behind": ahead + present}).encode()
                stack.enter_context(have(queue.file(number), record))
                os.utime(queue.file(number), ns=(number, number))
            with counting() as called:
                tickets = queue.tickets()
        assert [ticket.number for ticket in tickets] == [*range(10)]
        calls.append(len(called))
    assert calls[1] < calls[0] + 100


@pytest.mark.usefixtures("told")
def test_a_new_request_does_not_read_the_open_files_of_waiters(queue: Queue) -> None:
    """A request without a ticket finds the PID of a waiter only if that waiter has precedence."""
    queue.join()
    queue.join()
    request = EndOfQueue(queue.directory)
    with counting(procfs.LockedFiles.has) as looks, queue.directory.mutex():
        request.ahead()
        assert not looks
        first = request.first_ahead(
            UUIDS[0], is_open=True, is_free=lambda _: True, is_possible=lambda _: True
        )
    assert first
    assert first.holder.listed_pid == os.getpid()
    assert len(looks) == 1


@pytest.mark.usefixtures("told")
def test_other_names_are_forgotten(queue: Queue) -> None:
    """A look remembers only files whose names belong to this program."""
    share = f"{UUIDS[0]}.share-{os.geteuid()}-0.lock"
    for name in ("random-1-2-file", "queue-1.txt", "record-1-1000", share):
        (queue.path / name).touch()
    with queue.directory.mutex():
        assert queue.directory.holders.names == {"mutex.lock", share}
        assert queue.directory.holders.user_files(f"{UUIDS[0]}.share") == [share]


@pytest.mark.usefixtures("told")
def test_few_files_are_tested_without_the_kernels_lock_list(queue: Queue) -> None:
    """Without other holders, queue and numbers are read without /proc/locks, which is slow."""
    with queue.directory.mutex():
        lock = queue.directory.lock_device(UUIDS[0], share=False)
        assert isinstance(lock, Lock)
        lock.write(Record(label="GPU0", index=0))
    with opened("locks") as readings, queue.directory.mutex():
        assert queue.directory.tickets() == []
        assert not queue.directory.is_number_recorded(0, UUIDS[0])
        assert queue.directory.is_number_recorded(0, UUIDS[1])
    lock.release()
    assert not readings


def test_second_name_of_a_lock(queue: Queue) -> None:
    """A ticket's name given to a lock that is held makes nobody stand behind that."""
    with queue.directory.mutex():
        os.link(queue.path / "mutex.lock", queue.file(0))
        assert queue.directory.tickets() == []
    assert queue.ahead(queue.join()) == []
    assert queue.file(1).exists()


RECORDS = {
    "empty": (b"", None),
    "rubbish": (b"rubbish\x00\xff", None),
    "a list": (b"[]", None),
    "deep": (b"[" * 50_000, None),
    "too long": (ticket([UUIDS[0], "x" * 70_000]), None),
    "wants are a mapping": (ticket({UUIDS[0]: 1}), None),
    "wants are none": (ticket([1, None, {}, [UUIDS[0]]]), []),
    "some wants are none": (ticket([1, UUIDS[0], None]), UUIDS[:1]),
    "more wants than fit": (ticket([UUIDS[0], *["x"] * 1023, UUIDS[1]]), [*UUIDS[:1], "x"]),
}


@pytest.mark.parametrize("record", RECORDS)
def test_record(queue: Queue, record: str) -> None:
    """Who holds a ticket that names no devices waits for any; rubbish in it leaves the order."""
    data, wants = RECORDS[record]
    path = queue.file(0)
    with have(path, data):
        os.utime(path, ns=(1, 1))
        place = queue.join()
        first, second = queue.tickets()
        assert first.wants == (None if wants is None else frozenset(wants))
        assert first.could_use(UUIDS[1]) == (wants is None)
        assert second.wants == frozenset(UUIDS)
        assert queue.ahead(place) == [path.name]
    assert path.read_bytes() == data


# -- waking ----------------------------------------------------------------------------------------


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def test_without_news_the_moment_ends_a_wait() -> None:
    """Who waits does so until the given moment if nothing happens."""
    end = in_s(0.05)
    assert not wait_for_news(end, lambda: False)
    assert time.monotonic() >= end


def test_a_wait_that_is_over_can_be_given_up() -> None:
    """What may end a call is asked also where the moment has passed: each look may take so long."""

    def give_up() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        wait_for_news(0.0, lambda: False, give_up)


@pytest.mark.usefixtures("told")
def test_news_ends_a_wait(queue: Queue) -> None:
    """A lock that is released while somebody waits is news, which ends the wait."""
    other = queue.join()
    (ticket,) = queue.tickets()

    def is_news() -> bool:
        return bool(queue.directory.unlisted([ticket.name]))

    assert not wait_for_news(in_s(0.01), is_news)
    assert wait_for_news(in_s(LONG_S), is_news, other.__exit__)


@pytest.mark.usefixtures("told")
def test_looks_are_few() -> None:
    """Who waits looks a few times a second."""
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return False

    start = time.monotonic()
    assert not wait_for_news(start + 3 * POLL_S, look)
    assert 1 <= looks <= 1 + (time.monotonic() - start) / POLL_S


@obstacles
def test_obstacle(queue: Queue, obstacle: str) -> None:
    """What is no ticket in a ticket's place is neither waited for nor written to."""
    with obstructed(queue.file(0), obstacle):
        place = queue.join()
        assert [ticket.name for ticket in queue.tickets()] == [queue.file(1).name]
        assert queue.ahead(place) == []
