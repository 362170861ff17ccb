"""How much of a device can be promised to one who asks for a part of it. Pure functions of values.

It is counted, not measured: what somebody was promised is theirs, however little they use yet.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from reserve_gpu.gpus import usage
from reserve_gpu.model import Device, Holder, Usage


class Own(NamedTuple):
    """What this process has on a device: promised, and in use (None where it can't be seen)."""

    promised_mib: float = 0.0
    used_mib: float | None = 0.0


class Leaving(NamedTuple):
    """What may come free of a device's memory, in MiB.

    promised_mib: all at once, of each of those who were promised a part, or use more than that.
    other_mib: in use by others, bit by bit.
    """

    promised_mib: Sequence[float] = ()
    other_mib: float = 0.0


class Room(NamedTuple):
    """What there is on a device for one who asks for a part.

    free_mib: what can be promised. own: what this process has already.
    sharers: the others who share the device.
    """

    free_mib: float
    own: Own
    sharers: tuple[Holder, ...]
    leaving: Leaving

    @property
    def most_mib(self) -> float:
        """Return the largest part that this process can have there."""
        return self.free_mib + max(self.own.promised_mib, self.own.used_mib or 0.0)

    def is_delayed(self, ahead_mib: Sequence[float | None], part_mib: float) -> bool:
        """Tell whether the last of those ahead may have to wait longer because of that part.

        ahead_mib: what each of them waits for, None for all of the device.
        """
        *earlier, last = ahead_mib
        if last is None:  # it waits for this process to end in any case
            return not self.own.promised_mib
        more_mib = part_mib - self.own.promised_mib
        parts = [mib for mib in earlier if mib is not None]
        return delays(more_mib, last, self.free_mib, self.leaving, parts)


def room(device: Device, reading: Usage, sharers: Sequence[Holder], own: Own) -> Room | None:
    """Return what there is on the device; None where its memory can't be read.

    sharers: the others, with what they use of it.
    """
    parts = [(sharer.part_mib, sharer.used_mib) for sharer in sharers]
    free_mib = usage.promisable_mib(device, reading, parts, own)
    if free_mib is None:
        return None
    others_mib = usage.unpromised_mib(reading, [use for _, use in (*parts, own)])
    if others_mib is None:
        others_mib = usage.used_mib(reading)
    # More than there is can't come free, whatever they wrote: what `delays` counts stays small.
    most_mib = device.memory_mib or 0.0
    promised = [min(most_mib, max(size or 0.0, use or 0.0)) for size, use in parts]
    return Room(free_mib, own, tuple(sharers), Leaving(promised, others_mib))


def delays(
    part_mib: float,
    ahead_mib: float,
    free_mib: float,
    leaving: Leaving,
    earlier_mib: Sequence[float] = (),
) -> bool:
    """Tell whether taking a part now can delay somebody who waits for that much.

    It can't where that one is met as soon as without it, in whatever order those leave who have
    something there: then a small part may pass a large one, and yet nobody starves.
    free_mib: what can be promised now. earlier_mib: what others wait for who come before that one,
    and of whom each may have got it by then, or not.
    """
    if part_mib <= 0:
        return False
    # What has to come free for the one ahead: without the part, and with it. Some sum of what may
    # leave, less what others get of it, that lies between the two makes the difference.
    # Of each size less than 1 MiB is cut off.
    least_mib = ahead_mib - free_mib
    lowest = math.floor(least_mib - leaving.other_mib) - len(leaving.promised_mib)
    highest = math.ceil(least_mib + part_mib) + len(earlier_mib)
    first = min(0, lowest)
    sums = 1 << -first  # bit N: first + N MiB may come free at once
    for size in leaving.promised_mib:
        sums |= sums << int(size)
    for size in earlier_mib:  # anybody may have written them, but this only makes fewer bits
        sums |= sums >> int(size)
    return bool(sums >> (lowest - first) & ((1 << (highest - lowest)) - 1))
