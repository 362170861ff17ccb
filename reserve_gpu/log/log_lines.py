"""One line of a history: what a reservation of one device came to in an hour, or a wait.

The only place that writes or reads that JSON. A user's lines are that user's word: what makes no
sense is no line.
"""

import time
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from reserve_gpu.model import untrusted
from reserve_gpu.model.requests import End
from reserve_gpu.model.untrusted import LATEST_S, MOST_MIB, number, text

LINE_LIMIT = 4096  # bytes with the line end; what is longer was not written by us
TEXT_LIMIT = 200  # characters of each text that is written
LONGEST_S = 32 * 86400.0  # of one line: an hour, unless its process was stopped for long


class Kind(Enum):
    """What a line is about."""

    RESERVED = "reserved"  # a device
    WAITED = "waited"  # in the queue


_KINDS = {kind.value: kind for kind in Kind}  # asked for faster than the Enum itself
_ENDS = {end.value: end for end in End}


class LogLine(NamedTuple):
    """One line.

    id: of the reservation, or the wait. since: when that began.
    start, end: of what this line tells of, by the clock on the wall. seconds: how long that was, by
    the clock that stands still while the machine sleeps.
    used_s, idle_s: for how long its own processes used the device, and did not; the rest could not
    be read. over_s: for how long it used more than its part, or should have ended.
    gpu: the device's UUID. share: of a whole GPU, by memory, 0 to 1.
    mib: the most memory that its own processes used. percent: their mean utilisation.
    name: the notebook, or the command. asks: of a wait, for what. agent, job: as in `ProcessInfo`.
    until, idle_limit_s: of the lease. how: how it has ended, if this is its last line.
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
        """Return the line, without unknown fields. The longest texts are cut to fit the limit."""
        fields = {name: _plain(value) for name, value in self._asdict().items()}
        known = {name: value for name, value in fields.items() if value is not None}
        return untrusted.encoded(known, LINE_LIMIT - len("\n")).decode()


def month(at: float) -> str:
    """Return the month of that moment, as files are named for it; in local time."""
    return time.strftime("%Y-%m", time.localtime(at))


def parsed(line: bytes) -> LogLine | None:
    """Return what a line says; None if it is none of ours."""
    try:
        fields = untrusted.parsed(line, LINE_LIMIT)
        return _entry(fields) if isinstance(fields, dict) else None
    except (ValueError, TypeError, KeyError):
        return None


def _entry(fields: Mapping[str, Any]) -> LogLine | None:
    """Return the entry. Raises KeyError, TypeError and ValueError for what makes no sense."""
    kind, get = _KINDS[fields["kind"]], fields.get
    longest_s = LATEST_S if kind is Kind.WAITED else LONGEST_S
    return LogLine(
        kind,
        text(fields["id"]),
        number(fields["since"]),
        number(fields["start"]),
        number(fields["end"]),
        seconds := number(fields["seconds"], longest_s),
        # Asked here, as a call takes longer, and a year has 100,000 lines.
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
