"""The lines of a history: one per hour of a reserved device, and one per wait.

Only this module encodes and decodes their JSON. Users write their own lines, so the lines are
untrusted and invalid ones are ignored.
"""

import time
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from reserve_gpu.model import untrusted
from reserve_gpu.model.requests import End
from reserve_gpu.model.untrusted import LATEST_S, MOST_MIB, number, text

LINE_LIMIT = 4096  # maximum bytes of a line, including its line break
TEXT_LIMIT = 200  # maximum length of each string, in characters
# Maximum seconds that a line covers. A line usually covers an hour, but more if its process was
# stopped for a long time.
LONGEST_S = 32 * 86400.0


class Kind(Enum):
    """The kind of a line."""

    RESERVED = "reserved"  # a reservation of one device
    WAITED = "waited"  # a wait in the queue


_KINDS = {kind.value: kind for kind in Kind}  # a dict is faster than calling the Enum
_ENDS = {end.value: end for end in End}


class LogLine(NamedTuple):
    """One line of a history: an hour of a reserved device, or a wait.

    Times are in seconds since the epoch. None means that a value is unknown or does not apply.

    Attributes:
        kind: Whether the line describes a reservation or a wait.
        id: The ID of the reservation or the wait.
        since: The start of the reservation or the wait.
        start: The start of the period that the line covers.
        end: The end of that period.
        seconds: The length of that period in seconds, without the time in which the machine was
            suspended.
        used_s: Seconds in which the reservation's processes used the device.
        idle_s: Seconds in which they did not use it. The use in the remaining time is unknown.
        over_s: Seconds in which the reservation exceeded its part of the GPU, or was overdue.
        gpu: The UUID of the device.
        label: The displayed name of the device, such as `GPU2`.
        share: The reserved share of a whole GPU's memory, from 0 to 1.
        mib: The peak memory of the reservation's processes in MiB.
        percent: The mean utilization of the device by these processes, in percent.
        name: The notebook or the command.
        note: The note for other users.
        asks: The request of a wait, as text.
        part_mib: The size of a reserved part of a GPU in MiB.
        until: The end of the lease.
        idle_limit_s: The idle limit of the lease in seconds.
        how: The way in which the reservation or the wait ended, if this is its last line.
        agent: The name of the program that acted for the user.
        job: The ID of the batch system's job.
    """

    kind: Kind
    id: str
    since: float
    start: float
    end: float
    seconds: float = 0.0
    used_s: float | None = None
    idle_s: float | None = None
    over_s: float | None = None
    gpu: str | None = None
    label: str | None = None
    share: float = 1.0
    mib: float | None = None
    percent: float | None = None
    name: str | None = None
    note: str | None = None
    asks: str | None = None
    part_mib: float | None = None
    until: float | None = None
    idle_limit_s: float | None = None
    how: End | None = None
    agent: str | None = None
    job: str | None = None

    def to_json(self) -> str:
        """Return the line as JSON without unknown fields; truncate strings to fit `LINE_LIMIT`."""
        fields = {name: _plain(value) for name, value in self._asdict().items()}
        known_fields = {name: value for name, value in fields.items() if value is not None}
        return untrusted.encoded(known_fields, LINE_LIMIT - len("\n")).decode()


def month(at: float) -> str:
    """Return the local month of a time in seconds since the epoch, as in file names: `2026-11`."""
    return time.strftime("%Y-%m", time.localtime(at))


def parsed(line: bytes) -> LogLine | None:
    """Parse a line of a history, or return None if the line is invalid."""
    try:
        fields = untrusted.parsed(line, LINE_LIMIT)
        return _entry(fields) if isinstance(fields, dict) else None
    except (ValueError, TypeError, KeyError):
        return None


def _entry(fields: Mapping[str, Any]) -> LogLine | None:
    """Return the entry. Raises KeyError, TypeError or ValueError if a field is invalid."""
    kind, get = _KINDS[fields["kind"]], fields.get
    longest_s = LATEST_S if kind is Kind.WAITED else LONGEST_S
    return LogLine(
        kind,
        text(fields["id"]),
        number(fields["since"]),
        number(fields["start"]),
        number(fields["end"]),
        seconds := number(fields["seconds"], longest_s),
        # None is tested inline because a function call is slower, and a year's history has 100,000
        # lines.
        None if (used_s := get("used_s")) is None else number(used_s, seconds),
        None if (idle_s := get("idle_s")) is None else number(idle_s, seconds),
        None if (over_s := get("over_s")) is None else number(over_s, seconds),
        None if (gpu := get("gpu")) is None else text(gpu),
        None if (label := get("label")) is None else text(label),
        number(get("share", 1.0), 1.0),
        None if (mib := get("mib")) is None else number(mib, MOST_MIB),
        None if (percent := get("percent")) is None else number(percent, 100.0),
        None if (name := get("name")) is None else text(name),
        None if (note := get("note")) is None else text(note),
        None if (asks := get("asks")) is None else text(asks),
        None if (part_mib := get("part_mib")) is None else number(part_mib, MOST_MIB),
        None if (until := get("until")) is None else number(until),
        None if (idle_limit_s := get("idle_limit_s")) is None else number(idle_limit_s),
        None if (how := get("how")) is None else _ENDS[how],
        None if (agent := get("agent")) is None else text(agent),
        None if (job := get("job")) is None else text(job),
    )


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value[:TEXT_LIMIT]
    if isinstance(value, float):
        return round(value, 3)
    return value
