"""A machine's status, as a table for users and as JSON for programs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu.gpus import names
from reserve_gpu.model.devices import ComputeMode, Device, State
from reserve_gpu.model.errors import REASON_LIMIT
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
)
from reserve_gpu.render.frontends import PYTHON, Frontend
from reserve_gpu.render.layout import Layout, View
from reserve_gpu.render.phrases import FAINT, MARK, STRONG, TYPED, Line
from reserve_gpu.render.pictures import Picture, queueing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import DeviceStatus, Holder
    from reserve_gpu.model.queue import Ticket
    from reserve_gpu.model.requests import Rules


VERSION = 1  # version of the JSON format; new releases only add fields
# Fields of a record that the JSON leaves out or represents in another form.
NOT_SHOWN = {"who", "terms", "asks", "written", "label", "index", "visible", "guest_of"}
NOT_SHOWN |= {"since_boot", "written_boot", "write_locked", "released"}
COMPUTE_MODES: dict[int | None, str] = {
    ComputeMode.DEFAULT: "default",
    ComputeMode.EXCLUSIVE_THREAD: "exclusive_thread",
    ComputeMode.PROHIBITED: "prohibited",
    ComputeMode.EXCLUSIVE_PROCESS: "exclusive_process",
}


class Status(NamedTuple):
    """A snapshot of a machine's status that can display itself in IPython.

    Attributes:
        rows: The status of each device.
        waiting: The queue entries, in order.
        problem: Why some or all reservations could not be read, or None if all were read.
        time: The time of the snapshot, in seconds since the epoch.
        host: The machine's name.
        limit: The inherited CUDA_VISIBLE_DEVICES, which limits the devices this process may use.
        frontend: The frontend that shows the status. Hints suggest commands for this frontend.
        rules: The administrator's rules for the user.
        is_above: Whether an ancestor of this process has reserved a device that this process may
            use.
        is_late: Whether CUDA has started in this process. The process can then reserve only devices
            that CUDA sees.
        is_all: Whether to show similar free devices as separate entries.
        user: The user who reads the status.
    """

    rows: tuple[DeviceStatus, ...]
    waiting: tuple[Ticket, ...] = ()
    problem: str | None = None
    time: float = 0.0
    host: str = ""
    limit: str | None = None
    frontend: Frontend = PYTHON
    rules: Rules | None = None
    is_above: bool = False
    is_late: bool = False
    is_all: bool = False
    user: str | None = None

    def __repr__(self) -> str:
        return str(self.picture())

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:  # noqa: FBT001 - IPython's
        self.picture()._repr_pretty_(printer, is_cycle)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    @property
    def machines(self) -> tuple[Status, ...]:
        """Return a tuple that contains only this status, because it is about a single machine."""
        return (self,)

    def for_any_reader(self) -> Status:
        """Return a copy that does not call any user's processes "yours"."""
        return self._replace(user=None)

    def picture(self) -> Picture:
        """Return the status as a table for users."""
        view = View(self.time, self.frontend.here, is_all=self.is_all, user=self.user)
        entries = layout.entries(self.rows, view)
        return Picture(Layout(_head(self), entries, queue(self), _foot(self)))

    def to_dict(self) -> dict[str, Any]:
        """Return the status as JSON data, in the format described in docs/formats.md."""
        every_uuid = {row.device.uuid for row in self.rows if isinstance(row.device, Device)}
        return {
            "version": VERSION,
            "host": self.host,
            "user": self.user,
            "time": self.time,
            "devices": [_row_dict(row, self) for row in self.rows],
            "waiting": [_ticket_dict(ticket, every_uuid) for ticket in self.waiting],
            "problem": self.problem,
            "limit": self.limit,
            "message": self.rules.message if self.rules else None,
            "rules": _rules_dict(self.rules, self.rows) if self.rules and self.rules.file else None,
        }


# -- the table for users ---------------------------------------------------------------------------


def queue(status: Status) -> list[Line]:
    """Return a line for each waiter in the queue."""
    return [
        phrases.waiter_line(ticket, status.time, f"{place}. ", status.user)
        for place, ticket in enumerate(status.waiting, 1)
    ]


def free(status: Status) -> str:
    """Return a sentence that says which devices are free.

    For example, `3 of 8 GPUs are free: GPU2, GPU4 and GPU5.`
    """
    rows, available = status.rows, layout.free(status.rows)
    if not rows:
        return "No GPU found."
    if unseen := _unseen(status):
        return f"It is unknown whether {phrases.ranges(unseen)} {phrases.be(len(unseen))} free."
    is_split = any(row.device.instance is not None for row in rows)
    total = f"{len(rows)} {'device' if is_split else 'GPU'}{'' if len(rows) == 1 else 's'}"
    if len(rows) == 1:
        (row,) = rows
        is_only = "is the only GPU here" if row.is_mine else f"is {'' if available else 'not '}free"
        return f"{row.label} {is_only}."
    if not available:
        return f"None of {total} is free."
    if len(available) == len(rows):
        return f"{'Both GPUs' if total == '2 GPUs' else f'All {total}'} are free."
    named = phrases.ranges(available)
    return f"{len(available)} of {total} {phrases.be(len(available))} free: {named}."


def _unseen(status: Status) -> list[DeviceStatus]:
    """Return the devices that might be free because some reservations could not be read.

    The list is empty if any device is known to be free.
    """
    is_known = status.problem is None or layout.free(status.rows)
    return [] if is_known else [row for row in status.rows if row.state is State.UNKNOWN]


def _head(status: Status) -> list[Line]:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.time))
    about = (f"  {sanitize(status.host)}, {when}", FAINT)
    first = ((free(status), STRONG), about, *layout.common_model(status.rows, ", "))
    lines: list[Line] = [*rule_text.head(status.rules), first]
    if mine := [row for row in status.rows if row.is_mine]:
        lines.append(((f"{status.frontend.here.capitalize()} has {phrases.labels(mine)}.", MARK),))
    return lines


def _foot(status: Status) -> list[Line]:
    foot = _advice(status)
    if status.limit is not None:
        foot.append(_limit_line(status, status.limit))
    return [*foot, *missing(status), *rule_text.foot(status.rules, status.rows)]


def _limit_line(status: Status, limit: str) -> Line:
    variable = f"CUDA_VISIBLE_DEVICES={sanitize(limit)!r}", STRONG
    if status.is_above:
        visible = names.visible(names.entries(limit), [row.device for row in status.rows])
        held = [row for row in status.rows if row.holders and row.device in visible]
        of = f" of {phrases.labels(held)}" if held else ""
        text = f"This process runs under your reservation{of}, so "
        return text, variable, " is already set. Don't change it."
    if messages.hides_on_purpose(limit):
        text = " was set elsewhere, and hides every GPU from this process. To use one, unset it."
        return variable, text
    return variable, " was set elsewhere: this process can reserve only the GPUs in it."


def missing(status: Status) -> list[Line]:
    """Return a list with a warning if reservations could not be read, or else an empty list."""
    if not status.problem:
        return []
    text = f": {sanitize(status.problem, REASON_LIMIT)}"
    return [(("Reservations may be missing here", MARK), text)]


def _advice(status: Status) -> list[Line]:
    """Return hints for new users, such as how to reserve a free device or wait in the queue.

    There are no hints if this process holds a device or has an inherited limit.
    """
    rows, frontend = status.rows, status.frontend
    has_any = status.limit is not None or any(row.is_mine for row in rows)
    if not rows or has_any or _unseen(status):
        return []
    if status.is_late:
        return [(f"CUDA has started in {frontend.here}: only GPUs that it sees can be reserved.",)]
    available = [row for row in rows if row.state is State.FREE]
    if not all(map(layout.is_awaited, available)):
        return [("Get one with ", (frontend.typed(messages.ANY), TYPED))]
    states = [row.state for row in rows]
    if reasons.is_trouble(states):
        return [(reasons.trouble(states),)]
    queued: Line = ("The free GPUs are offered to the queue first.",) if available else ()
    own = contacts.own_reservations(rows, status.time, status.user, frontend)
    ask = contacts.users_to_ask(rows, status.time, status.user)
    part = memory_parts.offer(rows, messages.ANY, frontend, status.waiting)
    lines = [*own, *([ask] if ask else []), *reasons.unseen(rows, frontend, status.user)]
    if not all(map(reasons.is_dark, rows)):
        lines.append(queueing(frontend.typed(messages.ANY, waits=True), is_second=bool(lines)))
    return [line for line in (part, queued, *lines) if line]


# -- for programs ----------------------------------------------------------------------------------


def _row_dict(row: DeviceStatus, status: Status) -> dict[str, Any]:
    device = row.device if isinstance(row.device, Device) else None
    places = (
        place
        for place, ticket in enumerate(status.waiting, 1)
        if device and ticket.could_use(device.uuid)
    )
    return {
        "label": row.label,
        "state": (State.KEPT if layout.is_kept(row, status.time) else row.state).value,
        "reason": reasons.cause(row) or None,
        "index": row.device.index,
        "instance": row.device.instance,
        "uuid": device.uuid if device else None,
        "gpu_uuid": (device.gpu_uuid or device.uuid) if device else None,
        "name": device.name if device else None,
        "bus_id": device.bus_id if device else None,
        "memory_total_mib": device.memory_mib if device else None,
        "memory_used_mib": row.usage.used_mib if row.usage else None,
        "memory_promisable_mib": row.promisable_mib,
        "utilisation_percent": row.utilisation,
        "temperature_c": row.temperature_c,
        "power_w": row.power_w,
        "power_limit_w": row.power_limit_w,
        "compute_mode": COMPUTE_MODES.get(row.usage.mode) if row.usage else None,
        "processes": [process._asdict() for process in row.processes + row.background],
        "holders": [holder_dict(holder, status.time) for holder in row.holders],
        "idle_for_s": layout.idle_s(row, status.time),
        "free_at": end[0] if (end := contacts.last_end(row, status.time)) else None,
        "is_this_process": row.is_mine,
        "is_reserved_but_idle": row.is_unused,
        "is_used_without_reservation": row.is_unreserved_use,
        "next_in_line": next(places, None),
    }


def _rules_dict(rules: Rules, rows: Sequence[DeviceStatus]) -> dict[str, Any]:
    ending = rules.after_cuda
    return {
        "file": rules.file,
        "user": rules.user,
        "gpus": rules.gpus.value if rules.gpus else None,
        "time_s": rules.time.value if rules.time else None,
        "idle_s": rules.idle.value if rules.idle else None,
        "after_cuda": None if ending is None else "warn" if ending.value else "end",
        "drain": list(rules.drained),
        "drain_unmatched": rule_text.unmatched(rules, rows),
        "problems": list(rules.problems),
    }


def holder_dict(holder: Holder, now: float) -> dict[str, Any]:
    """Return a holder as JSON data."""
    lease, is_known = holder.lease, holder.memory_limit_mib is None or holder.used_mib is not None
    facts = holder.record._asdict().items()
    return {
        **_about(holder),
        **{name: value for name, value in facts if name not in NOT_SHOWN},
        "last_cell": holder.last_cell,
        "memory_promised_mib": holder.memory_limit_mib,
        "memory_used_mib": holder.used_mib,
        "is_over": holder.is_over if is_known else None,
        "until": lease.until,
        "is_job_end": lease.is_jobs,
        "idle_s": lease.idle_s,
        "if_wanted": lease.if_wanted,
        "overdue": durations.overdue_since(holder, now),
        "kept_until": holder.record.kept_until if holder.is_kept(now) else None,
        "is_dying": holder.is_dying,
        "is_guest": holder.record.guest_of is not None,
        "beside": holder.beside,
    }


def _ticket_dict(ticket: Ticket, every_uuid: set[str]) -> dict[str, Any]:
    """Return a waiter as JSON data.

    Args:
        ticket: The waiter's queue entry.
        every_uuid: The UUIDs of this machine's devices. Other UUIDs are left out, because a forged
            queue entry might list thousands of them.
    """
    wants = every_uuid if ticket.wants is None else ticket.wants & every_uuid
    return {**_about(ticket.holder), "asks": ticket.asks, "wants": sorted(wants)}


def _about(holder: Holder) -> dict[str, Any]:
    """Return the JSON fields that holders and waiters have in common."""
    who = holder.record.who._replace(pid=holder.pid, user=holder.user)._asdict()
    del who["namespace"], who["mounts"]
    ours = {"note": holder.note, "since": holder.since}
    return {**who, **ours, "confirmed": holder.confirmed, "elsewhere": holder.is_other_namespace}
