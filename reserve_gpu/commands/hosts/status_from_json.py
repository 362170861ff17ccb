"""Read the status of another machine from its JSON, as `Status.to_dict` writes it there.

Nothing of what another machine says decides who may have a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.gpus.usage import split_graphics
from reserve_gpu.model.devices import GRAPHICS, Device, Fault, Gauges, Process, State, Usage
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


def status(fields: object) -> Status:
    """Return the status that the JSON describes. Raises FormatError."""
    said = table(fields, VERSION, "devices")
    message = said.text("message")
    waiting = tuple(map(_ticket, said.tables("waiting")))
    return Status(
        tuple(_row(device, waiting) for device in said.tables("devices")),
        waiting,
        said.text("problem"),
        said.number("time") or 0.0,
        said.text("host") or "",
        limit=said.text("limit"),
        rules=Rules("", "", message) if message else None,
        user=said.text("user"),
    )


def _row(said: Fields, waiting: Sequence[Ticket]) -> DeviceStatus:
    fields = (fields_of(Process, each.fields) for each in said.tables("processes"))
    every = [Process(**{"pid": 0, **each}) for each in fields]
    uses, drawing = split_graphics(every, said.number("memory_total_mib"))
    state, reason = _state(said), said.text("reason")
    place = said.integer("next_in_line") or 0
    percent = said.integer("utilisation_percent")
    row = DeviceStatus(
        _device(said, reason),
        State.RESERVED if state is State.KEPT else state,  # as a row has it; its holder tells
        usage=_usage(said, every),
        processes=tuple(uses),
        holders=tuple(map(_holder, said.tables("holders"))),
        is_unused=said.boolean("is_reserved_but_idle"),
        is_unreserved_use=said.boolean("is_used_without_reservation"),
        awaited_by=waiting[place - 1].holder if 0 < place <= len(waiting) else None,
        graphics=tuple(drawing),
        promisable_mib=said.number("memory_promisable_mib"),
        **fields_of(Gauges, {**said.fields, "utilisation": percent}),
    )
    if row.state in HELD and reason:
        row = row._replace(use_state=State.BUSY)
    # Mostly the reason can be told from the readings; where it can't, the other machine knows more.
    return row if reasons.cause(row) == (reason or "") else row._replace(reason=reason)


def _state(said: Fields) -> State:
    return known(State, said.text("state")) or State.UNKNOWN


def _device(said: Fields, reason: str | None) -> Device | Fault:
    fields = fields_of(Device, {**said.fields, "memory_mib": said.integer("memory_total_mib")})
    device = Device(**{"index": 0, "uuid": "", **fields})
    if not device.uuid:
        return Fault(device.index, reason or "", device.instance, _state(said))
    return device._replace(gpu_uuid=None) if device.gpu_uuid == device.uuid else device


def _usage(said: Fields, processes: Sequence[Process]) -> Usage | None:
    used_mib, mode = said.number("memory_used_mib"), MODES.get(said.text("compute_mode") or "")
    if used_mib is None and mode is None:
        return None
    kinds = [process.kind for process in processes]
    return Usage(
        compute=kinds.count("compute"),
        mps=kinds.count("MPS"),
        total_mib=said.number("memory_total_mib"),
        used_mib=used_mib,
        graphics_mib=float(sum(p.memory_mib or 0 for p in processes if p.kind == GRAPHICS)),
        mode=mode,
    )


def _holder(said: Fields) -> Holder:
    record = Record.from_dict({**said.fields, "part_mib": said.number("memory_promised_mib")})
    record = record._replace(guest_of=0.0 if said.boolean("is_guest") else None)
    return Holder(
        record,
        record.who.pid if said.boolean("confirmed") else None,
        elsewhere=said.boolean("elsewhere") is True,
        last_cell=said.number("last_cell"),
        used_mib=said.number("memory_used_mib"),
        beside=said.text("beside"),
    )


def _ticket(said: Fields) -> Ticket:
    return Ticket(0, "", frozenset(said.texts("wants")), _holder(said), said.text("asks"))
