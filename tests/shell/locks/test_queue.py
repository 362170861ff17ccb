"""The queue in a real lock directory, with several waiters in the test process."""

from __future__ import annotations

import json
import os
import resource
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from reserve_gpu.locks.queue import QueueEntry, wait_for_news
from reserve_gpu.model.holders import Record
from reserve_gpu.system import procfs
from tests.support.locked import have, opened
from tests.support.processes import wait_for
from tests.support.queues import LONG_S, UUIDS, Queue, locked_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

A: dict[str, Any] = {"command": "python a.py"}  # a waiter that can rejoin as itself


def serve(place: QueueEntry) -> None:
    """Let a waiter leave the queue with the device that it waited for."""
    place.is_served = True
    place.__exit__()


def forged_copy(queue: Queue, number: int) -> AbstractContextManager[int]:
    """Return a context that locks a file with the present content and time of a ticket."""
    path = queue.file(number)
    content, time_ns = path.read_bytes(), path.stat().st_mtime_ns

    @contextmanager
    def copy() -> Iterator[int]:
        with have(path, content) as descriptor:
            os.utime(path, ns=(time_ns, time_ns))
            yield descriptor

    return copy()


# -- the order -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_disk_full", [False, True], ids=["usual", "full disk"])
def test_waiters_are_served_in_the_order_in_which_they_joined(
    queue: Queue, *, is_disk_full: bool
) -> None:
    """The first waiter is first, whatever its file's number, even if no record can be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_disk_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        a, b, c = (queue.join() for _ in range(3))
        names = [queue.file(number).name for number in range(3)]
        assert [queue.ahead(place) for place in (a, b, c)] == [[], names[:1], names[:2]]
        a.__exit__()
        d = queue.join()
        tickets = queue.tickets()
        assert [ticket.name for ticket in tickets][:2] == names[1:]
        assert [queue.ahead(place) for place in (b, c, d)] == [[], names[1:2], names[1:]]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert all(ticket.could_use("GPU-any") is is_disk_full for ticket in tickets)


# -- leaving and rejoining -------------------------------------------------------------------------


def test_a_waiter_that_rejoins_gets_its_old_place(queue: Queue) -> None:
    """A waiter that has left blocks no other waiter, and rejoins at its old place."""
    first, second = queue.join(**A), queue.join()
    first.__exit__()
    assert queue.ahead(second) == []
    third = queue.join()
    assert queue.file(2).exists()  # the left ticket is not used by another waiter
    assert len(queue.ahead(third)) == 1
    again = queue.join(**A)
    assert queue.ahead(again) == []
    assert queue.ahead(second) == [queue.file(0).name]


@pytest.mark.parametrize(
    "about",
    [{"command": "python b.py"}, {"asks": "2 GPUs"}],
    ids=lambda about: next(iter(about)),
)
def test_a_different_request_does_not_get_an_old_place(queue: Queue, about: dict[str, Any]) -> None:
    """A different request, or the same request from elsewhere, joins at the end."""
    own: dict[str, Any] = {**A, "cwd": "/a", "asks": "a GPU"}
    first, second = queue.join(**own), queue.join()
    first.__exit__()
    assert queue.ahead(queue.join(**{**own, **about})) == [queue.file(1).name]
    assert queue.ahead(second) == []


@pytest.mark.parametrize(
    ("back_s", "is_served"), [(0.0, False), (LONG_S, True)], ids=["expired", "served"]
)
def test_an_old_place_expires(queue: Queue, back_s: float, *, is_served: bool) -> None:
    """A waiter does not get its old place after the time limit, or after it was served."""
    first, second = queue.join(**A, back_s=back_s), queue.join()
    first.is_served = is_served
    assert first.keeps_place is not is_served
    first.__exit__()
    again = queue.join(**A, back_s=back_s)
    assert queue.ahead(again) == [queue.file(1).name]
    assert queue.ahead(second) == []


def test_other_waiters_forget_a_waiter_that_was_away_too_long(queue: Queue) -> None:
    """If a waiter was away for too long, it rejoins behind the waiters that noticed."""
    first, second = queue.join(**A), queue.join(back_s=0.0)
    assert queue.ahead(second) == [queue.file(0).name]
    first.__exit__()
    assert queue.ahead(second) == []
    again = queue.join(**A)
    assert queue.ahead(again) == [queue.file(1).name]
    assert queue.ahead(second) == []


def test_a_return_in_time_counts_even_if_it_is_noticed_late(queue: Queue) -> None:
    """A waiter that rejoins in time keeps its place, even if the others look only later."""
    first, second = queue.join(**A), queue.join(back_s=0.1)
    first.__exit__()
    assert queue.ahead(second) == []
    end = procfs.now().boot + 0.1
    queue.join(**A)
    wait_for(lambda: procfs.now().boot >= end)
    assert queue.ahead(second) == [queue.file(0).name]


def test_two_waiters_rejoin_in_their_old_order(queue: Queue) -> None:
    """A waiter that rejoins does not pass waiters that were ahead of it and left as well."""
    first, second = queue.join(**A), queue.join(command="python b.py")
    first.__exit__()
    second.__exit__()
    second = queue.join(command="python b.py")
    first = queue.join(**A)
    assert queue.ahead(first) == []
    assert queue.ahead(second) == [queue.file(0).name]


def test_a_listed_ticket_is_not_a_later_ticket_in_the_same_file(queue: Queue) -> None:
    """A waiter that rejoins is not ahead of one that lists an earlier ticket of the same file."""
    old, first = queue.join(), queue.join()
    serve(old)
    second = queue.join(**A)
    assert queue.file(0).stat().st_size  # it uses the file of the served waiter
    second.__exit__()
    again = queue.join(**A)
    assert queue.ahead(again) == [queue.file(1).name]
    assert queue.ahead(first) == []


@pytest.mark.usefixtures("told")
def test_a_served_waiter_does_not_get_its_place_back_with_a_forged_ticket(queue: Queue) -> None:
    """A killed waiter that had locked a device does not pass others with a copy of its ticket."""
    first, second = queue.join(**A), queue.join()
    forged = forged_copy(queue, 0)
    with locked_gpu(queue):
        first.__exit__()  # without emptying its file
        assert queue.ahead(second) == []
    with forged:
        assert queue.ahead(second) == []


def test_an_emptied_ticket_is_that_of_a_served_waiter(queue: Queue) -> None:
    """A waiter that emptied its file does not get its place back with a copy of its ticket."""
    first, second = queue.join(**A), queue.join()
    forged = forged_copy(queue, 0)
    serve(first)
    assert queue.ahead(second) == []
    with forged:
        assert queue.ahead(second) == []


def test_left_tickets_do_not_use_up_a_users_files(queue: Queue) -> None:
    """If a user has as many files as allowed, a new waiter uses the file of a left ticket."""
    for number in range(MOST_OF_ONE_USER):
        queue.join(command=f"python left{number}.py").__exit__()
    assert queue.ahead(queue.join(command="python new.py")) == []
    assert len([*queue.path.glob("queue-*")]) == MOST_OF_ONE_USER


def test_a_waiter_replaces_its_deleted_ticket(queue: Queue) -> None:
    """A waiter whose ticket was deleted rejoins at its old place with a new ticket."""
    first, second = queue.join(), queue.join()
    queue.file(0).unlink()
    assert not first.is_valid()
    assert queue.ahead(second) == []
    queue.rejoin(first)
    assert first.is_valid()
    assert queue.ahead(second) == [queue.file(0).name]
    assert queue.ahead(first) == []


# -- forged tickets --------------------------------------------------------------------------------


def test_a_forged_list_in_a_left_ticket_passes_no_waiter(queue: Queue) -> None:
    """A waiter that rejoins with a forged list does not pass earlier waiters."""
    first, second = queue.join(), queue.join(**A)
    second.__exit__()
    record = json.loads(queue.file(1).read_bytes())
    assert record["behind"] == [f"{queue.file(0).name} {queue.file(0).stat().st_mtime_ns}"]
    queue.file(1).write_text(json.dumps({**record, "behind": []}))
    again = queue.join(**A)
    assert queue.ahead(again) == [queue.file(0).name]
    assert queue.ahead(first) == []


def test_a_left_ticket_that_no_waiter_lists_is_not_ahead(queue: Queue) -> None:
    """A left ticket, even a recently changed one, is ahead only of the waiters that list it."""
    queue.join(**A).__exit__()
    queue.file(0).chmod(0o640)  # this and the next line renew the ctime
    queue.file(0).chmod(0o644)
    second = queue.join()
    again = queue.join(**A)
    assert queue.ahead(again) == [queue.file(1).name]
    assert queue.ahead(second) == []


def test_invalid_entries_in_a_list_are_ignored(queue: Queue) -> None:
    """Waiters can join behind a ticket that lists invalid names and numbers."""
    names = ["queue\0", "queue-\ud800", "../x", "queue-0-0.lock/", "queue-0-5.lock"]
    numbers = ["", "-1", "\u0661", "9" * 5000, "1 left", "1 x", "1 7", "1 8"]
    entries: list[object] = [7, "queue", "queue-0-0.lock", *(f"{name} 1" for name in names)]
    entries += [f"queue-0-{each}.lock {number}" for each in (0, 5) for number in numbers]
    entries += [f"queue-0-{number}.lock {number}" for number in range(900)]
    record = json.dumps({"asks": "a GPU", "behind": entries})
    with have(queue.file(0), record.encode()):
        assert queue.ahead(queue.join()) == [queue.file(0).name]


def test_a_copied_ticket_has_no_place(queue: Queue) -> None:
    """If the ticket of a waiter is replaced by a copy, the waiter rejoins at the end."""
    first, second = queue.join(), queue.join()
    forged = forged_copy(queue, 0)
    queue.file(0).rename(queue.path / "moved")
    with forged:
        assert not first.is_valid()
        queue.rejoin(first)
        assert {*queue.ahead(first)} == {queue.file(0).name, queue.file(1).name}
        assert queue.ahead(second) == [queue.file(0).name]


def test_a_waiter_restores_its_edited_list(queue: Queue) -> None:
    """A waiter that rejoins passes a later one as soon as the later one restores its list."""
    first, second = queue.join(**A), queue.join()
    first.__exit__()
    assert queue.ahead(second) == []
    queue.file(1).write_text(json.dumps({"asks": "a GPU", "behind": []}))
    first = queue.join(**A)
    assert queue.ahead(first) == [queue.file(1).name]
    assert queue.ahead(second) == [queue.file(0).name]
    assert queue.ahead(first) == []


@pytest.mark.parametrize("number", [0, 2**62], ids=hex)
def test_a_forged_time_of_a_ticket_passes_no_waiter(queue: Queue, number: int) -> None:
    """A ticket with a forged time does not pass earlier waiters, and keeps its own place."""
    first = queue.join()
    forged = queue.file(1)
    with have(forged):
        os.utime(forged, ns=(number, number))
        second, third = queue.join(), queue.join()
        names = [queue.file(number).name for number in (0, 2)]
        assert queue.ahead(first) == []
        assert {*queue.ahead(second)} == {forged.name, names[0]}
        assert {*queue.ahead(third)} == {forged.name, *names}


def test_a_heartbeat_restores_the_time_of_a_ticket(queue: Queue) -> None:
    """A waiter whose ticket was touched has its place again after its next heartbeat."""
    first, second = queue.join(), queue.join()
    os.utime(queue.file(0))
    assert queue.ahead(second) == []
    first.heartbeat()
    assert queue.ahead(second) == [queue.file(0).name]
    assert queue.ahead(first) == []


def with_wants(wants: object) -> bytes:
    """Return the content of a ticket that asks for these devices."""
    return json.dumps({"pid": 1, "wants": wants}).encode()


@pytest.mark.parametrize(
    ("content", "wants"),
    [
        pytest.param(b"not JSON\x00\xff", None, id="not JSON"),
        pytest.param(with_wants([UUIDS[0], "x" * 70_000]), None, id="too long"),
        pytest.param(with_wants([1, None, {}, [UUIDS[0]]]), set(), id="no valid device"),
        pytest.param(
            with_wants([UUIDS[0], *["x"] * 1023, UUIDS[1]]), {UUIDS[0], "x"}, id="too many devices"
        ),
    ],
)
def test_a_ticket_without_valid_devices_waits_for_any_device(
    queue: Queue, content: bytes, wants: set[str] | None
) -> None:
    """A locked ticket keeps its place whatever its content, and waits for any device by default."""
    path = queue.file(0)
    with have(path, content):
        os.utime(path, ns=(1, 1))
        place = queue.join()
        first, second = queue.tickets()
        assert first.wants == wants
        assert first.could_use(UUIDS[1]) == (wants is None)
        assert second.wants == frozenset(UUIDS)
        assert queue.ahead(place) == [path.name]
    assert path.read_bytes() == content


def test_a_ticket_name_of_the_mutex_is_not_a_ticket(queue: Queue) -> None:
    """A locked file that gets a ticket's name as a second name is not a ticket."""
    with queue.directory.mutex():
        os.link(queue.path / "mutex.lock", queue.file(0))
        assert queue.directory.tickets() == []
    assert queue.ahead(queue.join()) == []
    assert queue.file(1).exists()


# -- stopped waiters -------------------------------------------------------------------------------


def test_a_waiter_without_heartbeats_is_skipped(queue: Queue) -> None:
    """A waiter without heartbeats is skipped, and has its old place after its next heartbeat."""
    stopped, other, last = queue.join(), queue.join(), queue.join(stopped_s=0.05)
    names = [queue.file(0).name, queue.file(1).name]
    assert queue.ahead(last) == names

    def is_skipped() -> bool:
        other.heartbeat()
        return queue.ahead(last) == names[1:]

    def is_back() -> bool:
        other.heartbeat()
        stopped.heartbeat()
        return queue.ahead(last) == names

    wait_for(is_skipped)
    wait_for(is_back)
    assert queue.ahead(other) == names[:1]


def test_a_waiter_with_heartbeats_is_never_skipped(queue: Queue) -> None:
    """A waiter with heartbeats is not skipped, even by a waiter that checks rarely."""
    alive, other = queue.join(), queue.join(stopped_s=0.05)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        time.sleep(0.01)
        alive.heartbeat()
        assert queue.ahead(other) == [queue.file(0).name]
    time.sleep(0.06)
    alive.heartbeat()
    assert queue.ahead(other) == [queue.file(0).name]


@pytest.mark.usefixtures("told")
def test_a_few_files_are_tested_without_the_kernels_lock_list(queue: Queue) -> None:
    """Without other holders, the queue is read without /proc/locks, which is slow."""
    with locked_gpu(queue) as lock:
        lock.write(Record(label="GPU0", index=0))
        with opened("locks") as reads, queue.directory.mutex():
            assert queue.directory.tickets() == []
            assert not queue.directory.is_number_recorded(0, UUIDS[0])
            assert queue.directory.is_number_recorded(0, UUIDS[1])
    assert not reads


@pytest.mark.usefixtures("told")
def test_a_released_lock_ends_a_wait(queue: Queue) -> None:
    """A lock that is released during a wait is news, which ends the wait."""
    other = queue.join()
    (ticket,) = queue.tickets()

    def is_news() -> bool:
        return bool(queue.directory.unlisted([ticket.name]))

    assert not wait_for_news(time.monotonic() + 0.01, is_news)
    assert wait_for_news(time.monotonic() + LONG_S, is_news, other.__exit__)
