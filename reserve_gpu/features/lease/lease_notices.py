"""What there is to tell of a lease: values, which ends.py puts into words."""

from collections.abc import Sequence
from enum import Enum
from math import inf
from typing import NamedTuple

from reserve_gpu.model.devices import Device
from reserve_gpu.model.requests import Lease, Rule, Size


class Action(Enum):
    """How a lease stands."""

    LAST = "it lasts"
    WARN = "its end is near"
    WARN_AGAIN = "its end is very near"
    PUT_OFF = "it is over, and a cell runs"
    STAY = "it is over, and nobody waits"
    RELEASE = "it is over"
    LEAVE_TO_CHILD = "it is over, and a child uses the devices"
    MARK_OVERDUE = "it is over, and CUDA uses the devices"
    END_PROCESS = "it is over, and CUDA is to release the devices"


class LeaseNotice(NamedTuple):
    """How the lease of what is held stands.

    at: when it ends, or has ended, in seconds since the epoch.
    children: what this process has started, where that has the variables of the reservation still.
    is_guest: only the holder that was joined can keep them for longer.
    size: The size of the part of each GPU that is held; None for whole GPUs.
    longer_s: The seconds from now for which the rules still allow it.
    rule: The rule that limits it.
    """

    action: Action
    devices: Sequence[Device]
    lease: Lease
    at: float
    children: Sequence[str] = ()
    is_guest: bool = False
    size: Size | None = None
    longer_s: float = inf
    rule: Rule | None = None
