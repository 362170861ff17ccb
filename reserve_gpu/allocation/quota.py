"""Enforce the administrator's limits on how many devices a user can hold, and for how long.

The caller counts the user's devices under the mutex, based on information from the Linux kernel.
This module is imported only if there are rules.
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
    request: Request, active_rules: Rules, held: Lease, since: Instant | None, now: Instant
) -> tuple[Request, list[str]]:
    """Apply the rules to the request's lease, and return the request and any notices.

    Args:
        request: The request.
        active_rules: The rules for this user.
        held: The current lease, if this process already holds the requested devices.
        since: The time at which this process reserved the devices, or None if it doesn't hold them.
        now: The current time.

    Raises:
        RequestError: The rules don't allow the requested lease.
    """
    _require_lease(request.terms.lease, active_rules, now.wall)
    if since is None or not request.terms.lease.has_end:
        return request, []
    has_end = request.terms.lease.lasts_s is not None or request.terms.lease.until is not None
    held = held.own
    ends = lease(held.at(now).changed_by(request.terms.lease.begun(now)), active_rules).begun(now)
    is_unchanged = held.until is not None and not has_end
    last = counted(ends, active_rules, since, now)
    if not active_rules.time or is_unchanged or last == ends:
        return _with_lease(request, ends), []
    if last.until is None or last.until <= now.wall:
        raise notice.cannot_extend(
            active_rules.time, since.at(now).later(active_rules.time.value).wall
        )
    notices = [notice.shortened(active_rules.time, last.until)] if has_end else []
    return _with_lease(request, last), notices


def counted(ends: Lease, active_rules: Rules, since: Instant, now: Instant) -> Lease:
    """Return a started lease, shortened if it exceeds the rules' time limit.

    The time limit counts from the start of the reservation. Otherwise, a user could hold a device
    forever by extending the lease every day, or by adding devices to the reservation.

    Args:
        ends: The started lease.
        active_rules: The rules for this user.
        since: The reservation's start time.
        now: The current time.
    """
    if ends.until is None or not active_rules.time:
        return ends
    latest = since.at(now).later(active_rules.time.value)
    return ends if ends.until <= latest.wall else ends.ending(latest)


def left_s(active_rules: Rules, since: Instant, now: Instant) -> float:
    """Return the seconds left until the rules' time limit, or infinity if there is none."""
    return since.boot + active_rules.time.value - now.boot if active_rules.time else inf


def lease(requested: Lease, active_rules: Rules) -> Lease:
    """Return a requested lease with the rules' limits applied.

    The end of a lease can interrupt a running cell only if the rules set its end time.

    Args:
        requested: The requested lease.
        active_rules: The rules for this user.
    """
    is_ruled = (
        active_rules.time is not None and requested.lasts_s is None and requested.until is None
    )
    if active_rules.time and is_ruled:
        requested = requested._replace(lasts_s=active_rules.time.value)
    if active_rules.idle and requested.idle_s is None:
        requested = requested._replace(idle_s=active_rules.idle.value)
    if requested.has_end and active_rules.after_cuda and not active_rules.after_cuda.value:
        requested = requested._replace(end_kernel=True, is_strict=is_ruled)
    return requested


def build_check(
    active_rules: Rules,
    request: Request,
    devices: Sequence[Device | Fault],
    own_uuids: Collection[str],
    other_holders: Sequence[Holder],
) -> Callable[[Device], DeviceStatus | None]:
    """Return a function that checks whether the rules allow this user to reserve a device.

    The function returns a row for a denied device, and None for an allowed device. Several parts of
    the same GPU count as a single GPU.

    Args:
        active_rules: The rules for this user.
        request: The request.
        devices: The request's candidate devices.
        own_uuids: The UUIDs of the devices that this process already holds.
        other_holders: The user's other processes that hold devices.
    """
    held = {device_of(holder.file or "") for holder in other_holders}
    places = {_file_prefix(device) for device in devices if isinstance(device, Device)}
    added = len(places - held) if request.devices else request.needed
    is_full = active_rules.gpus is not None and len(held) + added > active_rules.gpus.value

    def check(device: Device) -> DeviceStatus | None:
        if device.uuid not in own_uuids and names.is_one_of(device, active_rules.drained):
            return DeviceStatus(device, State.DRAINED, rule=active_rules.drain)
        if is_full and device.uuid not in own_uuids and _file_prefix(device) not in held:
            return DeviceStatus(
                device, State.LIMITED, rule=active_rules.gpus, counted=tuple(other_holders)
            )
        return None

    return check


def _with_lease(request: Request, lease: Lease) -> Request:
    return request._replace(terms=request.terms._replace(lease=lease))


def _require_lease(requested: Lease, active_rules: Rules, at: float) -> None:
    """Raise RequestError if the rules don't allow the requested lease."""
    if requested.if_wanted and (rule := active_rules.time or active_rules.idle):
        raise notice.ends_anyway(rule)
    lasts_s = requested.lasts_s if requested.until is None else requested.until - at
    for rule, requested_s in ((active_rules.time, lasts_s), (active_rules.idle, requested.idle_s)):
        if rule and requested_s is not None and requested_s > rule.value:
            raise notice.too_long(rule, requested_s)


def require_amount(request: Request, active_rules: Rules) -> None:
    """Raise ImpossibleError if the user requests more GPUs than the rules ever allow."""
    if active_rules.gpus and request.needed > active_rules.gpus.value:
        raise notice.too_many(active_rules.gpus, request)


def _file_prefix(device: Device) -> str:
    """Return the prefix that the names of a device's lock files have in common."""
    return device_of(lock_name(device.uuid))
