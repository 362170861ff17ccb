"""Parse another machine's status from the JSON that `Status.to_dict` produced there.

The JSON is untrusted, and is never used to decide which process gets a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.gpus.usage import split_uses
from reserve_gpu.model.devices import (
    COMPUTE,
    GRAPHICS,
    MPS,
    Device,
    Fault,
    Gauges,
    Process,
    State,
    Usage,
)
from reserve_gpu.model.holders import DeviceStatus, Holder, Record
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Rules
from reserve_gpu.model.untrusted import Fields, fields_of, known, table
from reserve_gpu.render import reasons
from reserve_gpu.render.status_view import COMPUTE_MODES, VERSION, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

MODES = {name: mode for mode, name in COMPUTE_MODES.items()}
HELD = (State.RESERVED, State.FULL)


def status(parsed: object) -> Status:
    """Convert parsed JSON to a status.

    Raises:
        FormatError: The JSON is not a status, or its format version is not supported.
    """
    fields = table(parsed, VERSION, "devices")
    message = fields.text("message")
    waiting = tuple(map(_ticket, fields.tables("waiting")))
    return Status(
        tuple(_row(device, waiting) for device in fields.tables("devices")),
        waiting,
        fields.text("problem"),
        fields.number("time") or 0.0,
        fields.text("host") or "",
        limit=fields.text("limit"),
        rules=Rules("", "", message) if message else None,
        user=fields.text("user"),
    )


def _row(fields: Fields, waiting: Sequence[Ticket]) -> DeviceStatus:
    every = [
        Process(**{"pid": 0, **fields_of(Process, each.fields)})
        for each in fields.tables("processes")
    ]
    mode = MODES.get(fields.text("compute_mode") or "")
    uses, background = split_uses(every, fields.number("memory_total_mib"), mode)
    state, reason = _state(fields), fields.text("reason")
    place = fields.integer("next_in_line") or 0
    percent = fields.integer("utilisation_percent")
    row = DeviceStatus(
        _device(fields, reason),
        # A kept device counts as reserved here, because its holder's record has `kept_until`.
        State.RESERVED if state is State.KEPT else state,
        usage=_usage(fields, every, uses),
        processes=tuple(uses),
        holders=tuple(map(_holder, fields.tables("holders"))),
        is_unused=fields.boolean("is_reserved_but_idle"),
        is_unreserved_use=fields.boolean("is_used_without_reservation"),
        awaited_by=waiting[place - 1].holder if 0 < place <= len(waiting) else None,
        background=tuple(background),
        promisable_mib=fields.number("memory_promisable_mib"),
        **fields_of(Gauges, {**fields.fields, "utilisation": percent}),
    )
    if row.state in HELD and reason:
        row = row._replace(use_state=State.BUSY)
    # This machine can usually derive the reason from the other fields. If the derived reason
    # differs, the other machine knows more than it sent, so keep the other machine's reason.
    return row if reasons.cause(row) == (reason or "") else row._replace(reason=reason)


def _state(fields: Fields) -> State:
    return known(State, fields.text("state")) or State.UNKNOWN


def _device(fields: Fields, reason: str | None) -> Device | Fault:
    memory_mib = fields.integer("memory_total_mib")
    known_fields = fields_of(Device, {**fields.fields, "memory_mib": memory_mib})
    device = Device(**{"index": 0, "uuid": "", **known_fields})
    if not device.uuid:
        return Fault(device.index, reason or "", device.instance, _state(fields))
    return device._replace(gpu_uuid=None) if device.gpu_uuid == device.uuid else device


def _usage(fields: Fields, processes: Sequence[Process], uses: Sequence[Process]) -> Usage | None:
    used_mib, mode = fields.number("memory_used_mib"), MODES.get(fields.text("compute_mode") or "")
    if used_mib is None and mode is None:
        return None
    kinds = [process.kind for process in uses]
    return Usage(
        compute=kinds.count(COMPUTE),
        mps=kinds.count(MPS),
        total_mib=fields.number("memory_total_mib"),
        used_mib=used_mib,
        graphics_mib=float(sum(p.memory_mib or 0 for p in processes if p.kind == GRAPHICS)),
        mode=mode,
    )


def _holder(fields: Fields) -> Holder:
    record = Record.from_dict({**fields.fields, "part_mib": fields.number("memory_promised_mib")})
    record = record._replace(guest_of=0.0 if fields.boolean("is_guest") else None)
    return Holder(
        record,
        record.who.pid if fields.boolean("confirmed") else None,
        is_other_namespace=fields.boolean("elsewhere") is True,
        last_cell=fields.number("last_cell"),
        used_mib=fields.number("memory_used_mib"),
        beside=fields.text("beside"),
        is_dying=fields.boolean("is_dying") is True,
    )


def _ticket(fields: Fields) -> Ticket:
    return Ticket(0, "", frozenset(fields.texts("wants")), _holder(fields), fields.text("asks"))
