"""How much of a device can be promised to one who asks for a part of it.

It is counted, not measured: what somebody was promised is theirs, however little they use yet.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu import host
from reserve_gpu.gpus import usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.locks.lock import Lock
    from reserve_gpu.model import Device, Holder, Process, Usage
    from reserve_gpu.reservation.claim import Claim


class Leaving(NamedTuple):
    """What may come free of a device's memory, in MiB.

    promised_mib: all at once, of each of those who were promised a part, or use more than that.
    other_mib: in use by others, bit by bit.
    """

    promised_mib: Sequence[float] = ()
    other_mib: float = 0.0


class Room(NamedTuple):
    """What there is on a device for one who asks for a part, in MiB.

    free_mib: what can be promised. own_mib: what this process has already, promised or in use.
    promised_mib: what of that it was promised. sharers: the others who share the device.
    """

    free_mib: float
    own_mib: float
    promised_mib: float
    sharers: tuple[Holder, ...]
    leaving: Leaving

    @property
    def most_mib(self) -> float:
        """The largest part that this process can have there."""
        return self.free_mib + self.own_mib

    def delays(self, part_mib: float, ahead_mib: float | None) -> bool:
        """Whether that part can keep one waiting who comes before in the queue.

        ahead_mib: what that one waits for, None for all of the device.
        """
        if ahead_mib is None:  # which waits for all who have something there
            return not self.promised_mib
        return delays(part_mib - self.promised_mib, ahead_mib, self.free_mib, self.leaving)


def room(claim: Claim, device: Device, lock: Lock, reading: Usage) -> Room | None:
    """What there is on the device; under the mutex. None where its memory can't be read.

    lock: of this process on it.
    """
    sharers, own_use = _uses(claim, device, lock)
    own = ((claim.part_mib or 0.0) if device.uuid in claim.held else 0.0, own_use)
    parts = [(sharer.part_mib, sharer.used_mib) for sharer in sharers]
    free_mib = usage.room_mib(device, reading, [*parts, own])
    if free_mib is None:
        return None
    others_mib = usage.unpromised_mib(reading, [use for _, use in (*parts, own)])
    if others_mib is None:
        others_mib = usage.used_mib(reading)
    promised = [max(size or 0.0, use or 0.0) for size, use in parts]
    own_mib = max(own[0], own_use or 0.0)
    return Room(free_mib, own_mib, own[0], sharers, Leaving(promised, others_mib))


def delays(part_mib: float, ahead_mib: float, free_mib: float, leaving: Leaving) -> bool:
    """Whether a part, if it is taken now, can keep one waiting who waits for that much.

    It can't where that one is met as soon as without it, in whatever order those leave who have
    something there: then a small part may pass a large one, and yet nobody starves.
    free_mib: what can be promised now.
    """
    # What has to come free for the one ahead: without the part, and with it. Some sum of what may
    # leave that lies between the two makes the difference.
    least, most = ahead_mib - free_mib, ahead_mib - free_mib + part_mib
    if most <= max(0.0, least):
        return False
    sums = 1  # bit N: N MiB may come free at once
    for size in leaving.promised_mib:
        sums |= sums << int(size)
    cut_off = len(leaving.promised_mib)  # less than 1 MiB of each
    lowest = max(0, math.floor(least - leaving.other_mib) - cut_off)
    highest = math.ceil(most)
    return bool(sums >> lowest & ((1 << (highest - lowest)) - 1))


def strangers(processes: Sequence[Process], sharers: Sequence[Holder]) -> tuple[Process, ...]:
    """Those of the processes that belong to none of the sharers, nor to this process."""
    pids = {os.getpid(), *(sharer.pid for sharer in sharers)}
    return tuple(p for p in processes if pids.isdisjoint(host.lineage(p.pid)))


def _uses(claim: Claim, device: Device, lock: Lock) -> tuple[tuple[Holder, ...], float | None]:
    """The others who share the device, with what they use of it; and what this process uses."""
    sharers = claim.locks.sharers_of(device.uuid, [lock.name])
    if not sharers and not claim.held and not claim.is_taking_back:
        return (), 0.0
    if not claim.gpus.sees_all:  # a pid may be another process's in our PID namespace
        return sharers, None
    seen = {sharer.pid for sharer in sharers if sharer.seen and sharer.pid}
    uses = host.uses(claim.gpus.processes(device), {os.getpid(), *seen})
    known = [s._replace(used_mib=uses[s.pid] if s.pid in seen else None) for s in sharers]
    return tuple(known), uses[os.getpid()]
