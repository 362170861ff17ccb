"""Quotas: the number of devices and the time that the administrator's rules allow a user.

The caller counts the user's devices under the mutex, from facts that the kernel provides. This
module is imported only if there are rules.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from reserve_gpu.gpus import names
from reserve_gpu.locks.directory import device_of, lock_name
from reserve_gpu.model.devices import Device, Fault, State
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.render import notices as notice

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from reserve_gpu.model.clocks import Instant
    from reserve_gpu.model.requests import Lease, Request, Rules


def allowed(
    request: Request, ruled: Rules, held: Lease, since: Instant | None, now: Instant
) -> tuple[Request, list[str]]:
    """Return the request with its lease limited by the rules, and notices for the user.

    Args:
        request: The request.
        ruled: The rules for this user.
        held: The lease of the requested devices, if this process already holds them.
        since: The time at which this process reserved the devices, or None if it doesn't hold them.
        now: The current time.

    Raises:
        RequestError: The rules don't allow the requested lease.
    """
    _require_lease(request.terms.lease, ruled, now.wall)
    if since is None or not request.terms.lease.has_end:
        return request, []
    has_end = request.terms.lease.lasts_s is not None or request.terms.lease.until is not None
    held = held.own
    ends = lease(held.at(now).changed_by(request.terms.lease.begun(now)), ruled).begun(now)
    is_unchanged = held.until is not None and not has_end
    last = counted(ends, ruled, since, now)
    if not ruled.time or is_unchanged or last == ends:
        return _with_lease(request, ends), []
    if last.until is None or last.until <= now.wall:
        raise notice.cannot_extend(ruled.time, since.at(now).later(ruled.time.value).wall)
    notices = [notice.shortened(ruled.time, last.until)] if has_end else []
    return _with_lease(request, last), notices


def counted(ends: Lease, ruled: Rules, since: Instant, now: Instant) -> Lease:
    """Return a started lease, shortened to the time that the rules allow.

    The time limit counts from the start of the reservation. Otherwise, a user could hold a device
    forever by extending the lease every day, or by adding devices to the reservation.

    Args:
        ends: The lease.
        ruled: The rules for this user.
        since: The start of the reservation.
        now: The current time.
    """
    if ends.until is None or not ruled.time:
        return ends
    latest = since.at(now).later(ruled.time.value)
    return ends if ends.until <= latest.wall else ends.ending(latest)


def left_s(ruled: Rules, since: Instant, now: Instant) -> float:
    """Return the seconds until the time limit of the rules, or infinity if there is none."""
    return since.boot + ruled.time.value - now.boot if ruled.time else inf


def lease(requested: Lease, ruled: Rules) -> Lease:
    """Return a requested lease with the limits of the rules applied.

    Only an end that comes from the administrator's rules may interrupt a running cell.

    Args:
        requested: The requested lease.
        ruled: The rules for this user.
    """
    is_ruled = ruled.time is not None and requested.lasts_s is None and requested.until is None
    if ruled.time and is_ruled:
        requested = requested._replace(lasts_s=ruled.time.value)
    if ruled.idle and requested.idle_s is None:
        requested = requested._replace(idle_s=ruled.idle.value)
    if requested.has_end and ruled.after_cuda and not ruled.after_cuda.value:
        requested = requested._replace(end_kernel=True, is_strict=is_ruled)
    return requested


def build_check(
    ruled: Rules,
    request: Request,
    devices: Sequence[Device | Fault],
    own: Collection[str],
    elsewhere: Sequence[Holder],
) -> Callable[[Device], DeviceStatus | None]:
    """Return a function that checks whether the rules allow this user a device.

    The function returns the state of a denied device, and None for an allowed device. Several parts
    of one GPU count as one GPU.

    Args:
        ruled: The rules for this user.
        request: The request.
        devices: The candidates for the request.
        own: The UUIDs of the devices that this process already holds.
        elsewhere: The user's other processes that hold a device.
    """
    held = {device_of(holder.file or "") for holder in elsewhere}
    places = {_file_prefix(device) for device in devices if isinstance(device, Device)}
    added = len(places - held) if request.devices else request.needed
    is_full = ruled.gpus is not None and len(held) + added > ruled.gpus.value

    def check(device: Device) -> DeviceStatus | None:
        if device.uuid not in own and names.is_one_of(device, ruled.drained):
            return DeviceStatus(device, State.DRAINED, rule=ruled.drain)
        if is_full and device.uuid not in own and _file_prefix(device) not in held:
            return DeviceStatus(device, State.LIMITED, rule=ruled.gpus, counted=tuple(elsewhere))
        return None

    return check


def _with_lease(request: Request, lease: Lease) -> Request:
    return request._replace(terms=request.terms._replace(lease=lease))


def _require_lease(requested: Lease, ruled: Rules, at: float) -> None:
    """Raise RequestError if the requested lease is longer than the rules allow."""
    if requested.if_wanted and (rule := ruled.time or ruled.idle):
        raise notice.ends_anyway(rule)
    lasts_s = requested.lasts_s if requested.until is None else requested.until - at
    for rule, requested_s in ((ruled.time, lasts_s), (ruled.idle, requested.idle_s)):
        if rule and requested_s is not None and requested_s > rule.value:
            raise notice.too_long(rule, requested_s)


def require_amount(request: Request, ruled: Rules) -> None:
    """Raise ImpossibleError if the request is for more GPUs than the rules ever allow."""
    if ruled.gpus and request.needed > ruled.gpus.value:
        raise notice.too_many(ruled.gpus, request)


def _file_prefix(device: Device) -> str:
    """Return the start of the names of a device's lock files."""
    return device_of(lock_name(device.uuid))
