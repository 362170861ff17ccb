"""The record that a process writes into its lock file, for others to read.

The only place that writes or reads that JSON, so all suspicion of foreign words stands here: a
record may be truncated, binary, huge or forged. What makes no sense is left out.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from reserve_gpu import host
from reserve_gpu.model import UNITS, Lease, Promise, Size, Who

T = TypeVar("T")

BYTES_LIMIT = 1 << 16  # what is longer was not written by us
TEXT_LIMIT = 300  # characters of each text
MOST_WANTED = 1024  # devices that a waiter names
MOST_MIB = 1e9  # no device has more memory than that
LATEST_S = 1e11  # no time since the epoch is later
PIDS = 1 << 31


class Asks(NamedTuple):
    """What somebody waits for.

    text: in words. needs: how many devices at once.
    wants: UUIDs of the devices that would do, None for any.
    """

    text: str | None = None
    needs: int = 1
    wants: frozenset[str] | None = None


class Record(NamedTuple):
    """What a holder or a waiter says of itself.

    since: when it took the lock. written: when it wrote this. Both in seconds since the epoch.
    label, index: of the device. visible: its CUDA_VISIBLE_DEVICES.
    overdue: since when its reservation should have ended, where it has not.
    kept_until: for how long it is kept for the restart of its kernel.
    guest_of: of a guest, since when the holder that it has joined has the device.
    is_alone: that holder shares it with nobody.
    """

    who: Who = Who()
    promise: Promise = Promise()
    asks: Asks | None = None
    since: float | None = None
    written: float | None = None
    label: str | None = None
    index: int | None = None  # type: ignore[assignment] # a tuple has a method of that name
    visible: str | None = None
    overdue: float | None = None
    kept_until: float | None = None
    guest_of: float | None = None
    is_alone: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON takes it, without what is not known."""
        size, lease, asks = self.promise.size, self.promise.lease, self.asks
        fields = {
            **self.who._asdict(),
            "note": self.promise.note,
            **({"part_mib": size.mib, "part_unit": size.unit} if size else {}),
            **(lease._asdict() if lease.has_end else {}),
            **({"asks": asks.text, "needs": asks.needs} if asks else {}),
            **({"wants": sorted(asks.wants)} if asks and asks.wants is not None else {}),
            **{name: getattr(self, name) for name in _OF_THE_LOCK},
        }
        texts = {k: v[:TEXT_LIMIT] if isinstance(v, str) else v for k, v in fields.items()}
        return {name: value for name, value in texts.items() if value is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Record":
        """Return what somebody wrote, as far as it makes sense."""

        def get(name: str, read: Callable[[Any], T]) -> T:
            return read(fields.get(name))

        part_mib, unit = get("part_mib", _part), get("part_unit", _text)
        size = part_mib and Size(part_mib, unit if unit in UNITS else "GiB")
        lease = Lease(
            until=get("until", _moment),
            idle_s=get("idle_s", _moment),
            **{name: fields.get(name) is True for name in ("if_wanted", "end_kernel", "is_strict")},
        )
        return cls(
            who=Who(
                pid=get("pid", _pid),
                namespace=get("namespace", _integer),
                **{
                    name: get(name, _text)
                    for name in ("user", "notebook", "command", "cwd", "origin")
                },
            ),
            promise=Promise(size or None, lease, get("note", _text)),
            asks=Asks(get("asks", _text), get("needs", _integer) or 1, get("wants", _uuids)),
            since=get("since", _moment),
            written=get("written", _moment),
            label=get("label", _text),
            index=get("index", _integer),
            visible=get("visible", _text),
            overdue=get("overdue", _moment),
            kept_until=get("kept_until", _moment),
            guest_of=get("guest_of", _moment),
            is_alone=fields.get("is_alone") is True or None,
        )


def myself() -> Who:
    """Return what this process says of itself to those who find a device reserved.

    Whoever can see this process goes by the system's word for its user, so here the variable that
    the login has set is enough.
    """
    title = host.title()
    return Who(
        user=os.environ.get("LOGNAME") or host.user_of(os.getpid()),
        # An engine inherits the variable of the notebook that has started it.
        notebook=None if title else host.notebook(),
        command=title or host.own_command(),
        cwd=host.working_directory(),
        pid=os.getpid(),
        namespace=host.pid_namespace(),
        origin=host.origin(),
    )


_OF_THE_LOCK = (
    *("since", "written", "label", "index", "visible", "overdue", "kept_until"),
    *("guest_of", "is_alone"),
)


def read(descriptor: int) -> Record:
    """Return the record in an open lock file, an empty one where it is none of ours."""
    return Record.from_dict(_fields(descriptor))


def write(descriptor: int, record: Record) -> None:
    """Write the record into an open lock file that does not say the same already.

    On a full disk the record is lost.
    """
    fields = record.to_dict()
    if _without_times(fields) == _without_times(_fields(descriptor)):
        return
    data = json.dumps(fields).encode()
    with suppress(OSError):
        try:
            # Cover a longer record first: a reader must not find the rest of it behind this one.
            data = data.ljust(min(os.fstat(descriptor).st_size, BYTES_LIMIT))
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        except OSError:
            os.ftruncate(descriptor, 0)


def _fields(descriptor: int) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        data = os.pread(descriptor, BYTES_LIMIT + 1, 0)
        fields = json.loads(data) if len(data) <= BYTES_LIMIT else None
        if isinstance(fields, dict):
            return fields
    return {}


def _without_times(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in ("since", "written")}


def _text(value: Any) -> str | None:
    return value[:TEXT_LIMIT] if isinstance(value, str) else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _pid(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < PIDS else None


def _part(value: Any) -> float | None:
    return _number(value, MOST_MIB)


def _moment(value: Any) -> float | None:
    return _number(value, LATEST_S)


def _number(value: Any, limit: float) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < limit else None


def _uuids(value: Any) -> frozenset[str] | None:
    if not isinstance(value, list):
        return None
    return frozenset(uuid for uuid in value[:MOST_WANTED] if isinstance(uuid, str))
