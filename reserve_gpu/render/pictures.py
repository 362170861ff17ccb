"""Build and show the GPU tables for refusals and waits, with their headlines and hints."""

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
    rule_text,
    terminal,
)
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

# States in which a device might become free without an administrator's help.
PASSING = {State.RESERVED, State.FULL, State.BUSY, State.AWAITED, State.LIMITED, State.UNKNOWN}


class Picture(NamedTuple):
    """A GPU table that can be displayed in IPython, in a terminal or as plain text.

    Attributes:
        layout: The content.
        brief: A one-line summary.
        values: JSON data for programs, which a notebook stores along with the table.
    """

    layout: Layout
    brief: str = ""
    values: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        return terminal.plain(self.layout)

    def _repr_pretty_(self, printer: Any, _is_cycle: bool) -> None:  # noqa: FBT001 - IPython's
        # ipykernel sets FORCE_COLOR for the processes that cells start. But the plain text that
        # accompanies HTML must not contain color codes.
        printer.text(self.to_text() if terminal.is_terminal(sys.stdout) else str(self))

    def _repr_html_(self) -> str:
        return html(self.layout)

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        # JupyterLab would show data of type application/json instead of the table.
        return {"application/vnd.reserve-gpu+json": self.values} if self.values else {}

    @property
    def is_watched(self) -> bool:
        """Return whether a person can see the output of this IPython session."""
        return is_watched()

    def below(self, texts: Sequence[str]) -> Picture:
        """Return a copy of the picture with lines of text added above the table."""
        head = [*((text,) for text in texts), *self.layout.head]
        return self._replace(layout=self.layout._replace(head=head))

    def to_text(self, stream: TextIO | None = None) -> str:
        """Render the table as text, with the width and colors that the stream supports.

        Args:
            stream: The output stream. Defaults to standard output.
        """
        return terminal.text(self.layout, stream)

    def show(self, *, values: Mapping[str, Any] | None = None) -> None:
        """Display the table in the current cell.

        Args:
            values: JSON data for programs, which a notebook stores along with the table.
        """
        ipython_shell.display(self._replace(values=values))


def of_text(text: str) -> Picture:
    """Return a picture that contains only text."""
    return Picture(Layout([(line,) for line in text.splitlines()]), text)


def warn(warnings: Sequence[str]) -> None:
    """Show warnings in this IPython session."""
    lines: list[Line] = []
    for warning in warnings:
        first, *commands = warning.splitlines()  # HTML would turn a line break into a space
        lines += [(("Warning: ", MARK), first), *((line,) for line in commands)]
    tell(Picture(Layout(lines)))


def tell(what: Picture | str) -> None:
    """Show a table or a message in this IPython session.

    A terminal session prints to stderr. A notebook shows normal output, because stderr would be
    red.
    """
    if not ipython_shell.has_kernel():
        print(what, file=sys.stderr, flush=True)
    elif isinstance(what, str):
        ipython_shell.display({"text/plain": what}, raw=True)
    else:
        what.show()


# -- refusals --------------------------------------------------------------------------------------


class Shown(Protocol):
    """A result that a command can print in each output format."""

    @property
    def host(self) -> str:
        """Return the names of the machines that the rows come from."""

    def picture(self) -> Picture:
        """Return the result as a table for users."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data for programs."""


def refusal(reason: Refusal, frontend: Frontend) -> Picture:
    """Return the GPU table for a refusal, with a headline and hints above it.

    A hint might suggest reserving a busy GPU by number if only the user's own processes are using
    it.
    """
    request, rows, now = reason.request, reason.rows, time.time()
    waited = f"Timed out after {durations.time_limit(reason.waited_s)}. " if reason.waited_s else ""
    headline = waited + _none_free(request, rows, now, reason.user)
    head: list[Line] = [((headline, STRONG), *layout.common_model(rows))]
    if len(reason.free) >= request.needed:
        are_free = f"{phrases.ranges(reason.free)} {phrases.be(len(reason.free))} free: "
        head.append((are_free, (_alternative(reason, frontend), TYPED)))
    head += _hints(reason, frontend, now)
    if end := messages.left_with(reason.kept, frontend):
        head.append((end,))
    foot: list[Line] = []
    if reason.limit is not None:
        foot.append((messages.limit_line(reason.limit, len(rows)),))
    foot += [(("Warning: ", MARK), problem) for problem in reason.problems]
    entries = layout.entries(rows, View(now, frontend.here, user=reason.user))
    return Picture(Layout(head, entries, (), foot), headline)


def _none_free(request: Request, rows: Sequence[DeviceStatus], now: float, user: str | None) -> str:
    """Return the headline of a refusal, which says how many devices are in each state.

    Devices that this process keeps are not counted.
    """
    fit = messages.fit(rows)
    if limited := rule_text.limited(fit):
        return limited
    if (size := request.terms.size) and (no_room := memory_parts.no_room(request, size, fit)):
        return no_room
    held = [row for row in fit if row.is_mine and row.would_be_taken]
    other_rows = [row for row in fit if row not in held]
    states = [layout.state(row, now) for row in other_rows]
    total, free = len(states), states.count(State.FREE)
    is_split = any(row.device.instance is not None for row in other_rows)
    device = f"{'other ' if held else ''}free GPU{' device' if is_split else ''}"
    if not total:
        return f"No {device}."
    if free and held:
        needed = request.needed - len(held)
        return (
            f"You have {phrases.labels(held)} and asked for {request.needed}: {needed} more "
            f"{phrases.be(needed)} needed, but only {free} {phrases.be(free)} free."
        )
    if free:
        available = f"{free} of {total} {phrases.be(free)} free"
        return f"Not enough {device}s: {available}, but {request.needed} are needed."
    if total == 1:
        text = f"{other_rows[0].label} {_state_in_words(other_rows[0], now, user)}."
        return text if request.devices else f"No {device}: {text}"
    counts = Counter(state.value for state in states).most_common()
    text = ", ".join(f"{count} {state}" for state, count in counts)
    if request.devices:
        return f"None of {phrases.ranges(other_rows)} is free: {text}."
    return f"No {device}: {text}."


def _state_in_words(row: DeviceStatus, now: float, user: str | None) -> str:
    """Describe a device's state and owner, such as `is busy` or `is reserved by alice`.

    If `user`, who reads the message, is the owner, say `your train.ipynb` instead of the name.
    """
    state = layout.state(row, now).value
    if row.state is State.RESERVED:
        people = [
            phrases.owner_or_own_process(holder, user) for holder in row.holders if holder.user
        ]
        named = phrases.listed([*dict.fromkeys(people)][: phrases.NAMED_SHARERS])
        if state == State.KEPT.value:
            (holder, *_) = row.holders
            return f"is kept for the restart of {phrases.person_or_own_process(holder, user)}"
        return f"is {state} by {named}" if named else f"is {state}"
    return f"has {state}" if state.startswith("no ") else f"is {state}"


def _hints(reason: Refusal, frontend: Frontend, now: float) -> list[Line]:
    """Return the hints about a refusal, such as which users to ask and how to wait in the queue.

    No hint suggests reserving a device that another user holds.
    """
    request, rows, user = reason.request, reason.rows, reason.user
    fit = messages.fit(rows)
    states = [row.state for row in fit]
    siblings = [row for row in rows if _is_held_by_sibling(row, reason)]
    missing = _missing(reason)
    available = [row for row in rows if row.would_be_taken]
    first: Line = contacts.users_to_ask(missing, now, user)
    if any(row.counted for row in rows):  # the user's own reservations have reached a limit
        first = (
            () if siblings or frontend.is_for_program else ("Release one of your reservations.",)
        )
    lines = contacts.own_reservations(missing, now, user, frontend)
    if siblings:
        held = f"Processes that were started together with this one hold {phrases.ranges(siblings)}"
        lines.append((f"{held}. Start at most {len(reason.siblings)} of these processes.",))
    if part := memory_parts.offer(fit, request, frontend, reason.ahead):
        lines.append(part)
    lines += [*([first] if first else []), *reasons.unseen(missing, frontend, user)]
    if reasons.is_trouble(states, request.needed):
        lines.append((reasons.trouble(states),))
    elif can_wait(reason) and not reason.waited_s:
        lines.append(queueing(frontend.typed(request, waits=True), is_second=bool(lines)))
    if not request.devices and not all(row.is_mine for row in available):
        smaller = frontend.typed(request._replace(count=len(available)))
        are = phrases.be(len(available))
        lines.append((f"{len(available)} {are} available now: ", (smaller, TYPED)))
    if request.terms.size and (less := memory_parts.smaller(request, request.terms.size, fit)):
        size = phrases.gib(less.terms.memory_limit_mib or 0.0)
        lines.append((f"{size} is available now: ", (frontend.typed(less), TYPED)))
    usable = next((row for row in missing if _may_be_named(row, user)), None)
    if usable and not frontend.is_for_program:
        named = frontend.typed(request._replace(devices=(usable.device.number,)))
        lines.append((f"To use {usable.label} anyway, name it: ", (named, TYPED)))
    return lines


def can_wait(reason: Refusal) -> bool:
    """Return whether the requested devices might become free without an administrator's help."""
    if reasons.is_trouble([row.state for row in messages.fit(reason.rows)], reason.request.needed):
        return False
    return any(row.state in PASSING and not reasons.is_dark(row) for row in _missing(reason))


def _missing(reason: Refusal) -> list[DeviceStatus]:
    """Return the unavailable devices, excluding those that this process's siblings hold.

    Siblings are processes that were started together with this one, such as the ranks of an MPI
    program.
    """
    return [r for r in reason.rows if not (r.would_be_taken or _is_held_by_sibling(r, reason))]


def _is_held_by_sibling(row: DeviceStatus, reason: Refusal) -> bool:
    return not {holder.listed_pid for holder in row.holders}.isdisjoint(reason.siblings)


def next_lines(reason: Refusal, frontend: Frontend, *, waits: bool) -> list[str]:
    """Return commands to try next. None of them affects another process's reservation.

    Args:
        reason: The refusal.
        frontend: The frontend in which to run the commands.
        waits: Whether to include the command that waits in the queue.
    """
    free = [_alternative(reason, frontend)] if len(reason.free) >= reason.request.needed else []
    return [*free, *([frontend.typed(reason.request, waits=True)] if waits else [])]


def _alternative(reason: Refusal, frontend: Frontend) -> str:
    """Return the command that reserves free devices instead of the requested ones.

    If this process already holds a device, the command specifies the free devices by number. A
    command without numbers would just keep the held device.
    """
    needed = reason.request.needed
    numbers = tuple(row.device.number for row in reason.free[:needed]) if reason.kept else ()
    count = needed if needed > 1 and not reason.kept else None
    return frontend.typed(reason.request._replace(devices=numbers, count=count))


def _may_be_named(row: DeviceStatus, user: str | None) -> bool:
    """Return whether the user can reserve the device by number without disturbing other users."""
    if row.state is not State.BUSY or row.awaited_by or row.usage is None:
        return False
    is_all_seen = len(row.processes) >= max(1, (row.usage.compute or 0) + (row.usage.mps or 0))
    is_own = user is not None and all(
        process.user == user and not process.left_by for process in row.processes
    )
    is_windows = row.usage.is_wsl and reasons.is_nobodys(row)
    return is_usable(row.usage) and (is_windows or (is_all_seen and is_own))


# -- waits -----------------------------------------------------------------------------------------


def wait(waiting: Waiting, this_process: str = "this process") -> Picture:
    """Return the GPU table for a wait.

    The headline shows the request, the position in the queue and the elapsed time. The lines below
    the devices name the first waiter in the queue and the device that will probably be free next.
    The one-line summary gives only the owner or the state of each device.

    Args:
        waiting: The state of the wait.
        this_process: The phrase for this process, such as `this kernel`.
    """
    head = " ".join(filter(None, [awaited(waiting), rule_text.limited(waiting.rows)]))
    rows = messages.fit(waiting.rows)
    now, user = time.time(), procfs.user_of(os.getpid())
    first = contacts.next_free(rows, now)
    foot = reasons.unseen(rows)
    if (ticket := waiting.first) is not None:
        waiter = phrases.person_or_own_process(ticket.holder, user)
        pronoun = ", which" if phrases.is_of(ticket.holder, user) else ", who"
        waits = phrases.wait(ticket.holder, now, ticket.asks)
        foot.append(("First in the queue is ", (waiter, STRONG), pronoun, *waits, "."))
    foot += [("Probably free next: ", *first)] if first else []
    holders = ", ".join(f"{row.label} {_owner(row, now, user)}" for row in rows)
    first_line: Line = ((head, STRONG), *layout.common_model(rows))
    picture = Layout(
        [first_line], layout.entries(rows, View(now, this_process, user=user)), (), foot
    )
    return Picture(picture, f"{head} {holders}".rstrip())


def awaited(waiting: Waiting) -> str:
    """Return the headline of a wait.

    For example, `Waiting for a GPU: number 2 in the queue, 3 min so far (1 h at most).`
    """
    place = "next" if waiting.place == 1 else f"number {waiting.place}"
    time_ = f"{durations.duration(waiting.waited_s)} so far"
    if not math.isinf(waiting.limit_s):
        time_ += f" ({durations.time_limit(waiting.limit_s)} at most)"
    return f"Waiting for {messages.request_text(waiting.request)}: {place} in the queue, {time_}."


def _owner(row: DeviceStatus, now: float, user: str | None) -> str:
    """Return a device's owner, the available memory of a full device, or the device's state."""
    if row.state is State.FULL:
        return f"has room for {phrases.room(row.promisable_mib or 0.0)}"
    owner = row.holders[0].user if row.holders else None
    if layout.state(row, now) is State.KEPT:
        return f"kept for the restart of {phrases.person_or_own_process(row.holders[0], user)}"
    return sanitize(owner) if owner and row.state is State.RESERVED else row.state.value


# -- helpers ---------------------------------------------------------------------------------------


def queueing(typed: str, *, is_second: bool) -> Line:
    """Return the hint that suggests waiting in the queue.

    Args:
        typed: The command to type.
        is_second: Whether another hint comes before this one. If so, this hint starts with "Or".
    """
    return ("Or wait in the queue: " if is_second else "Wait in the queue: "), (typed, TYPED)
