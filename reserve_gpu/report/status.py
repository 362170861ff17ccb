"""How the machine stands: every device, what uses it, who has reserved it, and who waits.

Only looks: it takes no device's lock, and what can't be read is a row that says so.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu import host
from reserve_gpu.errors import LockError, MutexHeldError
from reserve_gpu.gpus import names
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.usage import judge, room_mib
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model import (
    GRAPHICS,
    STUCK,
    ComputeMode,
    Device,
    Fault,
    Holder,
    Process,
    Row,
    State,
    Ticket,
    Usage,
)
from reserve_gpu.report import colour, pictures, reasons, times, words
from reserve_gpu.report.faces import PYTHON, Face
from reserve_gpu.report.pictures import Picture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reserve_gpu.gpus.nvml import Nvml
    from reserve_gpu.model import Rules

VERSION = 1  # of the JSON; names are only ever added to it
PROCESS_FIELDS = ("pid", "user", "command", "memory_mib", "has_reserved", "kind")
HOLDER_FIELDS = (
    "pid", "user", "notebook", "command", "cwd", "note", "since", "last_cell", "confirmed",
    "elsewhere",
)  # fmt: skip
COMPUTE_MODES: dict[int | None, str] = {
    ComputeMode.DEFAULT: "default",
    ComputeMode.EXCLUSIVE_THREAD: "exclusive_thread",
    ComputeMode.PROHIBITED: "prohibited",
    ComputeMode.EXCLUSIVE_PROCESS: "exclusive_process",
}
MUTEX_LIMIT_S = 0.5


class Status(NamedTuple):
    """How a machine stood at one moment; shows itself in a terminal and in a notebook.

    rows: one for each device. waiting: the queue, the first one first.
    problem: why nothing, or not all, is known of reservations.
    time: in seconds since the epoch. host: the machine's name.
    limit: the CUDA_VISIBLE_DEVICES from outside, which limits what this process can reserve.
    face: where it is read, which decides how hints are typed.
    rules: the administrator's, for who looks. unmatched: names of drained devices that mean none.
    """

    rows: tuple[Row, ...]
    waiting: tuple[Ticket, ...] = ()
    problem: str | None = None
    time: float = 0.0
    host: str = ""
    limit: str | None = None
    face: Face = PYTHON
    rules: Rules | None = None
    unmatched: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return str(self.picture())

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:  # noqa: FBT001 - IPython's
        self.picture()._repr_pretty_(printer, is_cycle)

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()

    def to_text(self, color: str = colour.AUTO) -> str:
        """How it looks on standard output: coloured and broken to its width in a terminal.

        color: `auto`, `always` or `never`; NO_COLOR and FORCE_COLOR count where it is `auto`.
        """
        return self.picture().to_text(color=color)

    def picture(self) -> Picture:
        """What it looks like."""
        return Picture(pictures.status(*self))

    def to_dict(self) -> dict[str, Any]:
        """The same for programs, as JSON takes it; docs/formats.md has the shape."""
        every_uuid = {row.device.uuid for row in self.rows if isinstance(row.device, Device)}
        return {
            "version": VERSION,
            "host": self.host,
            "time": self.time,
            "devices": [_row_dict(row, self.time) for row in self.rows],
            "waiting": [_ticket_dict(ticket, every_uuid) for ticket in self.waiting],
            "problem": self.problem,
            "limit": self.limit,
            "message": self.rules.message if self.rules else None,
            "rules": _rules_dict(self.rules, self.unmatched) if self.rules else None,
        }


class Reservations(NamedTuple):
    """What the lock directory tells: by UUID who has a device, and why others may have it unseen.

    problem: why nothing, or not all, is known. others: who has what is none of these devices.
    """

    holders: Mapping[str, tuple[Holder, ...]]
    faults: Mapping[str, str]
    waiting: Sequence[Ticket] = ()
    problem: str | None = None
    others: tuple[Holder, ...] = ()


def look(
    nvml: Nvml,
    *,
    idle_mib: float | None = None,
    limit: str | None = None,
    face: Face = PYTHON,
    rules: Rules | None = None,
) -> Status:
    """Look at every device of this machine that the driver shows.

    nvml: a conversation with the driver.
    idle_mib: memory in use up to which a device is idle, None for the default.
    limit: the CUDA_VISIBLE_DEVICES from outside, if there is one. face: where it is read.
    rules: the administrator's, where there are some.
    Raises DriverError where there is no driver. Where the lock directory can't be used the devices
    are there all the same, and `problem` says why nothing is known of reservations.
    """
    devices = list(nvml.walk())
    reservations = _reservations(devices)
    waiting = tuple(
        ticket._replace(holder=host.with_user(ticket.holder)) for ticket in reservations.waiting
    )
    rows = tuple(_row(nvml, device, reservations, idle_mib) for device in devices)
    unmatched: tuple[str, ...] = ()
    if rules:
        rows = tuple(_drained(row, rules) for row in rows)
        unmatched = _unmatched(rules, devices)
    now, name = time.time(), host.machine_name()
    return Status(rows, waiting, reservations.problem, now, name, limit, face, rules, unmatched)


def _drained(row: Row, rules: Rules) -> Row:
    """The row, of a device that is not handed out any more as such, whoever still has it."""
    is_drained = row.state not in STUCK and names.is_one_of(row.device, rules.drained)
    return row._replace(state=State.DRAINED, room_mib=None) if is_drained else row


def _unmatched(rules: Rules, devices: Sequence[Device | Fault]) -> tuple[str, ...]:
    """The names of drained devices that mean none of these, or several GPUs."""
    return tuple(
        name
        for name in rules.drained
        if len({d.index for d in devices if names.is_one_of(d, [name])}) != 1
    )


def _reservations(devices: Sequence[Device | Fault]) -> Reservations:
    """Who has which device, and who waits.

    Trying a lock makes others fail to take it for a moment, so that is done under the mutex. Where
    others have the mutex for too long the kernel's list names those that it shows, without a try.
    Users are looked up after that, as it can take long where they come from a server.
    """
    uuids = [device.uuid for device in devices if isinstance(device, Device)]
    unseen = dict.fromkeys(uuids, "whether it is reserved can't be seen now")
    try:
        with LockDirectory() as directory:
            try:
                with directory.mutex(MUTEX_LIMIT_S):
                    holders, faults = _holders(uuids, directory.holders_of)
                    is_some_lost = len(uuids) < len(devices)
                    others = directory.holders_besides(uuids) if is_some_lost else ()
                    return Reservations(holders, faults, directory.tickets(), others=others)
            except MutexHeldError as error:
                holders, faults = _holders(uuids, directory.listed_holders_of)
                waiting = directory.listed_tickets()
                return Reservations(holders, {**unseen, **faults}, waiting, str(error))
    except LockError as error:
        return Reservations({}, unseen, problem=str(error))


def _holders(
    uuids: Sequence[str], holders_of: Callable[[str], tuple[Holder, ...]]
) -> tuple[dict[str, tuple[Holder, ...]], dict[str, str]]:
    """Who has each device, and why that can't be known."""
    holders, faults = {}, {}
    for uuid in uuids:
        try:
            holders[uuid] = holders_of(uuid)
        except LockError as error:  # noqa: PERF203 - one device's fault says nothing of the others
            faults[uuid] = str(error)
    return holders, faults


def _row(
    nvml: Nvml, device: Device | Fault, reservations: Reservations, idle_mib: float | None
) -> Row:
    if isinstance(device, Fault):
        return _lost_row(device, reservations.others)
    fault = reservations.faults.get(device.uuid)
    row = _unread(device, reservations.holders.get(device.uuid, ()))
    row = row._replace(
        state=State.RESERVED if row.holders else State.BROKEN,
        next_in_queue=_next_in_queue(device, reservations.waiting),
    )
    try:
        usage, processes, gauges = nvml.look(device)
    except DeviceError as error:
        state = State.RESERVED if row.holders else error.state
        return row._replace(state=state, reason=str(error), is_unreserved_use=None)
    if nvml.sees_all:
        row = row._replace(holders=host.with_uses(row.holders, processes))
        processes = _attributed(processes, row.holders, is_complete=not fault)
    row = row._replace(
        usage=usage,
        **gauges._asdict(),
        processes=tuple(process for process in processes if process.kind != GRAPHICS),
        graphics=tuple(process for process in processes if process.kind == GRAPHICS),
    )
    row = _judged(row, usage, judge(usage, idle_mib), fault)
    if fault:
        return row
    parts = [(holder.part_mib, holder.used_mib) for holder in row.holders]
    return row._replace(room_mib=room_mib(device, usage, parts))


def _lost_row(fault: Fault, others: Sequence[Holder]) -> Row:
    """The row of what can't be used, with those who, by their own word, have reserved it."""
    holders = [
        holder
        for holder in others
        if holder.label == fault.label
        or (holder.index == fault.index and fault.instance is None)  # the GPU of an instance
    ]
    return _unread(fault, holders)._replace(state=fault.state, reason=fault.reason)


def _unread(device: Device | Fault, holders: Iterable[Holder]) -> Row:
    """The row of a device as long as nothing is read from it: who has it, this process first."""
    known = tuple(sorted(map(host.with_user, holders), key=_is_another))
    return Row(
        device,
        State.BROKEN,
        holders=known,
        is_mine=bool(known) and not _is_another(known[0]),
        is_unused=None if known else False,
    )


def _judged(row: Row, usage: Usage, use: State, fault: str | None) -> Row:
    """The row with what its readings and its holders come to.

    use: as the readings say. fault: why it can't be known whether somebody else has the device.
    """
    row = row._replace(is_unreserved_use=_is_unreserved_use(row, use, is_known=not fault))
    if row.holders:
        is_unused = words.is_unused(usage, row.processes)
        return row._replace(reason=reasons.cause(use, usage) or None, is_unused=is_unused)
    if use is State.IDLE:
        return row._replace(state=State.UNKNOWN if fault else State.FREE, reason=fault)
    return row._replace(state=use, reason=reasons.cause(use, usage) or None)


def _is_another(holder: Holder) -> bool:
    """Whether the holder is another process than this one, or may be."""
    return not (holder.seen and holder.pid == os.getpid())


def _next_in_queue(device: Device, tickets: Sequence[Ticket]) -> int | None:
    places = (place for place, t in enumerate(tickets, 1) if t.could_use(device.uuid))
    return next(places, None)


def _attributed(
    processes: Sequence[Process], holders: Sequence[Holder], *, is_complete: bool
) -> list[Process]:
    """The processes with user and command, and whether each belongs to a holder.

    is_complete: there are no other holders than these.
    """
    pids = {holder.pid for holder in holders if holder.seen and holder.pid}
    not_found = False if is_complete and all(holder.seen for holder in holders) else None
    return [
        host.identified(process)._replace(
            has_reserved=host.is_below(process.pid, pids) or not_found
        )
        for process in processes
    ]


def _is_unreserved_use(row: Row, use: State, *, is_known: bool) -> bool | None:
    """Whether somebody uses the device who has not reserved it, None if that can't be seen."""
    if not row.holders:
        return use is State.BUSY if is_known or use is not State.BUSY else None
    belongings = {process.has_reserved for process in row.processes}
    if False in belongings:
        return True
    return None if None in belongings else False


def _row_dict(row: Row, now: float) -> dict[str, Any]:
    device = row.device if isinstance(row.device, Device) else None
    return {
        "label": row.label,
        "state": row.state.value,
        "reason": row.reason,
        "index": row.device.index,
        "instance": row.device.instance,
        "uuid": device.uuid if device else None,
        "gpu_uuid": (device.gpu_uuid or device.uuid) if device else None,
        "name": device.name if device else None,
        "bus_id": device.bus_id if device else None,
        "memory_total_mib": device.memory_mib if device else None,
        "memory_used_mib": row.usage.used_mib if row.usage else None,
        "memory_promisable_mib": row.room_mib,
        "utilisation_percent": row.utilisation,
        "temperature_c": row.temperature_c,
        "power_w": row.power_w,
        "power_limit_w": row.power_limit_w,
        "compute_mode": COMPUTE_MODES.get(row.usage.mode) if row.usage else None,
        "processes": [_named(process, PROCESS_FIELDS) for process in row.processes + row.graphics],
        "holders": [_holder_dict(holder, now) for holder in row.holders],
        "is_this_process": row.is_mine,
        "is_reserved_but_idle": row.is_unused,
        "is_used_without_reservation": row.is_unreserved_use,
        "next_in_line": row.next_in_queue,
    }


def _rules_dict(rules: Rules, unmatched: Sequence[str]) -> dict[str, Any]:
    limits = {
        "gpus": rules.gpus,
        "memory_mib": rules.memory,
        "time_s": rules.time,
        "idle_s": rules.idle,
    }
    ending = rules.after_cuda
    return {
        "file": rules.file,
        "user": rules.user,
        **{name: rule.value if rule else None for name, rule in limits.items()},
        "after_cuda": None if ending is None else "warn" if ending.value else "end",
        "drain": list(rules.drained),
        "drain_unmatched": list(unmatched),
        "problems": [*rules.problems, *rules.unknown],
    }


def _holder_dict(holder: Holder, now: float) -> dict[str, Any]:
    is_known = holder.part_mib is None or holder.used_mib is not None
    return {
        **_named(holder, HOLDER_FIELDS),
        "memory_promised_mib": holder.part_mib,
        "memory_used_mib": holder.used_mib,
        "is_over": holder.is_over if is_known else None,
        "until": holder.promise.lease.until,
        "idle_s": holder.promise.lease.idle_s,
        "if_wanted": holder.promise.lease.if_wanted,
        "overdue": times.overdue_since(holder, now),
    }


def _ticket_dict(ticket: Ticket, every_uuid: set[str]) -> dict[str, Any]:
    """every_uuid: what one who could use any device could use."""
    about = _named(ticket.holder, [name for name in HOLDER_FIELDS if name != "last_cell"])
    wants = every_uuid if ticket.wants is None else ticket.wants
    return {**about, "asks": ticket.asks, "wants": sorted(wants)}


def _named(value: Holder | Process, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}
