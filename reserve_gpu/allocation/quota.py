"""What the administrator's rules let a user have, and for how long. Imported only where some are.

What a user holds is counted by the caller, under the mutex, by what the kernel knows of it.
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
    """Return the request as the rules allow it, and what to say about that.

    held, since: the lease of what is asked for and when it was reserved, None for what is not held
    yet. now: this instant.
    Raises ImpossibleError or RequestError for a request that they never allow this user.
    """
    _require_lease(request.terms.lease, ruled, now.wall)
    if since is None or not request.terms.lease.has_end:
        return request, []
    is_asked = request.terms.lease.lasts_s is not None or request.terms.lease.until is not None
    held = held.own
    ends = lease(held.at(now).changed_by(request.terms.lease.begun(now)), ruled).begun(now)
    stays = held.until is not None and not is_asked
    last = counted(ends, ruled, since, now)
    if not ruled.time or stays or last == ends:
        return _with_lease(request, ends), []
    if last.until is None or last.until <= now.wall:
        raise notice.cannot_prolong(ruled.time, since.at(now).later(ruled.time.value).wall)
    notices = [notice.shortened(ruled.time, last.until)] if is_asked else []
    return _with_lease(request, last), notices


def counted(ends: Lease, ruled: Rules, since: Instant, now: Instant) -> Lease:
    """Return a lease that has begun, counted from when the devices were reserved.

    The rule's time counts from the start: else who prolongs it each day, or takes one more to it,
    holds it for ever.
    """
    if ends.until is None or not ruled.time:
        return ends
    latest = since.at(now).later(ruled.time.value)
    return ends if ends.until <= latest.wall else ends.ending(latest)


def left_s(ruled: Rules, since: Instant, now: Instant) -> float:
    """Return the seconds for which the rule of time still allows a reservation."""
    return since.boot + ruled.time.value - now.boot if ruled.time else inf


def lease(asked: Lease, ruled: Rules) -> Lease:
    """Return the lease that somebody gets who asks for this one.

    In the midst of a cell only the administrator's own end comes.
    """
    is_ruled = ruled.time is not None and asked.lasts_s is None and asked.until is None
    if ruled.time and is_ruled:
        asked = asked._replace(lasts_s=ruled.time.value)
    if ruled.idle and asked.idle_s is None:
        asked = asked._replace(idle_s=ruled.idle.value)
    if asked.has_end and ruled.after_cuda and not ruled.after_cuda.value:
        asked = asked._replace(end_kernel=True, is_strict=is_ruled)
    return asked


def build_check(
    ruled: Rules,
    request: Request,
    devices: Sequence[Device | Fault],
    own: Collection[str],
    elsewhere: Sequence[Holder],
) -> Callable[[Device], DeviceStatus | None]:
    """Return a function that tells why this user may not have a device, None if they may.

    own: the UUIDs of what this process has already. elsewhere: who else of this user's processes
    has something.
    Several parts of one GPU are one GPU.
    """
    held = {device_of(holder.file or "") for holder in elsewhere}
    places = {_place(device) for device in devices if isinstance(device, Device)}
    asked = len(places - held) if request.devices else request.needed
    is_full = ruled.gpus is not None and len(held) + asked > ruled.gpus.value

    def check(device: Device) -> DeviceStatus | None:
        if device.uuid not in own and names.is_one_of(device, ruled.drained):
            return DeviceStatus(device, State.DRAINED, rule=ruled.drain)
        if is_full and device.uuid not in own and _place(device) not in held:
            return DeviceStatus(device, State.LIMITED, rule=ruled.gpus, counted=tuple(elsewhere))
        return None

    return check


def _with_lease(request: Request, lease: Lease) -> Request:
    return request._replace(terms=request.terms._replace(lease=lease))


def _require_lease(asked: Lease, ruled: Rules, at: float) -> None:
    """Raise RequestError for a lease that is longer than the rules allow."""
    if asked.if_wanted and (rule := ruled.time or ruled.idle):
        raise notice.ends_anyway(rule)
    lasts_s = asked.lasts_s if asked.until is None else asked.until - at
    for rule, asked_s in ((ruled.time, lasts_s), (ruled.idle, asked.idle_s)):
        if rule and asked_s is not None and asked_s > rule.value:
            raise notice.too_long(rule, asked_s)


def require_amount(request: Request, ruled: Rules) -> None:
    """Raise ImpossibleError for more GPUs than the rules ever allow."""
    if ruled.gpus and request.needed > ruled.gpus.value:
        raise notice.too_many(ruled.gpus, request)


def _place(device: Device) -> str:
    """Return what the names of its lock files begin with."""
    return device_of(lock_name(device.uuid))
