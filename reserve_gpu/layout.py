"""What the status of a machine says, row by row, in words; how it looks is decided elsewhere.

Terminal and notebook lay out the same words, so they can't disagree. All that somebody else may
have written is made fit to print here, once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

from reserve_gpu import names
from reserve_gpu.device import State, Value
from reserve_gpu.text import duration, listed, shown
from reserve_gpu.who import users

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.device import Holder, Process, Row
    from reserve_gpu.line import Ticket

TITLES = ("GPU", "state", "name", "memory", "use")
NAME_LIMIT, REASON_LIMIT = 40, 300  # characters
SHOWN_IDLE = 3  # of those to ask
CLOCK_SKEW_S = 60  # what lies further in the future is no time
MARK, STRONG, FAINT, PLAIN = "mark", "strong", "faint", ""


class Part(Value):
    """A few words in one style: MARK for what people argue about, STRONG, FAINT or PLAIN."""

    text: str
    style: str = PLAIN


Line: TypeAlias = tuple[Part, ...]


class Entry(Value):
    """One row: what each column says, and the lines about it.

    share: of the memory that is in use, 0 to 1. state: empty for a GPU that is split by MIG.
    is_part: a MIG instance, which stands under its GPU.
    """

    index: str
    name: str
    memory: str = ""
    share: float | None = None
    use: str = ""
    state: str = ""
    lines: tuple[Line, ...] = ()
    is_part: bool = False


class Layout(Value):
    """The whole picture: what it comes to, the rows, who waits, and what else is to be known."""

    head: Line
    advice: Line
    entries: tuple[Entry, ...]
    waiting: tuple[Line, ...]
    remarks: tuple[Line, ...]


def layout(  # noqa: PLR0913 - the last is a keyword
    rows: Sequence[Row],
    waiting: Sequence[Ticket],
    remarks: Sequence[Line],
    at: float,
    host: str,
    *,
    is_limited: bool = False,
) -> Layout:
    """The picture of a machine. at: when it was looked at, in seconds since the epoch.

    is_limited: somebody outside lets this process have only some of the devices.
    """
    when = f"  {shown(host)}, {_clock(at, at, day=True)}"
    return Layout(
        (Part(_headline(rows), STRONG), Part(when, FAINT)),
        tuple(_advice(rows, is_limited=is_limited)),
        tuple(_entries(rows, waiting, at)),
        tuple(_waiter(place, ticket, at) for place, ticket in enumerate(waiting, 1)),
        tuple(remarks),
    )


def remarks(limit: str | None, problem: str | None) -> list[Line]:
    """What limits this kernel, and what can't be known."""
    found: list[Line] = []
    if limit is not None:
        fence = f"CUDA_VISIBLE_DEVICES={shown(limit)!r}"
        text = " was set before: only what it lets this process see can be reserved from here."
        found.append((Part(fence, STRONG), Part(text)))
    if problem:
        text = f": {shown(problem, REASON_LIMIT)}"
        found.append((Part("Reservations may be missing here", MARK), Part(text)))
    return found


def _headline(rows: Sequence[Row]) -> str:
    free = [row.label for row in rows if row.state == State.FREE]
    if not rows:
        return "There is no GPU."
    is_split = any(row.device and row.device.instance is not None for row in rows)
    what = f"{len(rows)} {'device' if is_split else 'GPU'}{'' if len(rows) == 1 else 's'}"
    if not free:
        return f"None of {what} is free." if len(rows) > 1 else f"{rows[0].label} is not free."
    return f"{len(free)} of {what} {'is' if len(free) == 1 else 'are'} free: {listed(free)}."


def _advice(rows: Sequence[Row], *, is_limited: bool) -> list[Part]:
    """What to do, for who has never seen this: which one to take, else whom to ask, or to wait."""
    if mine := [row.label for row in rows if row.is_mine]:
        return [Part(f"This kernel has {listed(mine)}.", MARK)]
    if is_limited:  # to which of them a remark says
        return []
    free = [row for row in rows if row.state == State.FREE]
    if any(row.next_in_line is None for row in free):
        return [Part("Get one with "), Part("%reserve_gpu", STRONG)]
    said = ["Others wait in line for what is free."] if free else []
    idle = sorted((row for row in rows if row.is_unused and row.holders), key=_last_seen)
    said += [
        f"{row.label} is reserved but idle: ask {_name(row.holders[0])}."
        for row in idle[:SHOWN_IDLE]
    ]
    said.append("Or wait in line with " if idle else "Wait in line with ")
    return [Part(" ".join(said)), Part("%reserve_gpu --wait", STRONG)]


def _last_seen(row: Row) -> float:
    return row.holders[0].last_cell or row.holders[0].since or 0.0


def _name(holder: Holder) -> str:
    user = shown(holder.user or "somebody")
    return f"{user} ({shown(holder.notebook)})" if holder.notebook else user


def _entries(rows: Sequence[Row], waiting: Sequence[Ticket], now: float) -> list[Entry]:
    """A row for each device, and one above the instances of a GPU that is split by MIG."""
    found: list[Entry] = []
    split: set[int] = set()
    for row in rows:
        device = row.device
        if device and device.instance is not None and device.index not in split:
            split.add(device.index)
            model = shown(names.model(device) or "?", NAME_LIMIT)
            found.append(Entry(str(device.index), model, "split by MIG"))
        found.append(_entry(row, waiting, now))
    return found


def _entry(row: Row, waiting: Sequence[Ticket], now: float) -> Entry:
    device = row.device
    name = (device.name if device else None) or "?"
    is_part = ":" in row.label
    total = device.memory_mib if device else None
    return Entry(
        row.label.removeprefix("GPU"),
        shown(name.partition(" MIG ")[2] or name if is_part else name, NAME_LIMIT),
        _memory(row.used_mib, total),
        None if row.used_mib is None or not total else min(1.0, row.used_mib / total),
        "?" if row.utilisation is None else f"{row.utilisation} %",
        row.state,
        tuple(_lines(row, waiting, now)),
        is_part,
    )


def _memory(used_mib: float | None, total_mib: int | None) -> str:
    """`10.2 of 39.4 GiB`, as far as it is known."""
    if used_mib is None and total_mib is None:
        return "?"
    used, total = ("?" if m is None else f"{m / 1024:.1f}" for m in (used_mib, total_mib))
    return f"{used} of {total} GiB"


def _lines(row: Row, waiting: Sequence[Ticket], now: float) -> list[Line]:
    """Who has the device, who uses it, and what is to be said of that."""
    found: list[Line] = [tuple(_holder(holder, now)) for holder in row.holders]
    if row.is_mine:
        found[0] += (Part("  this kernel", MARK),)
    if row.is_unused:
        found.append(tuple(_idle(row, now)))
    found += _uses(row)
    if row.reason and not row.processes and row.state != State.FREE:
        found.append((Part(shown(row.reason, REASON_LIMIT)),))
    if row.state == State.FREE and row.next_in_line:
        first = waiting[row.next_in_line - 1]
        found.append((Part("free, but awaited by ", MARK), Part(_name(first.holder))))
    return found


def _holder(
    holder: Holder, now: float, what: str = "reserved by", asks: str | None = None
) -> list[Part]:
    """`reserved by alice, train.ipynb (pid 4321) since 16:26 (2 h 10 min): until Friday`.

    asks: of one who waits, what for.
    """
    found = [Part(f"{what} ", FAINT), Part(shown(holder.user or "somebody"), STRONG)]
    if holder.notebook:
        found += [Part(", "), Part(shown(holder.notebook), STRONG)]
    if holder.pid:
        place = " of another container" if holder.elsewhere else ""
        found.append(Part(f" (pid {holder.pid}{place})"))
    if asks:
        found += [Part(" has waited for ", FAINT), Part(shown(asks), STRONG)]
    if holder.since and holder.since < now + CLOCK_SKEW_S:
        ago = duration(max(0.0, now - holder.since))
        found.append(Part(f" since {_clock(holder.since, now)} ({ago})"))
    if holder.note:
        found += [Part(": "), Part(shown(holder.note), STRONG)]
    if not holder.confirmed:
        found.append(Part(" [unconfirmed]", FAINT))
    return found


def _idle(row: Row, now: float) -> list[Part]:
    holder, whose = row.holders[0], "yours" if row.is_mine else "theirs"
    found = [Part("reserved but idle", MARK), Part(f": nothing of {whose} runs on it")]
    if not row.is_mine and holder.last_cell and holder.last_cell < now + CLOCK_SKEW_S:
        ago = duration(max(0.0, now - holder.last_cell))
        found.append(Part(f", and their last cell ended {ago} ago"))
    return found


def _uses(row: Row) -> list[Line]:
    """The processes, those of the holders first, each sort in a line."""
    sorts = (
        (True, Part("runs ", FAINT)),
        (None, Part("used by ", FAINT)),
        (False, Part("used without a reservation by ", MARK)),
    )
    return [
        (said, Part(users(found)))
        for who, said in sorts
        if (found := [p for p in _by_memory(row.processes) if _sort(row, p) is who])
    ]


def _sort(row: Row, process: Process) -> bool | None:
    return process.has_reserved if row.holders else False


def _by_memory(processes: Sequence[Process]) -> list[Process]:
    return sorted(processes, key=lambda process: -(process.memory_mib or 0))


def _waiter(place: int, ticket: Ticket, now: float) -> Line:
    """`1. carol, sweep.ipynb (pid 99) has waited for 2 GPUs since 16:26 (12 min): urgent`."""
    return tuple(_holder(ticket.holder, now, f"{place}.", ticket.asks or "a GPU"))


def _clock(when: float, now: float, *, day: bool = False) -> str:
    """`16:26`, with the date if that is not today's or is wanted."""
    there, here = time.localtime(when), time.localtime(now)
    is_today = there[:3] == here[:3]
    return time.strftime("%H:%M" if is_today and not day else "%Y-%m-%d %H:%M", there)
