"""The status of a machine in words, row by row; how it looks is decided by html and terminal.

Both lay out the same words, so they can't disagree. All that somebody else may have written is made
fit to print here, once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.errors import shown
from reserve_gpu.gpus import names
from reserve_gpu.gpus.usage import idle_limit_mib
from reserve_gpu.model import Device, State
from reserve_gpu.report import words
from reserve_gpu.report.words import FAINT, MARK, REASON_LIMIT, STRONG, duration, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model import Holder, Process, Row, Ticket
    from reserve_gpu.report.words import Line

TITLES = ("GPU", "state", "name", "memory", "use")
QUEUE_TITLE = "waiting in the queue"
NAME_LIMIT = 40  # characters
CLOCK_SKEW_S = 60  # a time further in the future than this is not shown


class Entry(NamedTuple):
    """One row: what each column says, and the lines below it.

    share: of the memory that is in use, 0 to 1. state: None for a GPU that is split by MIG.
    is_instance: a MIG instance, which stands under its GPU.
    """

    number: str
    name: str
    memory: str = ""
    share: float | None = None
    use: str = ""
    state: State | None = None
    lines: Sequence[Line] = ()
    is_instance: bool = False


class Layout(NamedTuple):
    """The whole picture: a headline, what to do, the rows, who waits, and what else to know."""

    head: Line
    advice: Line
    entries: Sequence[Entry]
    waiting: Sequence[Line]
    remarks: Sequence[Line]


def layout(  # noqa: PLR0913, PLR0917 - a Status has these fields
    rows: Sequence[Row],
    tickets: Sequence[Ticket],
    problem: str | None,
    at: float,
    host: str,
    limit: str | None,
) -> Layout:
    """The picture of a machine, of the fields of a Status.

    at: when it was looked at, in seconds since the epoch.
    """
    remarks: list[Line] = []
    if limit is not None:
        text = " was set before: only what it lets this process see can be reserved from here."
        remarks.append(((f"CUDA_VISIBLE_DEVICES={shown(limit)!r}", STRONG), text))
    if problem:
        text = f": {shown(problem, REASON_LIMIT)}"
        remarks.append((("Reservations may be missing here", MARK), text))
    when = f"  {shown(host)}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(at))}"
    return Layout(
        ((_headline(rows), STRONG), (when, FAINT)),
        _advice(rows, is_limited=limit is not None),
        _entries(rows, tickets, at),
        [
            _holder(ticket.holder, at, f"{place}. ", ticket.asks or "a GPU")
            for place, ticket in enumerate(tickets, 1)
        ],
        remarks,
    )


def _headline(rows: Sequence[Row]) -> str:
    free = [row.label for row in rows if row.state is State.FREE]
    if not rows:
        return "There is no GPU."
    is_split = any(row.device.instance is not None for row in rows)
    what = f"{len(rows)} {'device' if is_split else 'GPU'}{'' if len(rows) == 1 else 's'}"
    if not free:
        return f"None of {what} is free." if len(rows) > 1 else f"{rows[0].label} is not free."
    return f"{len(free)} of {what} {'is' if len(free) == 1 else 'are'} free: {listed(free)}."


def _advice(rows: Sequence[Row], *, is_limited: bool) -> Line:
    """What a newcomer should do: take what is free, else ask those who don't use theirs, or wait.

    is_limited: this process may use only some of the devices; to which of them a remark says.
    """
    if own := [row.label for row in rows if row.is_mine]:
        return ((f"This kernel has {listed(own)}.", MARK),)
    if is_limited or not rows:
        return ()
    free = [row for row in rows if row.state is State.FREE]
    if any(row.next_in_queue is None for row in free):
        return "Get one with ", ("%reserve_gpu", STRONG)
    if words.is_trouble([row.state for row in rows]):
        return (words.TROUBLE,)
    sentences = ["Others wait in the queue for what is free."] if free else []
    to_ask = words.whom_to_ask([(row.label, row.holders) for row in rows if row.is_unused])
    sentences += [*to_ask, "Or wait in the queue with " if to_ask else "Wait in the queue with "]
    return " ".join(sentences), ("%reserve_gpu --wait", STRONG)


def _entries(rows: Sequence[Row], tickets: Sequence[Ticket], now: float) -> list[Entry]:
    """A row for each device, and one above the instances of a GPU that is split by MIG."""
    devices = [row.device for row in rows if isinstance(row.device, Device)]
    models = {device.index: names.model(device) for device in devices}
    entries: list[Entry] = []
    split: set[int] = set()
    for row in rows:
        index = row.device.index
        if row.device.instance is not None and index not in split:
            split.add(index)
            model = shown(models.get(index) or "?", NAME_LIMIT)
            entries.append(Entry(str(index), model, "split by MIG"))
        entries.append(_entry(row, tickets, now))
    return entries


def _entry(row: Row, tickets: Sequence[Ticket], now: float) -> Entry:
    device = row.device
    is_instance = device.instance is not None
    name, total_mib = None, None
    if isinstance(device, Device):
        name, total_mib = device.name, device.memory_mib
        if name and is_instance:  # the profile alone: the model stands above it
            name = name.removeprefix(f"{names.model(device)} MIG ")
    used_mib = row.usage.used_mib if row.usage else None
    return Entry(
        device.number,
        shown(name or "?", NAME_LIMIT),
        _memory(used_mib, total_mib),
        None if used_mib is None or not total_mib else min(1.0, used_mib / total_mib),
        "?" if row.utilisation is None else f"{row.utilisation} %",
        row.state,
        _lines(row, tickets, now),
        is_instance,
    )


def _memory(used_mib: float | None, total_mib: int | None) -> str:
    """`10.2 of 39.4 GiB`, as far as it is known."""
    if used_mib is None and total_mib is None:
        return "?"
    used, total = ("?" if m is None else f"{m / 1024:.1f}" for m in (used_mib, total_mib))
    return f"{used} of {total} GiB"


def _lines(row: Row, tickets: Sequence[Ticket], now: float) -> list[Line]:
    """Who has the device, who uses it, and what is to be said of that."""
    lines = [_holder(holder, now, _reserved_by(row, holder)) for holder in row.holders]
    if row.is_mine:
        lines[0] += (("  this kernel", MARK),)
    if row.is_unused:
        lines.append((("reserved but idle", MARK), _idle(row, now)))
    mode = words.MODES.get(row.usage.mode or 0) if row.usage else None
    if mode:
        lines.append((mode,))
    lines += _uses(row)
    if row.reason and row.reason != mode and not row.processes and row.state is not State.FREE:
        lines.append((shown(row.reason, REASON_LIMIT),))
    graphics_mib = sum(process.memory_mib or 0 for process in row.graphics)
    if row.usage and graphics_mib > idle_limit_mib(row.usage):  # else nobody wonders about it
        lines.append((("graphics: ", FAINT), words.users(_by_memory(row.graphics))))
    if row.state is State.FREE and row.next_in_queue:
        first = tickets[row.next_in_queue - 1]
        lines.append((("free, but awaited by ", MARK), words.person(first.holder)))
    return lines


def _reserved_by(row: Row, holder: Holder) -> str:
    """Of what is lost only the record says that it is this one."""
    is_lost = not isinstance(row.device, Device)
    return f"reserved as {shown(holder.label or row.label)} by " if is_lost else "reserved by "


def _holder(holder: Holder, now: float, what: str, asks: str = "") -> Line:
    """`reserved by alice, train.ipynb (pid 4321) since 16:26 (2 h 10 min): until Friday`."""
    when = ""
    if holder.since and (ago := _ago(holder.since, now)):
        then, today = time.localtime(holder.since), time.localtime(now)
        clock = "%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M"
        when = f" since {time.strftime(clock, then)} ({ago})"
    return words.holder_line(holder, what, when, asks)


def _idle(row: Row, now: float) -> str:
    """`: nothing of theirs runs on it, and their last cell ended 3 h ago`."""
    if row.is_mine:
        return ": nothing of yours runs on it"
    # Of several holders, whose cell that was would not be clear.
    last_cell = row.holders[0].last_cell if len(row.holders) == 1 else None
    ago = last_cell and _ago(last_cell, now)
    cell = f", and their last cell ended {ago} ago" if ago else ""
    return f": nothing of theirs runs on it{cell}"


def _uses(row: Row) -> list[Line]:
    """The processes: the holders', those that may be, and those of others, each kind in a line."""
    kinds = (
        (True, ("runs ", FAINT)),
        (None, ("used by ", FAINT)),
        (False, ("used without a reservation by ", MARK)),
    )
    in_order = _by_memory(row.processes)
    if not row.holders:  # whose processes these are needs not be seen
        has_reserved = False if row.is_unreserved_use else None
        in_order = [process._replace(has_reserved=has_reserved) for process in in_order]
    return [
        (title, words.users(processes))
        for kind, title in kinds
        if (processes := [process for process in in_order if process.has_reserved is kind])
    ]


def _by_memory(processes: Sequence[Process]) -> list[Process]:
    return sorted(processes, key=lambda process: -(process.memory_mib or 0))


def _ago(moment: float, now: float) -> str:
    """How long ago that was, empty for a moment that can't be right."""
    return duration(max(0.0, now - moment)) if moment < now + CLOCK_SKEW_S else ""
