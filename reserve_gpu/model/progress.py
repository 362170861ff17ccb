"""What a reservation reports while it waits."""

import math
from typing import NamedTuple, TypeAlias

from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request


class Waiting(NamedTuple):
    """How a wait stands: what `reserve(progress=...)` calls your function with.

    place: in the queue, 1 is next. waited_s: so far. limit_s: for how long at most.
    rows: why no device can be had yet, one for each.
    first: who is first in the queue, if that is somebody else.
    """

    request: Request
    place: int
    waited_s: float
    rows: tuple[DeviceStatus, ...]
    limit_s: float = math.inf
    first: Ticket | None = None


class Slow(NamedTuple):
    """A call into the driver that takes long. what: the function. waited_s: so far."""

    what: str
    waited_s: float


Progress: TypeAlias = "Waiting | Slow"  # what somebody who reserves is told meanwhile
