"""The status of a machine in words, row by row; how it looks is decided by html and terminal.

Both lay out the same words, so they can't disagree. All that somebody else may have written is made
fit to print here, once.
"""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from reserve_gpu.errors import shown
from reserve_gpu.gpus import names
from reserve_gpu.model import Device, State
from reserve_gpu.report import words
from reserve_gpu.report.words import REASON_LIMIT, duration, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model import Holder, Process, Row, Ticket

TITLES = ("GPU", "state", "name", "memory", "use")
QUEUE_TITLE = "waiting in the queue"
NAME_LIMIT = 40  # characters
CLOCK_SKEW_S = 60  # a time further in the future than this is not shown


class Style(Enum):
    """How words are set off. MARK is for what people argue about."""

    PLAIN = ""
    STRONG = "strong"
    FAINT = "faint"
    MARK = "mark"


class Part(NamedTuple):
    """A few words in one style."""

    text: str
    style: Style = Style.PLAIN


Line: TypeAlias = tuple[Part, ...]


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
    lines: tuple[Line, ...] = ()
    is_instance: bool = False


class Layout(NamedTuple):
    """The whole picture: a headline, what to do, the rows, who waits, and what else to know."""

    head: Line
    advice: Line
    entries: tuple[Entry, ...]
    waiting: tuple[Line, ...]
    remarks: tuple[Line, ...]


def layout(  # noqa: PLR0913 - a status has these parts
    rows: Sequence[Row],
    tickets: Sequence[Ticket],
    *,
    at: float,
    host: str,
    limit: str | None = None,
    problem: str | None = None,
) -> Layout:
    """The picture of a machine.

    tickets: the queue, the first one first. at: when it was looked at, in seconds since the epoch.
    limit: the CUDA_VISIBLE_DEVICES from outside. problem: why not all reservations are known.
    """
    when = f"  {shown(host)}, {_clock(at, at, with_date=True)}"
    return Layout(
        (Part(_headline(rows), Style.STRONG), Part(when, Style.FAINT)),
        tuple(_advice(rows, is_limited=limit is not None)),
        tuple(_entries(rows, tickets, at)),
        tuple(_waiter(place, ticket, at) for place, ticket in enumerate(tickets, 1)),
        tuple(_remarks(limit, problem)),
    )


def _remarks(limit: str | None, problem: str | None) -> list[Line]:
    """What limits this kernel, and what can't be known."""
    remarks: list[Line] = []
    if limit is not None:
        variable = f"CUDA_VISIBLE_DEVICES={shown(limit)!r}"
        text = " was set before: only what it lets this process see can be reserved from here."
        remarks.append((Part(variable, Style.STRONG), Part(text)))
    if problem:
        text = f": {shown(problem, REASON_LIMIT)}"
        remarks.append((Part("Reservations may be missing here", Style.MARK), Part(text)))
    return remarks


def _headline(rows: Sequence[Row]) -> str:
    free = [row.label for row in rows if row.state is State.FREE]
    if not rows:
        return "There is no GPU."
    is_split = any(row.device.instance is not None for row in rows)
    what = f"{len(rows)} {'device' if is_split else 'GPU'}{'' if len(rows) == 1 else 's'}"
    if not free:
        return f"None of {what} is free." if len(rows) > 1 else f"{rows[0].label} is not free."
    return f"{len(free)} of {what} {'is' if len(free) == 1 else 'are'} free: {listed(free)}."


def _advice(rows: Sequence[Row], *, is_limited: bool) -> list[Part]:
    """What a newcomer should do: take what is free, else ask those who don't use theirs, or wait.

    is_limited: this process may use only some of the devices; to which of them a remark says.
    """
    if own := [row.label for row in rows if row.is_mine]:
        return [Part(f"This kernel has {listed(own)}.", Style.MARK)]
    if is_limited or not rows:
        return []
    free = [row for row in rows if row.state is State.FREE]
    if any(row.next_in_queue is None for row in free):
        return [Part("Get one with "), Part("%reserve_gpu", Style.STRONG)]
    sentences = ["Others wait in the queue for what is free."] if free else []
    to_ask = words.whom_to_ask([(row.label, row.holders) for row in rows if row.is_unused])
    sentences += [*to_ask, "Or wait in the queue with " if to_ask else "Wait in the queue with "]
    return [Part(" ".join(sentences)), Part("%reserve_gpu --wait", Style.STRONG)]


def _entries(rows: Sequence[Row], tickets: Sequence[Ticket], now: float) -> list[Entry]:
    """A row for each device, and one above the instances of a GPU that is split by MIG."""
    entries: list[Entry] = []
    split: set[int] = set()
    for row in rows:
        index = row.device.index
        if row.device.instance is not None and index not in split:
            split.add(index)
            entries.append(Entry(str(index), _model(rows, index), "split by MIG"))
        entries.append(_entry(row, tickets, now))
    return entries


def _model(rows: Sequence[Row], index: int) -> str:
    """The model of the GPU with that index, by the first of its instances that can be read."""
    devices = (row.device for row in rows if isinstance(row.device, Device))
    models = (names.model(device) for device in devices if device.index == index)
    return shown(next(models, "") or "?", NAME_LIMIT)


def _entry(row: Row, tickets: Sequence[Ticket], now: float) -> Entry:
    total_mib = row.device.memory_mib if isinstance(row.device, Device) else None
    used_mib = row.usage.used_mib if row.usage else None
    return Entry(
        row.device.number,
        _name(row),
        _memory(used_mib, total_mib),
        None if used_mib is None or not total_mib else min(1.0, used_mib / total_mib),
        "?" if row.utilisation is None else f"{row.utilisation} %",
        row.state,
        tuple(_lines(row, tickets, now)),
        row.device.instance is not None,
    )


def _name(row: Row) -> str:
    """The model, and of a MIG instance the profile alone: its GPU stands above it."""
    device = row.device
    if not isinstance(device, Device) or not device.name:
        return "?"
    name = device.name
    if device.instance is not None:
        name = name.removeprefix(f"{names.model(device)} MIG ")
    return shown(name, NAME_LIMIT)


def _memory(used_mib: float | None, total_mib: int | None) -> str:
    """`10.2 of 39.4 GiB`, as far as it is known."""
    if used_mib is None and total_mib is None:
        return "?"
    used, total = ("?" if m is None else f"{m / 1024:.1f}" for m in (used_mib, total_mib))
    return f"{used} of {total} GiB"


def _lines(row: Row, tickets: Sequence[Ticket], now: float) -> list[Line]:
    """Who has the device, who uses it, and what is to be said of that."""
    lines: list[Line] = [tuple(_holder(holder, now)) for holder in row.holders]
    if row.is_mine:
        lines[0] += (Part("  this kernel", Style.MARK),)
    if row.is_unused:
        lines.append(tuple(_idle(row, now)))
    lines += _uses(row)
    if row.reason and not row.processes and row.state is not State.FREE:
        lines.append((Part(shown(row.reason, REASON_LIMIT)),))
    if row.state is State.FREE and row.next_in_queue:
        first = tickets[row.next_in_queue - 1]
        name = words.person(first.holder)
        lines.append((Part("free, but awaited by ", Style.MARK), Part(name)))
    return lines


def _holder(
    holder: Holder, now: float, what: str = "reserved by", asks: str | None = None
) -> list[Part]:
    """`reserved by alice, train.ipynb (pid 4321) since 16:26 (2 h 10 min): until Friday`.

    asks: of one who waits, what for.
    """
    parts = [Part(f"{what} ", Style.FAINT), Part(shown(holder.user or "somebody"), Style.STRONG)]
    if holder.notebook:
        parts += [Part(", "), Part(shown(holder.notebook), Style.STRONG)]
    if holder.pid:
        parts.append(Part(words.pid(holder)))
    if asks:
        parts += [Part(" has waited for ", Style.FAINT), Part(shown(asks), Style.STRONG)]
    if holder.since and holder.since < now + CLOCK_SKEW_S:
        ago = duration(max(0.0, now - holder.since))
        parts.append(Part(f" since {_clock(holder.since, now)} ({ago})"))
    if holder.note:
        parts += [Part(": "), Part(shown(holder.note), Style.STRONG)]
    if not holder.confirmed:
        parts.append(Part(" [unconfirmed]", Style.FAINT))
    return parts


def _idle(row: Row, now: float) -> list[Part]:
    """`reserved but idle: nothing of theirs runs on it, and their last cell ended 3 h ago`."""
    holder, whose = row.holders[0], "yours" if row.is_mine else "theirs"
    parts = [
        Part("reserved but idle", Style.MARK),
        Part(f": nothing of {whose} runs on it"),
    ]
    is_alone = len(row.holders) == 1  # of several, whose cell that was would not be clear
    if not row.is_mine and is_alone and holder.last_cell and holder.last_cell < now + CLOCK_SKEW_S:
        ago = duration(max(0.0, now - holder.last_cell))
        parts.append(Part(f", and their last cell ended {ago} ago"))
    return parts


def _uses(row: Row) -> list[Line]:
    """The processes: the holders', those that may be, and those of others, each kind in a line."""
    kinds = (
        (True, Part("runs ", Style.FAINT)),
        (None, Part("used by ", Style.FAINT)),
        (False, Part("used without a reservation by ", Style.MARK)),
    )
    in_order = sorted(row.processes, key=lambda process: -(process.memory_mib or 0))
    return [
        (title, Part(words.users(processes)))
        for kind, title in kinds
        if (processes := [p for p in in_order if _has_reserved(row, p) is kind])
    ]


def _has_reserved(row: Row, process: Process) -> bool | None:
    """Of a device that nobody has reserved, whose process it is needs not be seen."""
    return False if row.is_unreserved_use and not row.holders else process.has_reserved


def _waiter(place: int, ticket: Ticket, now: float) -> Line:
    """`1. carol, sweep.ipynb (pid 99) has waited for 2 GPUs since 16:26 (12 min): urgent`."""
    return tuple(_holder(ticket.holder, now, f"{place}.", ticket.asks or "a GPU"))


def _clock(when: float, now: float, *, with_date: bool = False) -> str:
    """`16:26`, with the date if that is not today's or is wanted."""
    there, here = time.localtime(when), time.localtime(now)
    is_today = there[:3] == here[:3]
    return time.strftime("%H:%M" if is_today and not with_date else "%Y-%m-%d %H:%M", there)
