"""What the work has to tell a person: values, which `render/messages.py` puts into words.

A notice goes beside an answer. A failure is raised in place of one, and becomes an error in the
words of the place where it is read.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

from reserve_gpu.model.devices import Device
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request, Rule, Variables

PART_STAYS = "The `with` block around this has asked for a larger part, which stays reserved."
HAS_ENDED = "This reservation has been released; ask for another one."
TIME_IS_OVER = "The time of this reservation is over: there is nothing to join any more."
HAS_GONE = "This reservation has just been released. Look again:"
CAPS_ARE_LATE = (
    "CUDA runs already: JAX, TensorFlow and CuPy keep the limit that they started with until a "
    "restart."
)
ANOTHER_THREAD_WAITS = (
    "Another thread of this process waits in the queue for a GPU. To get the same GPU, wait as "
    "well: wait=True."
)

# -- beside an answer ------------------------------------------------------------------------------


class Caution(NamedTuple):
    """Others use a device that was reserved."""

    row: DeviceStatus
    request: Request


class Private(NamedTuple):
    """A container has a lock directory of its own. bind: How it can get the host's."""

    path: str
    bind: str


class Unsigned(NamedTuple):
    """A lock is held, but its record could not be written.

    reason: The system's. is_part: Others count the part as the whole GPU.
    """

    devices: Sequence[Device]
    directory: str
    reason: str
    is_part: bool


class Unusable(NamedTuple):
    """The driver can't use a held device now.

    reason: The driver's words. is_late: CUDA has started.
    """

    device: Device
    reason: str
    is_late: bool


class LostDevice(NamedTuple):
    """The driver has lost a held device, which was released unless CUDA has started.

    reason: The driver's words. is_late: CUDA has started.
    """

    device: Device
    reason: str
    is_late: bool


class Renumbered(NamedTuple):
    """A held device has another number than at its reservation.

    before, now: The device then and now. is_late: CUDA has started on other devices.
    """

    before: Device
    now: Device
    is_late: bool


class LeftRunning(NamedTuple):
    """Processes of this user, started before the restart of the kernel, still use a held device."""

    row: DeviceStatus


class UsedByOthers(NamedTuple):
    """Others use a device that is held."""

    row: DeviceStatus


class Stays(NamedTuple):
    """A smaller request leaves these reserved. is_late: for CUDA; else for a `with` block."""

    devices: Sequence[Device]
    is_late: bool


class Changed(NamedTuple):
    """Other code has changed variables. values: theirs now.

    is_late: CUDA has started, and not on what is held. is_mended: they are set again.
    """

    values: Variables
    held: Sequence[Device]
    is_late: bool
    is_mended: bool


class LockedAnew(NamedTuple):
    """A lock was lost and taken again.

    path: of the lock file that somebody deleted, None if other code has closed the descriptor.
    """

    device: Device
    path: str | None


class LeftAlone(NamedTuple):
    """The holder that this guest has joined has gone. name: what that was, in a word."""

    devices: Sequence[Device]
    name: str | None


class Shortened(NamedTuple):
    """A rule's time counts from the start. last: until when that is."""

    rule: Rule
    last: float


class CapsStand(NamedTuple):
    """Caps that the user has set stay as they are. names: of the variables."""

    names: Sequence[str]


class ToType(NamedTuple):
    """A framework reads no variable. line: what caps it."""

    framework: str
    line: str


class Exceeded(NamedTuple):
    """This process uses more of a device than its part. caps: names of what limits it."""

    device: Device
    used_mib: float
    request: Request
    caps: Sequence[str]


Notice: TypeAlias = (
    "str | Caution | Private | Unsigned | Unusable | LostDevice | Renumbered | LeftRunning"
    " | UsedByOthers | Stays | Changed | LockedAnew | LeftAlone | Shortened | CapsStand | ToType"
    " | Exceeded | Reason"
)

# -- in place of one -------------------------------------------------------------------------------


class Lost(NamedTuple):
    """A lock was lost, and others have the device now. path: as in LockedAnew."""

    device: Device
    path: str | None
    holders: Sequence[Holder]


class TooLate(NamedTuple):
    """CUDA has started, and can't use what is asked for.

    held: what this process keeps. seen: what CUDA sees and this process may reserve.
    """

    held: Sequence[Device]
    seen: Sequence[Device] = ()


class ReservedAbove(NamedTuple):
    """An ancestor has reserved all that this process may use. environ: the CUDA variables."""

    rows: Sequence[DeviceStatus]
    environ: Variables


class Refused(NamedTuple):
    """No device was to be had.

    kept: what stays reserved. limit: the inherited CUDA_VISIBLE_DEVICES, if there is one.
    waited_s: the time that was allowed for waiting, None if nobody waited. user: who asks.
    problems: what is wrong in the administrator's file. free: others than those that were named.
    ahead: who waits for what would do.
    siblings: of the holders, those that were started together with this process.
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


class WouldGet(NamedTuple):
    """What would be reserved, by one who only asks."""

    devices: tuple[Device, ...]


class Impossible(NamedTuple):
    """No state of this machine could satisfy the request.

    rows: of all devices that this process may use. limit: as in Refused.
    """

    request: Request
    rows: Sequence[DeviceStatus]
    limit: str | None


class HidesAll(NamedTuple):
    """The inherited CUDA_VISIBLE_DEVICES leaves this process no device.

    Attributes:
        limit: Its value.
        total: The number of GPUs that the driver shows here.
        kept: The devices that this process keeps.
    """

    request: Request
    limit: str
    total: int
    kept: Sequence[Device] = ()


class IsGuest(NamedTuple):
    """A guest can't have something else. name: what the holder is, in a word."""

    devices: Sequence[Device]
    name: str | None


class HoldsAlready(NamedTuple):
    """A process that holds something can't join another reservation."""

    devices: Sequence[Device]


class TooMany(NamedTuple):
    """A rule never allows so many GPUs."""

    rule: Rule
    request: Request


class TooLong(NamedTuple):
    """A rule allows no reservation for so long."""

    rule: Rule
    asked_s: float


class EndsAnyway(NamedTuple):
    """A rule ends the reservation, so that `if_wanted` can't hold."""

    rule: Rule


class CannotProlong(NamedTuple):
    """A rule's time counts from the start, and was reached. last: when that was."""

    rule: Rule
    last: float


Reason: TypeAlias = (
    "Lost | TooLate | ReservedAbove | Refused | WouldGet | Impossible | HidesAll | IsGuest"
    " | HoldsAlready | TooMany | TooLong | EndsAnyway | CannotProlong"
)
