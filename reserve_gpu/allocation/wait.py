"""Waiting in the queue: an attempt now and then, and whenever somebody has released something."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.allocation import policy, snapshot
from reserve_gpu.allocation.outcome import Denied, Granted
from reserve_gpu.locks.queue import EndOfQueue, Place, wait_for_news
from reserve_gpu.locks.record import myself
from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.errors import LockError, MutexHeldError
from reserve_gpu.model.holders import Record, Row
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.requests import NO_LEASE, Asks
from reserve_gpu.system import executor, procfs

if TYPE_CHECKING:
    from collections.abc import Callable

    from reserve_gpu.allocation.attempt import Asking
    from reserve_gpu.allocation.request import Deadline
    from reserve_gpu.model.queue import Ticket

SECOND_S = 1.0  # what counts seconds is shown anew each second
OFFERS_LIMIT_S = 30.0  # how long a request that does not wait gives the waiters, of all users
EXPLAIN_EVERY_S = 5.0  # so often a waiter asks again who is on a device that is refused as before


def wait_in_queue(
    asking: Asking,
    denied: Denied,
    deadline: Deadline,
    attempt: Callable[[Place], Granted | Denied],
    between: Callable[[], object],
) -> Granted | Denied:
    """Wait in the queue until what is asked for can be taken, or the time is over.

    denied: what came of the first attempt. attempt: makes another one. between: called again and
    again while this waits. Each second, and after each look, the caller is told how it stands.
    """
    request, size = asking.request, asking.request.promise.size
    fitting = [row.device for row in denied.rows if row.state is not State.UNFIT]
    devices = [device for device in fitting if isinstance(device, Device)]
    # Who waits for a percentage, of devices of several sizes, is not passed for the largest one.
    size = size and max(map(size.of, devices), default=size)
    promise = request.promise._replace(lease=NO_LEASE, size=size)
    record = Record(myself(), promise, Asks(deadline.asks, request.needed))
    explain = Explainer(asking)
    outcome: Granted | Denied = denied
    start = due = time.monotonic()
    lively_until = 0.0
    with Place(asking.locks, policy.wanted(denied.rows), record) as place:
        news = News(asking)
        while isinstance(outcome, Denied):
            if time.monotonic() >= min(due, deadline.at) or not place.stands():
                outcome = _try_again(asking, outcome, place, attempt)
                if isinstance(outcome, Granted):
                    place.is_served = True
                    break
                news.forget(outcome)
                due = time.monotonic() + policy.next_look_s(
                    outcome.rows,
                    is_lively=time.monotonic() < lively_until or not place.stands(),
                    is_told=news.is_told,
                )
            if not deadline.left_s:
                break
            place.heartbeat()
            waited_s = time.monotonic() - start
            ahead = [
                t for t in outcome.ahead if any(t.could_use(device.uuid) for device in devices)
            ]
            rows = tuple(map(explain, outcome.rows))
            first = explain.ticket(ahead[0]) if ahead else None
            limit_s = deadline.limit_s or 0.0
            executor.tell(Waiting(request, 1 + len(ahead), waited_s, rows, limit_s, first))
            next_second = start + waited_s - waited_s % SECOND_S + SECOND_S
            if wait_for_news(min(due, deadline.at, next_second), news, between):
                # Whoever is next looks first: all at once would keep it from the mutex.
                executor.sleep(policy.turn_s(len(ahead)))
                due = time.monotonic()
                lively_until = due + policy.LIVELY_S
            elif not news.is_told:
                due = min(due, time.monotonic() + policy.LOOK_S)
    return outcome


def wait_for_offers(
    asking: Asking,
    attempt: Callable[[Place], Granted | Denied],
    between: Callable[[], object],
) -> Granted | Denied:
    """Give the waiters `STOPPED_S` to take the free devices that they come first for.

    A request that does not wait comes after all waiters. Without this limit, a waiter that is
    stopped, or never takes what it asks for, would block such requests for as long as it lives.

    Args:
        asking: The request.
        attempt: Makes another attempt.
        between: Called repeatedly during the wait.

    Returns:
        The outcome of the last attempt.
    """
    queue, news, explain = EndOfQueue(asking.locks), News(asking), Explainer(asking)
    start, outcome = time.monotonic(), attempt(queue)
    while isinstance(outcome, Denied) and policy.is_only_awaited(outcome.rows, asking.request):
        now = time.monotonic()
        limit_s = queue.passes_at - start
        if limit_s > OFFERS_LIMIT_S or now - start > OFFERS_LIMIT_S:  # inf: it will not pass
            break
        rows, place = tuple(map(explain, outcome.rows)), 1 + len(outcome.ahead)
        executor.tell(Waiting(asking.request, place, now - start, rows, limit_s))
        news.forget(outcome)
        next_look = min(queue.passes_at, now + SECOND_S)
        wait_for_news(max(next_look, now + executor.POLL_S), news, between)
        outcome = attempt(queue)
    return outcome


class News:
    """Tells whether somebody may have released a device, or left the queue, since a look.

    Attributes:
        is_told: Whether the kernel's list shows that. Not if it is too long, or in a container;
            then it is not read until the next look.
    """

    def __init__(self, asking: Asking) -> None:
        self._locks = asking.locks
        self._names: list[str] = []
        self._missing: set[str] = set()
        self.is_told = False

    def forget(self, denied: Denied) -> None:
        """Begin anew with what the last look has seen."""
        holders = [holder for row in denied.rows for holder in (*row.holders, *row.counted)]
        self._names = [holder.file for holder in holders if holder.file]
        self._names += [ticket.name for ticket in denied.ahead]
        self.is_told = self._locks.unlisted(()) is not None

    def __call__(self) -> bool:
        """Look into the kernel's list. What it does not show though it is held is no news twice."""
        before = self._missing
        missing = self._locks.unlisted(self._names) if self.is_told else None
        self.is_told = missing is not None
        self._missing = before if missing is None else missing
        return not self._missing <= before


class Explainer:
    """Explains rows, and asks again about the same device only now and then."""

    def __init__(self, asking: Asking, every_s: float = EXPLAIN_EVERY_S) -> None:
        self._asking, self._every_s = asking, every_s
        self._known: dict[str, tuple[object, float, Row]] = {}
        self._first: tuple[str, Ticket] | None = None

    def ticket(self, first: Ticket) -> Ticket:
        """Return the first one in the queue with its user."""
        if self._first is None or self._first[0] != first.name:
            self._first = first.name, first._replace(holder=procfs.with_user(first.holder))
        return self._first[1]

    def __call__(self, row: Row) -> Row:
        """Return the row with what runs on the device and whose it is."""
        people = [(h.pid, h.part_mib) for h in (*row.holders, row.awaited_by) if h]
        before, asked_at, answer = self._known.get(row.label, (None, 0.0, row))
        is_due = time.monotonic() - asked_at >= self._every_s
        if is_due or before != (row.state, people):
            (answer,) = snapshot.explained(self._asking.gpus, [row], self._asking.idle_mib)
            self._known[row.label] = (row.state, people), time.monotonic(), answer
        return answer


def _try_again(
    asking: Asking,
    denied: Denied,
    place: Place,
    attempt: Callable[[Place], Granted | Denied],
) -> Granted | Denied:
    """Try once more. A fault that may pass does not end the wait of one who is in the queue.

    Raises LockError where this process can't even join the queue.
    """
    try:
        asking.locks.follow()
        return attempt(place)
    except LockError as error:  # a full disk, or a driver that hangs under the mutex
        if place.has_joined or isinstance(error, MutexHeldError):
            return denied
        raise
