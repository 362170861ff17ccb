"""Progress reports of a waiting request, and the reasons for a refusal."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

from reserve_gpu.model.devices import Device
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request


class Waiting(NamedTuple):
    """The state of a wait, which `reserve(progress=...)` passes to your function.

    Attributes:
        request: The request that waits.
        place: The position in the queue; 1 is first.
        waited_s: The time since the wait began, in seconds.
        rows: The status of each device, with the reason why it is not available.
        limit_s: The timeout of the wait in seconds.
        first: The first ticket in the queue, or None if this process is first.
    """

    request: Request
    place: int
    waited_s: float
    rows: tuple[DeviceStatus, ...]
    limit_s: float = math.inf
    first: Ticket | None = None


class Slow(NamedTuple):
    """A slow call of the driver.

    Attributes:
        what: The name of the driver's function.
        waited_s: The time since the call began, in seconds.
    """

    what: str
    waited_s: float


class Refusal(NamedTuple):
    """The reasons why no device is available.

    Attributes:
        request: The refused request.
        rows: The status of each device.
        kept: The devices that this process still holds.
        limit: The inherited limit, from CUDA_VISIBLE_DEVICES.
        waited_s: The timeout of the wait in seconds, or None if the request did not wait.
        user: The name of this process's user.
        problems: The errors in the administrator's file.
        free: The free devices that the request did not name.
        siblings: The pids of holders that were started together with this process.
        ahead: The tickets of waiters for devices that match the request.
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


Progress: TypeAlias = "Waiting | Slow"  # progress report
