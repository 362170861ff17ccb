"""The reports of a request: while it waits, and if no device is available."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

from reserve_gpu.model.devices import Device
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


class Refusal(NamedTuple):
    """Why no device is available.

    Attributes:
        request: The request.
        rows: The devices, each with its state.
        kept: The devices that stay reserved.
        limit: The inherited CUDA_VISIBLE_DEVICES.
        waited_s: The timeout of the wait in seconds, None without a wait.
        user: The user of this process.
        problems: The faults of the administrator's file.
        free: The free devices other than the named ones.
        siblings: The pids of holders that were started together with this process.
        ahead: The waiters for devices that would do.
    """

    request: Request
    rows: Sequence[DeviceStatus]
    kept: Sequence[Device] = ()
    limit: str | None = None
    waited_s: float | None = None
    user: str | None = None
    problems: Sequence[str] = ()
    free: Sequence[DeviceStatus] = ()
    siblings: Collection[int] = ()
    ahead: Sequence[Ticket] = ()


Progress: TypeAlias = "Waiting | Slow"  # what somebody who reserves is told meanwhile
