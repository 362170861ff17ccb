"""Encode and decode the lines of a history.

A history has one line for each hour of a device's reservation, and one line for each wait. Only
this module encodes and decodes the lines' JSON. Users can write anything to their own history, so
lines are untrusted, and invalid lines are ignored.
"""

import time
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from reserve_gpu.model import untrusted
from reserve_gpu.model.requests import End
from reserve_gpu.model.untrusted import LATEST_S, MOST_MIB, number, text

LINE_LIMIT = 4096  # maximum length of a line in bytes, including its line break
TEXT_LIMIT = 200  # maximum length of each string, in characters
# Maximum number of seconds that a line can cover. A line usually covers an hour, but it covers more
# if the reservation's process was suspended for a long time.
LONGEST_S = 32 * 86400.0


class Kind(Enum):
    """The kind of event that a line describes."""

    RESERVED = "reserved"  # a reservation of one device
    WAITED = "waited"  # a wait in the queue


_KINDS = {kind.value: kind for kind in Kind}  # a dict lookup is faster than calling Kind()
_ENDS = {end.value: end for end in End}


class LogLine(NamedTuple):
    """A history line that covers either up to one hour of a device's reservation or an entire wait.

    Times are in seconds since the epoch. None means that a value is unknown or does not apply.

    Attributes:
        kind: Whether the line describes a reservation or a wait.
        id: The ID of the reservation or the wait.
        since: The start of the reservation or the wait.
        start: The start of the period that the line covers.
        end: The end of that period.
        seconds: The length of that period in seconds, excluding any time when the machine was
            suspended.
        used_s: The seconds during which the reservation's processes used the device.
        idle_s: The seconds during which the reservation's processes did not use the device. For the
            rest of the period, it is unknown whether they used it.
        over_s: The seconds during which the reservation exceeded its part of the GPU or was
            overdue.
        gpu: The UUID of the device.
        label: The device's display name, such as `GPU2`.
        share: The reserved share of a whole GPU's memory, from 0 to 1.
        mib: The peak memory use of the reservation's processes, in MiB.
        percent: The device's mean utilization by the reservation's processes, in percent.
        name: The name of the notebook or the command.
        note: The note for other users.
        asks: For a wait, the request as text.
        part_mib: The size of the reserved part of a GPU in MiB.
        until: The lease's end time.
        idle_limit_s: The lease's idle limit in seconds.
        how: Why the reservation or wait ended. This is set only on its last line.
        agent: The name of the program that acted on the user's behalf.
        job: The ID of the batch job.
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
        """Return the line as JSON, without fields that are None.

        Strings are truncated so that the line is not longer than `LINE_LIMIT`.
        """
        fields = {name: _plain(value) for name, value in self._asdict().items()}
        known_fields = {name: value for name, value in fields.items() if value is not None}
        return untrusted.encoded(known_fields, LINE_LIMIT - len("\n")).decode()


def month(at: float) -> str:
    """Return the local month of a time in the format of the file names, such as `2026-11`.

    Args:
        at: The time in seconds since the epoch.
    """
    return time.strftime("%Y-%m", time.localtime(at))


def parsed(line: bytes) -> LogLine | None:
    """Parse a history line, or return None if the line is invalid."""
    try:
        fields = untrusted.parsed(line, LINE_LIMIT)
        return _entry(fields) if isinstance(fields, dict) else None
    except (ValueError, TypeError, KeyError):
        return None


def _entry(fields: Mapping[str, Any]) -> LogLine | None:
    """Build a line from its fields.

    Raise KeyError, TypeError or ValueError if a field is missing or invalid.
    """
    kind, get = _KINDS[fields["kind"]], fields.get
    longest_s = LATEST_S if kind is Kind.WAITED else LONGEST_S
    return LogLine(
        kind,
        text(fields["id"]),
        number(fields["since"]),
        number(fields["start"]),
        number(fields["end"]),
        seconds := number(fields["seconds"], longest_s),
        # The checks for None are inline because function calls are slower, and a year's history can
        # have 100,000 lines.
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
