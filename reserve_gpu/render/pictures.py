"""Show the one picture; say what stands above and below it in a refusal and in a wait."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from reserve_gpu.gpus.usage import is_usable
from reserve_gpu.model.devices import State
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import (
    contacts,
    durations,
    layout,
    memory_parts,
    messages,
    phrases,
    reasons,
    terminal,
)
from reserve_gpu.render import rule_text as ruled
from reserve_gpu.render.frontends import is_watched
from reserve_gpu.render.html import html
from reserve_gpu.render.layout import Layout, View
from reserve_gpu.render.phrases import MARK, STRONG, TYPED, Line
from reserve_gpu.system import ipython_shell, procfs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.model.holders import DeviceStatus
    from reserve_gpu.model.progress import Refusal, Waiting
    from reserve_gpu.model.requests import Request
    from reserve_gpu.render.frontends import Frontend

# What may end by itself.
PASSING = {State.RESERVED, State.FULL, State.BUSY, State.AWAITED, State.LIMITED, State.UNKNOWN}


class Picture(NamedTuple):
    """A layout that shows itself wherever it is.

    brief: what happened, in one line. values: what programs read beside it in a notebook.
    """

    layout: Layout
    brief: str = ""
    values: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return terminal.plain(self.layout)

    def _repr_pretty_(self, printer: Any, _is_cycle: bool) -> None:  # noqa: FBT001 - IPython's
        # A kernel has FORCE_COLOR set, for what cells start; text beside HTML has no colours.
        printer.text(self.to_text() if terminal.is_terminal(sys.stdout) else str(self))

    def _repr_html_(self) -> str:
        return html(self.layout)

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        # Not application/json, which JupyterLab would show in place of the picture.
        return {"application/vnd.reserve-gpu+json": self.values} if self.values else {}

    @property
    def is_watched(self) -> bool:
        """Tell whether somebody looks at it where it is shown."""
        return is_watched()

    def below(self, texts: Sequence[str]) -> Picture:
        """Return the picture with some lines of text above it."""
        head = [*((text,) for text in texts), *self.layout.head]
        return self._replace(layout=self.layout._replace(head=head))

    def to_text(self, stream: TextIO | None = None) -> str:
        """Return how it looks on a stream, by default standard output: its width, its colours."""
        return terminal.text(self.layout, stream)

    def show(self, *, has_head: bool = True, values: Mapping[str, Any] | None = None) -> None:
        """Show it as what a cell of this IPython displays.

        has_head: with the first words of its head, which an error says that stands below it.
        values: as above.
        """
        picture = self._replace(values=values)
        if not has_head:
            rest = [line[1:] for line in self.layout.head if line[1:]]
            picture = picture._replace(layout=self.layout._replace(head=rest))
        ipython_shell.display(picture)


def of_line(text: str) -> Picture:
    """Return a picture of nothing but a line of text."""
    return Picture(Layout([(text,)]), text)


def warn(warnings: Sequence[str]) -> None:
    """Show warnings in this IPython."""
    lines: list[Line] = []
    for warning in warnings:
        first, *to_type = warning.splitlines()  # in HTML a line break within a line is a space
        lines += [(("Warning: ", MARK), first), *((line,) for line in to_type)]
    tell(Picture(Layout(lines)))


def tell(what: Picture | str) -> None:
    """Show it in this IPython: in a terminal on stderr, which notebooks would show in red."""
    if not ipython_shell.has_kernel():
        print(what, file=sys.stderr, flush=True)
    elif isinstance(what, str):
        ipython_shell.display({"text/plain": what}, raw=True)
    else:
        what.show()


# -- why nothing was reserved ----------------------------------------------------------------------


class Shown(Protocol):
    """A result that a command can print in each format."""

    @property
    def host(self) -> str:
        """Return the name of the machine, or of several."""

    def picture(self) -> Picture:
        """Return the picture for people."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for programs."""


def refusal(reason: Refusal, frontend: Frontend) -> Picture:
    """Show why nothing was reserved, device by device, and what can be done.

    A GPU that only this user's own processes use may be taken by name.
    """
    request, rows, now = reason.request, reason.rows, time.time()
    waited = f"Waited for {durations.time_limit(reason.waited_s)}. " if reason.waited_s else ""
    headline = waited + _none_free(request, rows, now, reason.user)
    foot = _ways_out(reason, frontend, now)
    if len(reason.free) >= request.needed:
        are = f"{phrases.ranges(reason.free)} {phrases.be(len(reason.free))} free: "
        foot.insert(0, (are, (_instead(reason, frontend), TYPED)))
    if reason.limit is not None:
        foot.append((messages.limit_line(reason.limit, len(rows)),))
    if end := messages.left_with(reason.kept, frontend):
        foot.append((end,))
    foot += [(("Warning: ", MARK), problem) for problem in reason.problems]
    entries = layout.entries(rows, View(now, frontend.here))
    head: Line = ((headline, STRONG), *layout.common_model(rows))
    return Picture(Layout([head], entries, (), foot), headline)


def _none_free(request: Request, rows: Sequence[DeviceStatus], now: float, user: str | None) -> str:
    """Return in the words of the rows why none is free.

    What this process keeps in any case does not count.
    """
    fit = messages.fit(rows)
    if limited := ruled.limited(fit):
        return limited
    if (size := request.terms.size) and (no_room := memory_parts.no_room(request, size, fit)):
        return no_room
    others = [row for row in fit if not (row.is_mine and row.would_be_taken)]
    states = [layout.state(row, now) for row in others]
    total, free = len(states), states.count(State.FREE)
    kept = len(fit) - total
    what = f"{'other ' if kept else ''}free GPU devices"
    if not total:
        return f"No {what}."
    if free:
        needed = request.needed - kept
        available = f"{free} of {total} {phrases.be(free)} free"
        return f"Not enough {what}: {available}, {needed} {phrases.be(needed)} needed."
    if total == 1:
        return f"No {what}: {others[0].label} {_stands(others[0], now, user)}."
    (first, most), *rest = Counter(state.value for state in states).most_common()
    counts = [f"{most} of {total} {first}", *(f"{count} {state}" for state, count in rest)]
    return f"No {what}: {', '.join(counts)}."


def _stands(row: DeviceStatus, now: float, user: str | None) -> str:
    """Return `is busy`, or `is reserved by alice`: the state of a device, and who has it.

    The reader's own processes, those of `user`, are called `your train.ipynb`.
    """
    state = layout.state(row, now).value
    if row.state is State.RESERVED:
        people = [phrases.one_of(holder, user) for holder in row.holders if holder.user]
        named = phrases.listed([*dict.fromkeys(people)][: phrases.NAMED_SHARERS])
        if state == State.KEPT.value:
            (holder, *_) = row.holders
            is_own = phrases.is_of(holder, user)
            whose = phrases.one_of(holder, user) if is_own else phrases.person(holder)
            return f"is kept for the restart of {whose}"
        return f"is {state} by {named}" if named else f"is {state}"
    return f"has {state}" if state.startswith("no ") else f"is {state}"


def _ways_out(reason: Refusal, frontend: Frontend, now: float) -> list[Line]:
    """Return whom to ask, the queue, a smaller request, and what may be taken by name.

    That is never what another person has.
    """
    request, rows, user = reason.request, reason.rows, reason.user
    fit = messages.fit(rows)
    states = [row.state for row in fit]
    siblings = [row for row in rows if _is_siblings(row, reason)]
    missing = _missing(reason)
    available = [row for row in rows if row.would_be_taken]
    ways = contacts.whom(missing, now, user)
    if any(row.counted for row in rows):  # by what this user has, so that nobody else can help
        ways = () if siblings or frontend.is_for_program else ("Release what you have there.",)
    lines = contacts.yourself(missing, now, user, frontend)
    if siblings:
        those = (
            f"Processes that were started together with this one hold {phrases.ranges(siblings)}"
        )
        lines.append((f"{those}. Start at most {len(reason.siblings)} of them.",))
    lines += [*([ways] if ways else []), *reasons.unseen(missing)]
    if reasons.is_trouble(states, request.needed):
        lines.append((reasons.trouble(states),))
    elif can_wait(reason) and not reason.waited_s:
        lines.append(queueing(frontend.typed(request, waits=True), is_second=bool(lines)))
    if not request.devices and not all(row.is_mine for row in available):
        smaller = frontend.typed(request._replace(count=len(available)))
        lines.append((f"{len(available)} can be had now: ", (smaller, TYPED)))
    if request.terms.size and (less := memory_parts.smaller(request, request.terms.size, fit)):
        size = phrases.gib(less.terms.memory_limit_mib or 0.0)
        lines.append((f"{size} can be had now: ", (frontend.typed(less), TYPED)))
    usable = next((row for row in missing if _may_be_named(row, user)), None)
    if usable and not frontend.is_for_program:
        named = frontend.typed(request._replace(devices=(usable.device.number,)))
        lines.append((f"To use {usable.label} anyway, name it: ", (named, TYPED)))
    return lines


def can_wait(reason: Refusal) -> bool:
    """Tell whether what is asked for may come free by itself."""
    if reasons.is_trouble([row.state for row in messages.fit(reason.rows)], reason.request.needed):
        return False
    return any(row.state in PASSING and not reasons.is_dark(row) for row in _missing(reason))


def _missing(reason: Refusal) -> list[DeviceStatus]:
    """Return the devices that could not be had, but for those of processes started together."""
    return [r for r in reason.rows if not (r.would_be_taken or _is_siblings(r, reason))]


def _is_siblings(row: DeviceStatus, reason: Refusal) -> bool:
    return not {holder.listed_pid for holder in row.holders}.isdisjoint(reason.siblings)


def next_lines(reason: Refusal, frontend: Frontend, *, waits: bool) -> list[str]:
    """Return what may be typed next, and never takes or ends what somebody has.

    waits: waiting in the queue is one of them.
    """
    free = [_instead(reason, frontend)] if len(reason.free) >= reason.request.needed else []
    return [*free, *([frontend.typed(reason.request, waits=True)] if waits else [])]


def _instead(reason: Refusal, frontend: Frontend) -> str:
    """Return what gets others than those that were named.

    With their numbers where something is held, which it would mean without.
    """
    needed = reason.request.needed
    numbers = tuple(row.device.number for row in reason.free[:needed]) if reason.kept else ()
    count = needed if needed > 1 and not reason.kept else None
    return frontend.typed(reason.request._replace(devices=numbers, count=count))


def _may_be_named(row: DeviceStatus, user: str | None) -> bool:
    """Tell whether naming the device would get it, and would take nothing from another person."""
    if row.state is not State.BUSY or row.awaited_by or row.usage is None:
        return False
    is_all_seen = len(row.processes) >= max(1, (row.usage.compute or 0) + (row.usage.mps or 0))
    is_own = user is not None and all(process.user == user for process in row.processes)
    is_windows = row.usage.is_wsl and reasons.is_nobodys(row)
    return is_usable(row.usage) and (is_windows or (is_all_seen and is_own))


# -- a wait ----------------------------------------------------------------------------------------


def wait(waiting: Waiting) -> Picture:
    """Show the request, the place in the queue, the time, and every device that would do.

    The foot says who comes first in the queue, and what may come free first. The brief line names
    only the holder of each device.
    """
    head = " ".join(filter(None, [awaited(waiting), ruled.limited(waiting.rows)]))
    rows = messages.fit(waiting.rows)
    now = time.time()
    first = contacts.likeliest(rows, now)
    foot = reasons.unseen(rows)
    if (ticket := waiting.first) is not None:
        asks, user = sanitize(ticket.asks or "a GPU"), procfs.user_of(os.getpid())
        is_own = phrases.is_of(ticket.holder, user)
        people = phrases.one_of(ticket.holder, user) if is_own else phrases.person(ticket.holder)
        waits = f", {'which' if is_own else 'who'} waits for {asks}."
        foot.append(("Number 1 in the queue is ", (people, STRONG), waits))
    foot += [("Likeliest to come free: ", *first)] if first else []
    holders = ", ".join(f"{row.label} {_who(row, now)}" for row in rows)
    first_line: Line = ((head, STRONG), *layout.common_model(rows))
    picture = Layout([first_line], layout.entries(rows, View(now)), (), foot)
    return Picture(picture, f"{head} {holders}".rstrip())


def awaited(waiting: Waiting) -> str:
    """Return "Waiting for a GPU, number 2 in the queue, for 3 min (1 h at most)."."""
    place = "next" if waiting.place == 1 else f"number {waiting.place}"
    time_ = durations.duration(waiting.waited_s)
    if not math.isinf(waiting.limit_s):
        time_ += f" ({durations.time_limit(waiting.limit_s)} at most)"
    return f"Waiting for {messages.asked(waiting.request)}, {place} in the queue, for {time_}."


def _who(row: DeviceStatus, now: float) -> str:
    """Return who has a device, in a word; for a full one, how much of it can be promised."""
    if row.state is State.FULL:
        return f"has room for {phrases.room(row.promisable_mib or 0.0)}"
    user = row.holders[0].user if row.holders else None
    if layout.state(row, now) is State.KEPT:
        return f"kept for the restart of {phrases.person(row.holders[0])}"
    return sanitize(user) if user and row.state is State.RESERVED else row.state.value


# -- parts of them ---------------------------------------------------------------------------------


def queueing(typed: str, *, is_second: bool) -> Line:
    """Return the queue as a way out. is_second: another was named before."""
    return ("Or wait in the queue: " if is_second else "Wait in the queue: "), (typed, TYPED)
