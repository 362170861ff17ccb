"""The things that are talked about: devices, what is using them, and who holds them.

All of them are plain, immutable values. `None` always means "not reported", never zero. They are
named tuples with real annotations, which take a tenth of the time of dataclasses to define.
"""

from enum import Enum, IntEnum
from typing import NamedTuple


class State(Enum):
    """What the readings of a device say about its use."""

    IDLE = "idle"
    BUSY = "busy"
    UNKNOWN = "unknown"


class Link(IntEnum):
    """How two GPUs are connected; less is closer."""

    NVLINK = 0
    SWITCH = 1
    SOCKET = 2
    SYSTEM = 3


class Device(NamedTuple):
    """What CUDA can use: a whole GPU, or one MIG instance of it.

    index: of the GPU, as NVML and nvidia-smi number it (PCI bus order).
    instance: number of the MIG instance on that GPU, None for a whole GPU.
    memory_mib: total memory in MiB.
    link_width: PCIe lanes in use now.
    gpu_uuid, old_name: of an instance, its GPU's UUID and its name in CUDA before it had its own.
    """

    index: int  # type: ignore[assignment] # hides a method of tuple that nobody wants
    uuid: str
    name: str | None = None
    bus_id: str | None = None
    memory_mib: int | None = None
    vbios: str | None = None
    link_width: int | None = None
    instance: int | None = None
    gpu_uuid: str | None = None
    old_name: str | None = None

    @property
    def label(self) -> str:
        """`GPU2`, or `GPU1:0` for a MIG instance: what people call it and can type."""
        return _label(self.index, self.instance)


class Fault(NamedTuple):
    """A place where a device should be, and why there is none to use. index, instance: as there."""

    index: int  # type: ignore[assignment] # likewise
    reason: str
    instance: int | None = None

    @property
    def label(self) -> str:
        """As a device's."""
        return _label(self.index, self.instance)


class Process(NamedTuple):
    """A process on a device.

    memory_mib: device memory that it holds. user, command: as the system says.
    """

    pid: int
    memory_mib: int | None = None
    user: str | None = None
    command: str | None = None


class Usage(NamedTuple):
    """What NVML reports about the use of one device.

    compute, mps: number of compute processes and of MPS clients.
    sees_all: an empty process list means that there are no processes (not so in a container).
    used_mib: memory in use; without the driver's own reserve where reserve_known.
    graphics_mib: memory that listed graphics processes account for.
    mode: NVML's compute mode in its own words, `default` or `prohibited` among them.
    """

    compute: int | None = None
    mps: int | None = None
    sees_all: bool = True
    total_mib: float | None = None
    used_mib: float | None = None
    reserve_known: bool = True
    graphics_mib: float = 0.0
    mode: str | None = None


class Holder(NamedTuple):
    """The process that holds a lock, and what it says of itself.

    seen: the kernel's own list of locks names this pid; all the rest was written by somebody else:
        it is shown, cleaned, and never decides anything.
    confirmed: the record names the same pid.
    elsewhere: the pid belongs to another PID namespace, where it means another process.
    since: seconds since the epoch.
    """

    pid: int | None = None
    user: str | None = None
    notebook: str | None = None
    note: str | None = None
    since: float | None = None
    seen: bool = False
    confirmed: bool = False
    elsewhere: bool = False


class Request(NamedTuple):
    """What is asked for.

    devices: as typed, none for "any". count: how many, in either case.
    min_memory_mib: total memory that each must have. model: text that its name must contain.
    exclude: devices that will not do, as typed.
    share: also what others hold. note: for others to read.
    """

    devices: tuple[str, ...] = ()
    count: int = 1  # type: ignore[assignment] # likewise
    min_memory_mib: float = 0.0
    model: str = ""
    exclude: tuple[str, ...] = ()
    share: bool = False
    note: str | None = None


class Refusal(NamedTuple):
    """Why one device was not taken.

    state: in a word: `free` (others were missing), reserved, busy, unknown, broken or unfit.
    way: how it could be had all the same, by `name` or by `share`.
    """

    label: str
    state: str
    reason: str
    way: str = ""


def _label(index: int, instance: int | None) -> str:
    return f"GPU{index}" if instance is None else f"GPU{index}:{instance}"
