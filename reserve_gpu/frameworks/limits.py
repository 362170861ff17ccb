"""Is each framework kept within the part that is reserved, by what, and is that so?

Pure functions of plain values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.errors import shown
from reserve_gpu.frameworks.probes import FULL, GIVEN, REFUSED
from reserve_gpu.model import MIB
from reserve_gpu.report.words import size
from reserve_gpu.reservation import caps
from reserve_gpu.reservation.environment import CUPY_LIMIT, MPS_LIMIT, TORCH_NAMES, XLA_NAMES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from reserve_gpu.model import Device

# What each of them reads, the name that is set here first.
VARIABLES = {"torch": TORCH_NAMES, "jax": XLA_NAMES, "cupy": (CUPY_LIMIT,), "driver": (MPS_LIMIT,)}
BEYOND_MIB = 64
TEXT_LIMIT = 100  # characters of what a framework says
WHY_NOT = {
    "driver": "without MPS the driver has no limit",
    "torch": "this version takes no limit from a variable",
    "jax": "no limit is set",
    "cupy": "no limit is set",
}


class Limit(NamedTuple):
    """What a framework is kept to on each device.

    mib: None for nothing, or nothing of ours. how: a word on that. is_proven: it was asked for more
    and refused; None where it was not asked, or the answer says nothing.
    """

    mib: float | None
    how: str = ""
    is_proven: bool | None = None

    def __str__(self) -> str:
        if self.mib is None:
            return self.how
        return f"capped at {size(self.mib, 'GiB')}{self.how}"


def limits(
    devices: Sequence[Device],
    part_mib: float,
    environ: Mapping[str, str],
    keys: Collection[str],
) -> dict[str, Limit]:
    """The limit of each framework, as far as it is known before any is asked."""
    room_mib, _ = caps.cap(devices, part_mib)
    ours = caps.variables(devices, part_mib, {})
    found = {}
    for key in keys:
        name = next((n for n in VARIABLES.get(key, ()) if environ.get(n)), None)
        own = ours.get(VARIABLES[key][0]) if key in VARIABLES else None
        if name is not None and own and environ[name].endswith(own):
            found[key] = Limit(room_mib)
        elif name is not None and (key != "torch" or caps.FRACTION_WORD in environ[name]):
            found[key] = Limit(None, f"the value that {name} has from you")
        else:
            found[key] = Limit(None, f"not capped: {WHY_NOT.get(key, 'it takes no limit')}")
    return found


def is_asked(key: str, limit: Limit) -> bool:
    """Whether the framework's process can be asked for more than it may have."""
    return limit.mib is not None and not limit.how and key in VARIABLES


def proven(limit: Limit, answers: Sequence[str] | None) -> Limit:
    """The limit, with what it came to when more was asked for, on each device."""
    if limit.mib is None or limit.how:
        return limit
    if answers and GIVEN in answers:
        return Limit(None, "not capped: it was given more than that", is_proven=False)
    if answers and {*answers} == {REFUSED}:
        return limit._replace(how=", asked for more and refused", is_proven=True)
    other = next((answer for answer in answers or () if answer != REFUSED), "it was not asked")
    why = "too little memory is free to tell" if other == FULL else shown(other, TEXT_LIMIT)
    return limit._replace(how=f", not proven: {why}")


def asked_bytes(part_mib: float) -> int:
    """How much is asked for: a little more than the part."""
    return int((part_mib + BEYOND_MIB) * MIB)
