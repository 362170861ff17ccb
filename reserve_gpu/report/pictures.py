"""What the one picture shows of a status, of a refusal and of a wait: its head and its foot."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.errors import REASON_LIMIT, shown
from reserve_gpu.gpus.usage import is_usable
from reserve_gpu.model import State
from reserve_gpu.report import (
    asking,
    colour,
    html,
    layout,
    messages,
    parts,
    reasons,
    rules,
    terminal,
    times,
    words,
)
from reserve_gpu.report.layout import Layout, View
from reserve_gpu.report.words import MARK, STRONG, listed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TextIO

    from reserve_gpu.model import Device, Refusal, Request, Row, Rules, Ticket, Waiting
    from reserve_gpu.report.faces import Face
    from reserve_gpu.report.words import Line

IN_USE = (State.RESERVED, State.FULL, State.BUSY, State.AWAITED)


class Picture(NamedTuple):
    """A layout that shows itself wherever it is. brief: what happened, in one line."""

    layout: Layout
    brief: str = ""

    def __str__(self) -> str:
        return terminal.plain(self.layout)

    def _repr_pretty_(self, printer: Any, _is_cycle: bool) -> None:  # noqa: FBT001 - IPython's
        # A kernel has FORCE_COLOR set, for what cells start; text beside HTML has no colours.
        color = colour.AUTO if terminal.is_terminal(sys.stdout) else colour.NEVER
        printer.text(self.to_text(color=color))

    def _repr_html_(self) -> str:
        return html.html(self.layout)

    def to_text(self, stream: TextIO | None = None, color: str = colour.AUTO) -> str:
        """How it looks there, on standard output by default: coloured, and as wide as it is.

        color: one of colour.CHOICES.
        """
        return terminal.text(self.layout, stream, color)

    def show(self, *, has_head: bool = True) -> None:
        """Show it as what a cell of this IPython displays. has_head: with its head lines."""
        from IPython.display import display

        picture = self if has_head else self._replace(layout=self.layout._replace(head=()))
        display(picture)  # type: ignore[no-untyped-call]


def of_line(text: str) -> Picture:
    """A picture of nothing but a line of text."""
    return Picture(Layout([(text,)]), text)


def warn(warnings: Sequence[str]) -> None:
    """Show warnings in this IPython, if there are any."""
    lines: list[Line] = []
    for warning in warnings:
        first, *to_type = warning.splitlines()  # in HTML a line break within a line is a space
        lines += [(("Warning: ", MARK), first), *((line,) for line in to_type)]
    if lines:
        tell(Picture(Layout(lines)))


def tell(what: Picture | str) -> None:
    """Tell it in this IPython: in a terminal on stderr, which notebooks would show in red."""
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if not hasattr(get_ipython(), "kernel"):
        print(what, file=sys.stderr, flush=True)
    elif isinstance(what, str):
        display({"text/plain": what}, raw=True)  # type: ignore[no-untyped-call]
    else:
        what.show()


# -- the status of a machine -----------------------------------------------------------------------


def status(  # noqa: PLR0913, PLR0917 - a Status has these fields
    rows: Sequence[Row],
    tickets: Sequence[Ticket],
    problem: str | None,
    at: float,
    host: str,
    limit: str | None,
    face: Face,
    ruled: Rules | None = None,
    unmatched: Sequence[str] = (),
) -> Layout:
    """The picture of a machine, of the fields of a Status.

    at: when it was looked at, in seconds since the epoch. face: where it is read.
    """
    when = f"  {shown(host)}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(at))}"
    head: list[Line] = [*rules.head(ruled), ((_free(rows), STRONG), (when, words.FAINT))]
    if own := [row.label for row in rows if row.is_mine]:
        head.append(((f"{face.here.capitalize()} has {listed(own)}.", MARK),))
    foot = [] if own else _advice(rows, face, at, is_limited=limit is not None)
    if limit is not None:
        text = " was set before: only what it lets this process see can be reserved from here."
        foot.append(((f"CUDA_VISIBLE_DEVICES={shown(limit)!r}", STRONG), text))
    if problem:
        text = f": {shown(problem, REASON_LIMIT)}"
        foot.append((("Reservations may be missing here", MARK), text))
    foot += rules.foot(ruled, unmatched)
    queue = [
        words.holder_line(ticket.holder, at, f"{place}. ", asks=ticket.asks or "a GPU")
        for place, ticket in enumerate(tickets, 1)
    ]
    devices = layout.entries(rows, View(tickets, at, face.here))
    return Layout(head, devices, queue, foot)


def _free(rows: Sequence[Row]) -> str:
    free = [r.label for r in rows if r.state is State.FREE and not layout.is_awaited(r)]
    if not rows:
        return "There is no GPU."
    is_split = any(row.device.instance is not None for row in rows)
    what = f"{len(rows)} {'device' if is_split else 'GPU'}{'' if len(rows) == 1 else 's'}"
    if not free:
        return f"None of {what} is free." if len(rows) > 1 else f"{rows[0].label} is not free."
    return f"{len(free)} of {what} {'is' if len(free) == 1 else 'are'} free: {listed(free)}."


def _advice(rows: Sequence[Row], face: Face, now: float, *, is_limited: bool) -> list[Line]:
    """What a newcomer should do: take what is free, or a part; else ask the idle ones, or wait.

    is_limited: this process may use only some of the devices; to which of them another line says.
    """
    if is_limited or not rows:
        return []
    free = [row for row in rows if row.state is State.FREE]
    if not all(map(layout.is_awaited, free)):
        return [("Get one with ", (face.typed(messages.ANY), STRONG))]
    if reasons.is_trouble([row.state for row in rows]):
        return [(reasons.trouble([row.state for row in rows]),)]
    line: Line = ("Others wait in the queue for what would be free. ",) if free else ()
    ask = asking.whom(rows, now)
    line += ask + _queueing(face.typed(messages.ANY, waits=True), is_second=bool(ask))
    return [part for part in (parts.offer(rows, face), line) if part]


# -- why nothing was reserved ----------------------------------------------------------------------


def refusal(  # noqa: PLR0913 - the last ones are keywords
    request: Request,
    refusals: Sequence[Refusal],
    face: Face,
    *,
    kept: Sequence[Device] = (),
    limit: str | None = None,
    waited_s: float | None = None,
    user: str | None = None,
    problems: Sequence[str] = (),
) -> Picture:
    """Why nothing was reserved, device by device, and what can be done.

    kept: what stays reserved. limit: the CUDA_VISIBLE_DEVICES from outside, if there is one.
    waited_s: the time in seconds that was allowed for waiting, None if nobody waited.
    user: who asks; a GPU that only this user's own processes use may be taken by name.
    problems: what is wrong in the administrator's file.
    """
    waited = f"Waited for {times.time_limit(waited_s)}. " if waited_s else ""
    has = {device.label for device in kept}
    own = {refusal.label for refusal in refusals if refusal.would_be_taken} & has
    headline = waited + _none_free(request, refusals, own)
    foot = _ways_out(request, refusals, face, own=own, has_waited=bool(waited_s), user=user)
    if limit is not None:
        foot.append((messages.limit_line(limit, len(refusals)),))
    if end := messages.left_with(kept, face):
        foot.append((end,))
    foot += [(("Warning: ", MARK), problem) for problem in problems]
    now = time.time()
    unit = request.promise.part_unit
    has_part = {refusal.label for refusal in refusals if refusal.state is State.FULL} & has
    names = dict.fromkeys(own | has_part, face.here)
    rows = [layout.row(refusal, names.get(refusal.label, ""), unit) for refusal in refusals]
    entries = layout.entries(rows, View((), now, unit=unit))
    return Picture(Layout([((headline, STRONG),)], entries, (), foot), headline)


def _none_free(request: Request, refusals: Sequence[Refusal], own: set[str]) -> str:
    """How many are free. own: the labels of what this process has."""
    fit = messages.fit(refusals)
    if limited := rules.limited(fit):
        return limited
    if no_room := parts.no_room(request, fit):
        return no_room
    states = [refusal.state for refusal in fit if refusal.label not in own]
    total, free = len(states), states.count(State.FREE)
    had = len(fit) - total
    what = f"{'other ' if had else ''}free GPU devices"
    if not total:
        return f"No {what}."
    if free:
        needed = request.needed - had
        there = f"{free} of {total} {words.be(free)} free"
        return f"Not enough {what}: {there}, {needed} {words.be(needed)} needed."
    in_use = sum(state in IN_USE for state in states)
    awaited = " or awaited" if State.AWAITED in states else ""
    counts = [f"{in_use} of {total} {words.be(in_use)} in use{awaited}"] if in_use else []
    if rest := total - in_use:
        counts.append(f"{rest} of {total} can't be used")
    return f"No {what}: {', '.join(counts)}."


def _ways_out(  # noqa: PLR0913 - the last ones are keywords
    request: Request,
    refusals: Sequence[Refusal],
    face: Face,
    *,
    own: set[str],
    has_waited: bool,
    user: str | None,
) -> list[Line]:
    """Whom to ask, the queue, a smaller request, and what may be taken by name.

    That is never what another person has.
    """
    states = [refusal.state for refusal in messages.fit(refusals)]
    is_trouble = reasons.is_trouble(states, request.needed)
    missing = [refusal for refusal in refusals if not refusal.would_be_taken]
    may_come_free = any(
        r.state in (*IN_USE, State.LIMITED) or (r.state is State.UNKNOWN and not r.fault)
        for r in missing
    )
    now = time.time()
    rows = list(map(layout.row, missing))
    ways = asking.whom(rows, now)
    if State.LIMITED in states:  # by what this user has, so that nobody else can help
        ways = ("Let go of what you have there. ",)
    if is_trouble:
        ways += (reasons.trouble(states),)
    elif may_come_free and not has_waited:
        ways += _queueing(face.typed(request, waits=True), is_second=bool(ways))
    lines = [ways] if ways else []
    there = [refusal.label for refusal in refusals if refusal.would_be_taken]
    free = len(there)
    if not request.devices and not own.issuperset(there):
        smaller = face.typed(request._replace(count=free))
        lines.append((f"{free} can be had now: ", (smaller, STRONG)))
    if less := parts.smaller(request, messages.fit(refusals)):
        size = words.size(less.part_mib or 0.0, less.promise.part_unit)
        lines.append((f"{size} can be had now: ", (face.typed(less), STRONG)))
    if usable := next((r for r in missing if _may_be_named(r, user)), None):
        named = face.typed(request._replace(devices=(usable.device.number,)))
        lines.append((f"To use {usable.label} all the same, name it: ", (named, STRONG)))
    return lines


def _may_be_named(refusal: Refusal, user: str | None) -> bool:
    """Whether naming the device would get it, and would take nothing from another person."""
    usage, processes = refusal.usage, refusal.processes or ()
    if usage is None or refusal.fault or not is_usable(usage):
        return False
    is_all_seen = len(processes) >= max(1, (usage.compute or 0) + (usage.mps or 0))
    is_own = user is not None and all(process.user == user for process in processes)
    return refusal.state is State.BUSY and is_all_seen and is_own


# -- a wait ----------------------------------------------------------------------------------------


def wait(waiting: Waiting) -> Picture:
    """What is awaited, the place in the queue and for how long; who has what; what may come first.

    Its brief line has all that, of each device only who has it.
    """
    head = " ".join(filter(None, [awaited(waiting), rules.limited(waiting.refusals)]))
    refusals = messages.fit(waiting.refusals)
    now = time.time()
    rows = list(map(layout.row, refusals))
    first = asking.likeliest(rows, now)
    foot: list[Line] = [("Likeliest to come free: ", *first)] if first else []
    unit = waiting.request.promise.part_unit
    holders = ", ".join(f"{refusal.label} {_who(refusal, unit)}" for refusal in refusals)
    entries = layout.entries(rows, View((), now, unit=unit))
    picture = Layout([((head, STRONG),)], entries, (), foot)
    return Picture(picture, f"{head} {holders}".rstrip())


def awaited(waiting: Waiting) -> str:
    """`Waiting for a GPU, number 2 in the queue, for 3 min (1 h at most)`, and a full stop."""
    place = "next" if waiting.place == 1 else f"number {waiting.place}"
    time_ = times.duration(waiting.waited_s)
    if not math.isinf(waiting.limit_s):
        time_ += f" ({times.time_limit(waiting.limit_s)} at most)"
    return f"Waiting for {messages.asked(waiting.request)}, {place} in the queue, for {time_}."


def _who(refusal: Refusal, unit: str) -> str:
    """Who has a device, in a word; of one that is full, for how much it has room."""
    if refusal.state is State.FULL:
        return f"has room for {words.room(refusal.room_mib or 0.0, unit)}"
    user = refusal.holder and refusal.holder.user
    return shown(user) if user and refusal.state is State.RESERVED else refusal.state.value


# -- parts of them ---------------------------------------------------------------------------------


def _queueing(typed: str, *, is_second: bool) -> Line:
    """The queue as a way out. is_second: another was named before."""
    return ("Or wait in the queue: " if is_second else "Wait in the queue: "), (typed, STRONG)
