"""The status as metrics, for the textfile collector of Prometheus' node_exporter.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/. Names and units:
https://prometheus.io/docs/practices/naming/. What is not known has no sample: a rule that asks for
it does not fire, and no graph shows a zero.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from reserve_gpu.model.devices import MIB, Device, State
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations
from reserve_gpu.render.layout import idle_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from reserve_gpu.commands.hosts.hosts_view import Hosts
    from reserve_gpu.model.holders import DeviceStatus, Holder
    from reserve_gpu.render.status_view import Status

    Labels = Mapping[str, str]
    Sample = tuple[Labels, float | None]
    Gauge = tuple[str, str, Callable[[DeviceStatus], float | None]]
    GaugeOfUser = tuple[
        str, str, Callable[[Holder, float], float | None], Callable[[list[float]], float]
    ]

ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
SOMEBODY = "somebody"  # whose name is not known; nobody has the name ""


# One metric of every device: its name, what it is, and what reads it, None where it is not known.
OF_DEVICE: tuple[Gauge, ...] = (
    ("free", "Whether it is idle and nobody has reserved it.",
          lambda row: None if row.state is State.UNKNOWN else row.state is State.FREE),
    ("used_without_reservation", "Whether somebody uses it who has not reserved it.",
          lambda row: row.is_unreserved_use if row.usage else None),
    ("broken", "Whether the driver can't use it.", lambda row: row.state is State.BROKEN),
    ("memory_used_bytes", "Memory in use.",
          lambda row: _bytes(row.usage and row.usage.used_mib)),
    ("memory_total_bytes", "Memory that it has.",
          lambda row: _bytes(row.device.memory_mib if isinstance(row.device, Device) else None)),
    ("memory_promisable_bytes", "Memory of which a part can still be promised.",
          lambda row: _bytes(row.promisable_mib)),
    ("utilization_ratio", "Share of the time in which it was busy lately, 0 to 1.",
          lambda row: None if row.utilisation is None else row.utilisation / 100),
)  # fmt: skip
# An instance has its GPU's: of each GPU there is one sample, else a sum would be too large.
OF_BOARD: tuple[Gauge, ...] = (
    ("temperature_celsius", "Temperature of the GPU.", lambda row: row.temperature_c),
    ("power_usage_watts", "Power that the GPU draws.", lambda row: row.power_w),
    ("power_limit_watts", "Power above which the GPU is slowed down.",
          lambda row: row.power_limit_w),
)  # fmt: skip


# The same of a user's reservations of a device; the last one sums up those of several processes.
OF_USER: tuple[GaugeOfUser, ...] = (
    ("user_memory_promised_bytes", "Memory of parts that a user has reserved of it.",
     lambda holder, _: _bytes(_promised_mib(holder)), sum),
    ("user_memory_used_bytes", "Memory that those use of it who have reserved it.",
     lambda holder, _: _bytes(holder.used_mib), sum),
    ("until_timestamp_seconds", "When the last reservation of a user of it is to end.",
     durations.end, max),
    ("kept_until_timestamp_seconds", "Until when it is kept for a kernel's restart.",
     lambda holder, now: holder.record.kept_until if holder.is_kept(now) else None, max),
    ("overdue_seconds", "For how long a user has had it past that end; 0 before.",
     lambda holder, now: now - (durations.overdue_since(holder, now) or now), max),
)  # fmt: skip


def text(seen: Status | Hosts) -> str:
    """Return the metrics of machines."""
    hosts = [({"hostname": each.host}, each) for each in seen.machines]
    rows = [({**host, **_labels(row)}, row, each) for host, each in hosts for row in each.rows]
    boards = {
        (each.host, row.device.index): ({**host, **_board_labels(row)}, row, each)
        for host, each in hosts
        # What was read comes last, and stays: instances fail singly.
        for row in sorted(each.rows, key=lambda row: row.usage is not None)
    }
    families = [_family("info", "What it is; always 1.", [
        ({**labels, **_about(row)}, 1) for labels, row, _ in rows
    ])]  # fmt: skip
    for gauges, those in ((OF_DEVICE, rows), (OF_BOARD, boards.values())):
        families += [
            _family(name, about, [(labels, read(row)) for labels, row, _ in those])
            for name, about, read in gauges
        ]
    families += [
        _family("reserved", "How many processes of a user have it reserved; 0 without a user.",
                [sample for each in rows for sample in _reserved(*each)]),
        *(_family(name, about,
                  [sample for each in rows for sample in _of_each_user(*each, read, total)])
          for name, about, read, total in OF_USER),
        _family("idle_seconds", "For how long nothing of its holder's has run on it; 0 if it does.",
                [sample for each in rows for sample in _idle(*each)]),
        _family("waiting", "How many processes of a user wait in the queue; 0 without a user.",
                [sample for each in hosts for sample in _waiting(*each)]),
    ]  # fmt: skip
    return "".join(families)


def _family(name: str, about: str, samples: list[Sample]) -> str:
    """Return a metric with its samples, nothing without any."""
    name = f"reserve_gpu_{name}"
    lines = [
        f"{name}{{{_in_braces(labels)}}} {float(value):.15g}\n"
        for labels, value in samples
        if value is not None
    ]
    return "".join([f"# HELP {name} {about}\n# TYPE {name} gauge\n", *lines]) if lines else ""


def _promised_mib(holder: Holder) -> float | None:
    """Return the part of a device, 0 for one that another holder counts already."""
    return 0.0 if holder.beside and holder.memory_limit_mib else holder.memory_limit_mib


def _in_braces(labels: Labels) -> str:
    # Fit to print first, as others have written some: that leaves no line break to escape but ours.
    return ",".join(
        f'{name}="{sanitize(value).translate(ESCAPES)}"' for name, value in labels.items()
    )


def _labels(row: DeviceStatus) -> Labels:
    uuid = row.device.uuid if isinstance(row.device, Device) else ""
    return {"index": row.device.number, "uuid": uuid}


def _board_labels(row: DeviceStatus) -> Labels:
    device = row.device if isinstance(row.device, Device) else None
    uuid = (device.gpu_uuid or device.uuid) if device else ""
    return {"index": str(row.device.index), "uuid": uuid}


def _about(row: DeviceStatus) -> Labels:
    name = row.device.name if isinstance(row.device, Device) else None
    return {"devicename": name or "", "gpu_uuid": _board_labels(row)["uuid"]}


def _reserved(labels: Labels, row: DeviceStatus, status: Status) -> Iterator[Sample]:
    is_read = None not in (row.usage, row.is_unreserved_use) and row.state is not State.UNKNOWN
    return _by_user(labels, row.holders, is_all=is_read and not status.problem)


def _idle(labels: Labels, row: DeviceStatus, status: Status) -> Iterator[Sample]:
    seconds = idle_s(row, status.time) if row.is_unused else 0
    for user in dict.fromkeys(map(_user, row.holders)) if row.is_unused is not None else ():
        yield {**labels, "username": user}, seconds


def _waiting(labels: Labels, status: Status) -> Iterator[Sample]:
    holders = [ticket.holder for ticket in status.waiting]
    return _by_user(labels, holders, is_all=not status.problem)


def _by_user(labels: Labels, holders: Iterable[Holder], *, is_all: bool) -> Iterator[Sample]:
    """Count the processes of each user; 0 without a user if there is none. is_all: it is known."""
    users = Counter(map(_user, holders))
    if not users and is_all:
        users[""] = 0
    for user, count in users.items():
        yield {**labels, "username": user}, count


def _of_each_user(
    labels: Labels,
    row: DeviceStatus,
    status: Status,
    read: Callable[[Holder, float], float | None],
    total: Callable[[list[float]], float],
) -> Iterator[Sample]:
    """Return the sum over a user's processes, where the value of each is known."""
    for user in dict.fromkeys(map(_user, row.holders)):
        values = [read(holder, status.time) for holder in row.holders if _user(holder) == user]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            yield {**labels, "username": user}, total(known)


def _user(holder: Holder) -> str:
    return sanitize(holder.user or SOMEBODY)


def _bytes(mib: float | None) -> float | None:
    return None if mib is None else mib * MIB
