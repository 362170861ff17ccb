"""Render the status as Prometheus metrics for node_exporter's textfile collector.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
Names and units: https://prometheus.io/docs/practices/naming/

An unknown value has no sample, so it neither triggers an alert nor shows up as a zero in a graph.
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
UNKNOWN_USER = "somebody"  # `username` label of a holder whose user is unknown

# Per-device metrics: the name, the help text, and a function that returns the value or None.
DEVICE_GAUGES: tuple[Gauge, ...] = (
    ("free", "Whether the device is idle and not reserved.",
          lambda row: None if row.state is State.UNKNOWN else row.state is State.FREE),
    ("used_without_reservation", "Whether a process is using the device without a reservation.",
          lambda row: row.is_unreserved_use if row.usage else None),
    ("broken", "Whether the driver can't use the device.", lambda row: row.state is State.BROKEN),
    ("memory_used_bytes", "Device memory in use.",
          lambda row: _bytes(row.usage and row.usage.used_mib)),
    ("memory_total_bytes", "Total memory of the device.",
          lambda row: _bytes(row.device.memory_mib if isinstance(row.device, Device) else None)),
    ("memory_promisable_bytes", "Device memory still available for partial reservations.",
          lambda row: _bytes(row.promisable_mib)),
    ("utilization_ratio", "Recent utilization of the device, from 0 to 1.",
          lambda row: None if row.utilisation is None else row.utilisation / 100),
)  # fmt: skip
# Per-GPU metrics. MIG instances share their GPU's sensors, so one sample per instance would inflate
# sums.
GPU_GAUGES: tuple[Gauge, ...] = (
    ("temperature_celsius", "Temperature of the GPU.", lambda row: row.temperature_c),
    ("power_usage_watts", "Power draw of the GPU.", lambda row: row.power_w),
    ("power_limit_watts", "Power limit of the GPU.",
          lambda row: row.power_limit_w),
)  # fmt: skip

# Metrics for each device and each user who reserved it. The last item is a function that merges the
# values from the user's processes.
USER_GAUGES: tuple[GaugeOfUser, ...] = (
    ("user_memory_promised_bytes", "Device memory in the user's reservations of parts of a GPU.",
     lambda holder, _: _bytes(_promised_mib(holder)), sum),
    ("user_memory_used_bytes",
     "Device memory used by those of the user's processes that have a reservation.",
     lambda holder, _: _bytes(holder.used_mib), sum),
    ("until_timestamp_seconds", "Time at which the user's last reservation of the device ends.",
     durations.end, max),
    ("kept_until_timestamp_seconds",
     "Time until which the device is kept for a restart of the user's kernel.",
     lambda holder, now: holder.record.kept_until if holder.is_kept(now) else None, max),
    ("overdue_seconds",
     "Time for which the user has held the device past the reservation's end time; 0 before that.",
     lambda holder, now: now - (durations.overdue_since(holder, now) or now), max),
)  # fmt: skip


def text(result: Status | Hosts) -> str:
    """Return the metrics for one or more machines."""
    hosts = [({"hostname": each.host}, each) for each in result.machines]
    rows = [({**host, **_labels(row)}, row, each) for host, each in hosts for row in each.rows]
    gpus = {
        (each.host, row.device.index): ({**host, **_gpu_labels(row)}, row, each)
        for host, each in hosts
        # Reading the usage of a single MIG instance can fail. Sort rows with a known usage last,
        # because the last row for each GPU wins.
        for row in sorted(each.rows, key=lambda row: row.usage is not None)
    }
    families = [_family("info", "Properties of the device, as labels; the value is always 1.", [
        ({**labels, **_properties(row)}, 1) for labels, row, _ in rows
    ])]  # fmt: skip
    for gauges, sources in ((DEVICE_GAUGES, rows), (GPU_GAUGES, gpus.values())):
        families += [
            _family(name, about, [(labels, read(row)) for labels, row, _ in sources])
            for name, about, read in gauges
        ]
    families += [
        _family("reserved", "Number of the user's processes that have reserved the device; "
                "0 with an empty username if there are none.",
                [sample for each in rows for sample in _reserved(*each)]),
        *(_family(name, about,
                  [sample for each in rows for sample in _by_user(*each, read, merge)])
          for name, about, read, merge in USER_GAUGES),
        _family("idle_seconds", "Time since the holder's last cell or, if it has run none, since "
                "the start of the reservation; 0 while the holder is using the device.",
                [sample for each in rows for sample in _idle(*each)]),
        _family("waiting", "Number of the user's processes in the queue; "
                "0 with an empty username if there are none.",
                [sample for each in hosts for sample in _waiting(*each)]),
    ]  # fmt: skip
    return "".join(families)


def _family(name: str, about: str, samples: list[Sample]) -> str:
    """Return a metric with its samples, or an empty string if it has no samples."""
    name = f"reserve_gpu_{name}"
    lines = [
        f"{name}{{{_in_braces(labels)}}} {float(value):.15g}\n"
        for labels, value in samples
        if value is not None
    ]
    return "".join([f"# HELP {name} {about}\n# TYPE {name} gauge\n", *lines]) if lines else ""


def _promised_mib(holder: Holder) -> float | None:
    """Return the size, in MiB, of the part of a GPU that a holder reserved.

    The result is 0 for a process that joined another process's partial reservation, so that the
    memory is not counted twice. It is None for a whole GPU.
    """
    return 0.0 if holder.beside and holder.memory_limit_mib else holder.memory_limit_mib


def _in_braces(labels: Labels) -> str:
    # Some values are untrusted. Sanitizing them also removes line breaks.
    return ",".join(
        f'{name}="{sanitize(value).translate(ESCAPES)}"' for name, value in labels.items()
    )


def _labels(row: DeviceStatus) -> Labels:
    uuid = row.device.uuid if isinstance(row.device, Device) else ""
    return {"index": row.device.number, "uuid": uuid}


def _gpu_labels(row: DeviceStatus) -> Labels:
    device = row.device if isinstance(row.device, Device) else None
    uuid = (device.gpu_uuid or device.uuid) if device else ""
    return {"index": str(row.device.index), "uuid": uuid}


def _properties(row: DeviceStatus) -> Labels:
    name = row.device.name if isinstance(row.device, Device) else None
    return {"devicename": name or "", "gpu_uuid": _gpu_labels(row)["uuid"]}


def _reserved(labels: Labels, row: DeviceStatus, status: Status) -> Iterator[Sample]:
    is_read = None not in (row.usage, row.is_unreserved_use) and row.state is not State.UNKNOWN
    return _counts(labels, row.holders, is_complete=is_read and not status.problem)


def _idle(labels: Labels, row: DeviceStatus, status: Status) -> Iterator[Sample]:
    seconds = idle_s(row, status.time) if row.is_unused else 0
    for user in dict.fromkeys(map(_user, row.holders)) if row.is_unused is not None else ():
        yield {**labels, "username": user}, seconds


def _waiting(labels: Labels, status: Status) -> Iterator[Sample]:
    holders = [ticket.holder for ticket in status.waiting]
    return _counts(labels, holders, is_complete=not status.problem)


def _counts(labels: Labels, holders: Iterable[Holder], *, is_complete: bool) -> Iterator[Sample]:
    """Yield each user's number of processes, or 0 with an empty username if there are none.

    Args:
        labels: The labels of the device or host.
        holders: The processes to count.
        is_complete: Whether all processes are known. If some are unknown, no zero is reported.
    """
    users = Counter(map(_user, holders))
    if not users and is_complete:
        users[""] = 0
    for user, count in users.items():
        yield {**labels, "username": user}, count


def _by_user(
    labels: Labels,
    row: DeviceStatus,
    status: Status,
    read: Callable[[Holder, float], float | None],
    merge: Callable[[list[float]], float],
) -> Iterator[Sample]:
    """Yield one merged value per user. Skip users with a process whose value is unknown."""
    for user in dict.fromkeys(map(_user, row.holders)):
        values = [read(holder, status.time) for holder in row.holders if _user(holder) == user]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            yield {**labels, "username": user}, merge(known)


def _user(holder: Holder) -> str:
    return sanitize(holder.user or UNKNOWN_USER)


def _bytes(mib: float | None) -> float | None:
    return None if mib is None else mib * MIB
