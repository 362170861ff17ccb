"""Wait in the queue, retrying at intervals and whenever a lock might have been released."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.allocation import policy, snapshot
from reserve_gpu.allocation.attempt import Denied, Granted
from reserve_gpu.locks.lock import describe_this_process
from reserve_gpu.locks.queue import EndOfQueue, QueueEntry, identified, wait_for_news
from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.errors import LockError, MutexHeldError
from reserve_gpu.model.holders import DeviceStatus, Record
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.requests import NO_LEASE, WaitRequest
from reserve_gpu.system import executor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.allocation.attempt import AttemptContext
    from reserve_gpu.allocation.request import Deadline
    from reserve_gpu.model.queue import Ticket

SECOND_S = 1.0  # seconds between progress reports
OFFERS_LIMIT_S = 30.0  # maximum seconds for which a non-waiting request lets waiters go first
EXPLAIN_EVERY_S = 10.0  # seconds between updates of an unchanged device's users and processes


def queue_entry(context: AttemptContext, denied: Denied, deadline: Deadline) -> QueueEntry:
    """Return the queue entry for a request that has been denied, before it joins the queue.

    Args:
        context: The inputs to the attempts.
        denied: The result of the first attempt.
        deadline: The deadline for the wait.
    """
    request, size = context.request, context.request.terms.size
    # A percentage means a different amount of memory on each size of device, so record the largest
    # amount. If the amount were smaller, other processes might expect this waiter to take a device
    # that has too little free memory for it, and skip the waiter when it doesn't.
    size = size and max(map(size.of, _fitting_devices(denied)), default=size)
    terms = request.terms._replace(lease=NO_LEASE, size=size)
    record = Record(describe_this_process(), terms, WaitRequest(deadline.asks, request.needed))
    return QueueEntry(context.locks, policy.wanted_uuids(denied.rows), record)


def _fitting_devices(denied: Denied) -> list[Device]:
    fitting = [row.device for row in denied.rows if row.state is not State.UNFIT]
    return [device for device in fitting if isinstance(device, Device)]


def wait_in_queue(  # noqa: PLR0913 - the last three are keyword-only
    context: AttemptContext,
    denied: Denied,
    deadline: Deadline,
    *,
    entry: QueueEntry,
    attempt: Callable[[QueueEntry], Granted | Denied],
    between: Callable[[], object],
) -> Granted | Denied:
    """Wait in the queue until the request is granted or the deadline has passed.

    Progress is reported to the caller every second and after each attempt.

    Args:
        context: The inputs to the attempts.
        denied: The result of the first attempt.
        deadline: The deadline for the wait.
        entry: The queue entry. This function joins the queue and leaves it.
        attempt: A function that makes another attempt.
        between: A function called repeatedly during the wait.

    Returns:
        The result of the last attempt.

    Raises:
        LockError: This process can't join the queue.
    """
    request, devices = context.request, _fitting_devices(denied)
    explain = Explainer(context)
    outcome: Granted | Denied = denied
    due = time.monotonic()
    lively_until = 0.0
    with entry:
        news = LockChanges(context)
        while isinstance(outcome, Denied):
            if time.monotonic() >= min(due, deadline.at) or not entry.is_valid():
                outcome = _try_again(context, outcome, entry, attempt)
                if isinstance(outcome, Granted):
                    entry.is_served = True
                    break
                news.forget(outcome)
                due = time.monotonic() + policy.next_check_s(
                    outcome.rows,
                    is_lively=time.monotonic() < lively_until or not entry.is_valid(),
                    is_told=news.is_told,
                )
            if not deadline.left_s:
                break
            entry.heartbeat()
            waited_s = entry.waited_s
            ahead = [
                t for t in outcome.ahead if any(t.could_use(device.uuid) for device in devices)
            ]
            rows = explain(outcome.rows)
            first = explain.ticket(ahead[0]) if ahead else None
            limit_s = (deadline.limit_s or 0.0) + entry.earlier_s
            executor.report_progress(
                Waiting(request, 1 + len(ahead), waited_s, rows, limit_s, first)
            )
            next_second = time.monotonic() + SECOND_S - waited_s % SECOND_S
            if wait_for_news(min(due, deadline.at, next_second), news, between):
                # Let the first waiter in the queue check first. If all waiters checked at the same
                # time, the first waiter would have to wait for the mutex.
                executor.sleep(policy.turn_s(len(ahead)))
                due = time.monotonic()
                lively_until = due + policy.LIVELY_S
            elif not news.is_told:
                due = min(due, time.monotonic() + policy.LOOK_S)
    return outcome


def wait_for_offers(
    context: AttemptContext,
    attempt: Callable[[QueueEntry], Granted | Denied],
    between: Callable[[], object],
) -> Granted | Denied:
    """Let waiters take the free devices that are offered to them, and skip waiters that don't.

    A request that does not wait comes after all waiters. A waiter that is suspended, or that never
    takes its devices, would block such requests for as long as it exists. Therefore, a waiter is
    skipped if it does not take the devices offered to it within about `queue.STOPPED_S`.

    Args:
        context: The inputs to the attempts.
        attempt: A function that makes another attempt.
        between: A function called repeatedly during the wait.

    Returns:
        The result of the last attempt.
    """
    queue, news, explain = EndOfQueue(context.locks), LockChanges(context), Explainer(context)
    start, outcome = time.monotonic(), attempt(queue)
    while isinstance(outcome, Denied) and policy.is_only_awaited(outcome.rows, context.request):
        now = time.monotonic()
        limit_s = queue.passes_at - start
        if limit_s > OFFERS_LIMIT_S or now - start > OFFERS_LIMIT_S:
            break
        rows, place = explain(outcome.rows), 1 + len(outcome.ahead)
        executor.report_progress(Waiting(context.request, place, now - start, rows, limit_s))
        news.forget(outcome)
        next_look = min(queue.passes_at, now + SECOND_S)
        wait_for_news(max(next_look, now + executor.POLL_S), news, between)
        outcome = attempt(queue)
    return outcome


class LockChanges:
    """Detects when a device might have been released, or a waiter might have left the queue.

    Attributes:
        is_told: Whether the Linux kernel's lock list is complete, so that it shows such changes.
            The list is incomplete in a container, or if it is too long. An incomplete list is not
            read again until the next attempt.
    """

    def __init__(self, context: AttemptContext) -> None:
        self._locks = context.locks
        self._names: list[str] = []
        self._missing: set[str] = set()
        self.is_told = False

    def forget(self, denied: Denied) -> None:
        """Forget earlier changes, and watch the holders and waiters that an attempt found."""
        holders = [holder for row in denied.rows for holder in (*row.holders, *row.counted)]
        self._names = [holder.file for holder in holders if holder.file]
        self._names += [ticket.name for ticket in denied.ahead]
        self.is_told = self._locks.unlisted(()) is not None

    def __call__(self) -> bool:
        """Return whether a lock has disappeared from the lock list since the last call.

        If the list lacks a lock that is still held, this counts as a change only once.
        """
        before = self._missing
        missing = self._locks.unlisted(self._names) if self.is_told else None
        self.is_told = missing is not None
        self._missing = before if missing is None else missing
        return not self._missing <= before


class Explainer:
    """Adds users and processes to rows, and caches the results.

    Args:
        context: The inputs to the attempts.
        every_s: The time in seconds for which a device's users and processes are cached.
    """

    def __init__(self, context: AttemptContext, every_s: float = EXPLAIN_EVERY_S) -> None:
        self._context, self._every_s = context, every_s
        self._known: dict[str, tuple[object, float, DeviceStatus]] = {}
        self._first: tuple[str, Ticket] | None = None

    def ticket(self, first: Ticket) -> Ticket:
        """Return the queue's first ticket with the waiter's user added."""
        if self._first is None or self._first[0] != first.name:
            self._first = first.name, identified(first)
        return self._first[1]

    def __call__(self, rows: Sequence[DeviceStatus]) -> tuple[DeviceStatus, ...]:
        """Return the rows with their devices' users and processes added."""
        if due := [row for row in rows if self._is_due(row)]:
            answers = snapshot.add_processes(self._context.gpus, due, self._context.idle_mib)
            for row, answer in zip(due, answers, strict=True):
                self._known[row.label] = _state_of(row), time.monotonic(), answer
        return tuple(self._known[row.label][2] for row in rows)

    def _is_due(self, row: DeviceStatus) -> bool:
        before, read_at, _ = self._known.get(row.label, (None, 0.0, row))
        return time.monotonic() - read_at >= self._every_s or before != _state_of(row)


def _state_of(row: DeviceStatus) -> object:
    """Return the values of a row whose change is shown at once."""
    holders = (*row.holders, row.awaited_by)
    return row.state, [(h.pid, h.memory_limit_mib) for h in holders if h]


def _try_again(
    context: AttemptContext,
    denied: Denied,
    entry: QueueEntry,
    attempt: Callable[[QueueEntry], Granted | Denied],
) -> Granted | Denied:
    """Make another attempt, ignoring temporary faults once this process has joined the queue.

    Raises:
        LockError: This process can't join the queue.
    """
    try:
        context.locks.follow()
        return attempt(entry)
    except LockError as error:  # such as a full disk, or a driver that hangs under the mutex
        if entry.has_joined or isinstance(error, MutexHeldError):
            return denied
        raise
