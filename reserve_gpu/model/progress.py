"""Progress reports during a wait, and the reasons for a refusal."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

from reserve_gpu.model.devices import Device
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request


class Waiting(NamedTuple):
    """The current state of a wait, which is passed to the `progress` callback of `reserve()`.

    Attributes:
        request: The request that is waiting.
        place: The position in the queue, starting at 1.
        waited_s: The seconds since this process joined the queue. If the process has returned to
            its position, an earlier wait is included.
        rows: The status of each device, including why it is unavailable.
        limit_s: The value of `waited_s` at which the request is refused, or infinity.
        first: The first ticket in the queue, or None if this process is first.
    """

    request: Request
    place: int
    waited_s: float
    rows: tuple[DeviceStatus, ...]
    limit_s: float = math.inf
    first: Ticket | None = None


class Slow(NamedTuple):
    """A driver call that is taking a long time.

    Attributes:
        what: The name of the driver function.
        waited_s: The seconds elapsed since the call began.
    """

    what: str
    waited_s: float


class Refusal(NamedTuple):
    """The details that explain why a request was refused.

    Attributes:
        request: The refused request.
        rows: The status of each device.
        kept: The devices that this process still holds.
        limit: The value of CUDA_VISIBLE_DEVICES that limits the request, or None if nothing does.
        waited_s: The timeout in seconds after which the wait ended, or None if the request did not
            wait.
        user: The name of the user running this process.
        problems: The errors in the administrator's rules file.
        free: The free devices that the request did not name.
        siblings: The pids of holders that have the same parent and command as this process.
        ahead: The tickets ahead whose waiters could use one of the requested devices.
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
