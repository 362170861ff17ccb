"""Read the status of another machine from its JSON, as `Status.to_dict` writes it there.

What another machine says is foreign: each value has the type that it should have, or counts as not
known; texts and lists are bounded. Nothing here decides who may have a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reserve_gpu.history.totals import KEYS, UNKNOWN, Hours, Idle, is_day
from reserve_gpu.model import (
    GRAPHICS,
    Device,
    Fault,
    Holder,
    Lease,
    Process,
    Promise,
    Row,
    Rules,
    Size,
    State,
    Ticket,
    Usage,
)
from reserve_gpu.report import history, reasons
from reserve_gpu.report.history import Report
from reserve_gpu.report.status import COMPUTE_MODES, VERSION, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TEXT_LIMIT = 300  # characters
MOST = 256  # devices, holders or processes in one list
MOST_HOURS = 12_000  # rows of a report
LARGEST = 1e11  # no moment since the epoch is later, and no device has more memory in MiB
MODES = {name: mode for mode, name in COMPUTE_MODES.items()}
HELD = (State.RESERVED, State.FULL)


class FormatError(ValueError):
    """The JSON has another version, or is none of ours. version: the one that it names."""

    def __init__(self, version: int | None) -> None:
        super().__init__(f"version {version}")
        self.version = version


def report(fields: object) -> Report:
    """Return the report of a history that the JSON describes. Raises FormatError."""
    said = _Fields.of(fields, history.VERSION, "rows")
    by = said.text("by")
    return Report(
        by if by in KEYS else "user",
        dict(map(_hours, said.tables("rows", MOST_HOURS))),
        {day: hours for day, hours in map(_hours, said.tables("days", MOST_HOURS)) if is_day(day)},
        tuple(map(_idle, said.tables("longest_idle"))),
        said.number("since") or 0.0,
        said.number("until") or 0.0,
        host=said.text("host") or "",
        user=said.text("user"),
        is_kept=said.truth("is_kept") is not False,
    )


def _hours(said: _Fields) -> tuple[str, Hours]:
    hours = (said.number(f"{kind}_hours") or 0.0 for kind in Hours._fields)
    return said.text("name") or UNKNOWN, Hours(*hours)


def _idle(said: _Fields) -> Idle:
    return Idle(
        said.text("user") or UNKNOWN,
        said.text("name"),
        tuple(said.texts("gpus")),
        said.number("since") or 0.0,
        said.number("idle_hours") or 0.0,
    )


def status(fields: object) -> Status:
    """Return the status that the JSON describes. Raises FormatError."""
    said = _Fields.of(fields, VERSION, "devices")
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


class _Fields:
    """One table of the JSON; each method returns the value of a name if it has that type."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    @classmethod
    def of(cls, fields: object, version: int, needed: str) -> _Fields:
        """Return the outermost table. Raises FormatError. needed: a list that it must have."""
        if not isinstance(fields, dict):
            raise FormatError(None)
        said = cls(fields)
        if (found := said.whole("version")) != version:
            raise FormatError(found)
        if not isinstance(fields.get(needed), list):
            raise FormatError(None)
        return said

    def text(self, name: str) -> str | None:
        value = self._fields.get(name)
        return value[:TEXT_LIMIT] if isinstance(value, str) else None

    def number(self, name: str) -> float | None:
        value = self._fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if 0 <= value < LARGEST else None

    def whole(self, name: str) -> int | None:
        value = self._fields.get(name)
        return int(value) if type(value) is int and 0 <= value < LARGEST else None

    def truth(self, name: str) -> bool | None:
        value = self._fields.get(name)
        return value if isinstance(value, bool) else None

    def tables(self, name: str, most: int = MOST) -> list[_Fields]:
        value = self._fields.get(name)
        tables = value[:most] if isinstance(value, list) else []
        return [_Fields(table) for table in tables if isinstance(table, dict)]

    def texts(self, name: str) -> list[str]:
        value = self._fields.get(name)
        texts = value[:MOST] if isinstance(value, list) else []
        return [text[:TEXT_LIMIT] for text in texts if isinstance(text, str)]


def _row(said: _Fields, waiting: Sequence[Ticket]) -> Row:
    every = list(map(_process, said.tables("processes")))
    processes = tuple(process for process in every if process.kind != GRAPHICS)
    state, reason = _state(said), said.text("reason")
    place = said.whole("next_in_line") or 0
    row = Row(
        _device(said, reason),
        State.RESERVED if state is State.KEPT else state,  # as a row has it; its holder tells
        usage=_usage(said, processes),
        utilisation=said.whole("utilisation_percent"),
        processes=processes,
        holders=tuple(map(_holder, said.tables("holders"))),
        is_unused=said.truth("is_reserved_but_idle"),
        is_unreserved_use=said.truth("is_used_without_reservation"),
        awaited_by=waiting[place - 1].holder if 0 < place <= len(waiting) else None,
        graphics=tuple(process for process in every if process.kind == GRAPHICS),
        temperature_c=said.whole("temperature_c"),
        power_w=said.number("power_w"),
        power_limit_w=said.number("power_limit_w"),
        promisable_mib=said.number("memory_promisable_mib"),
    )
    if row.state in HELD and reason:
        row = row._replace(use=State.BUSY)
    # Mostly the reason can be told from the readings; where it can't, the other machine knows more.
    return row if reasons.cause(row) == (reason or "") else row._replace(reason=reason)


def _state(said: _Fields) -> State:
    try:
        return State(said.text("state"))
    except ValueError:
        return State.UNKNOWN


def _device(said: _Fields, reason: str | None) -> Device | Fault:
    index, instance, uuid = said.whole("index") or 0, said.whole("instance"), said.text("uuid")
    if uuid is None:
        return Fault(index, reason or "", instance, _state(said))
    gpu_uuid = said.text("gpu_uuid")
    return Device(
        index,
        uuid,
        said.text("name"),
        said.text("bus_id"),
        said.whole("memory_total_mib"),
        instance=instance,
        gpu_uuid=None if gpu_uuid == uuid else gpu_uuid,
    )


def _usage(said: _Fields, processes: tuple[Process, ...]) -> Usage | None:
    used_mib, mode = said.number("memory_used_mib"), MODES.get(said.text("compute_mode") or "")
    if used_mib is None and mode is None:
        return None
    kinds = [process.kind for process in processes]
    return Usage(
        compute=kinds.count("compute"),
        mps=kinds.count("MPS"),
        total_mib=said.number("memory_total_mib"),
        used_mib=used_mib,
        mode=mode,
    )


def _process(said: _Fields) -> Process:
    return Process(
        said.whole("pid") or 0,
        said.whole("memory_mib"),
        said.text("user"),
        said.text("command"),
        said.truth("has_reserved"),
        said.text("beside"),
        said.text("kind") or "compute",
    )


def _holder(said: _Fields) -> Holder:
    size, confirmed = said.number("memory_promised_mib"), said.truth("confirmed") is True
    lease = Lease(
        until=said.number("until"),
        idle_s=said.number("idle_s"),
        if_wanted=said.truth("if_wanted") is True,
    )
    return Holder(
        pid=said.whole("pid"),
        user=said.text("user"),
        notebook=said.text("notebook"),
        origin=said.text("origin"),
        since=said.number("since"),
        promise=Promise(None if size is None else Size(size), lease, said.text("note")),
        overdue=said.number("overdue"),
        kept_until=said.number("kept_until"),
        guest_of=0.0 if said.truth("is_guest") else None,
        beside=said.text("beside"),
        seen=confirmed,
        confirmed=confirmed,
        elsewhere=said.truth("elsewhere") is True,
        last_cell=said.number("last_cell"),
        command=said.text("command"),
        cwd=said.text("cwd"),
        used_mib=said.number("memory_used_mib"),
    )


def _ticket(said: _Fields) -> Ticket:
    return Ticket(0, "", frozenset(said.texts("wants")), _holder(said), said.text("asks"))
