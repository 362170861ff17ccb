"""GPUs and MIG instances: their identity, their state and their use.

`None` means "not reported", never zero. Memory is in MiB.
"""

from enum import Enum
from typing import NamedTuple

from reserve_gpu.model.untrusted import sanitize

MIB = 2**20


class State(Enum):
    """How a device stands, in a word."""

    IDLE = "idle"  # by its readings alone: nothing runs on it
    FREE = "free"  # idle, and nobody has reserved it or waits for it
    RESERVED = "reserved"
    KEPT = "kept"  # reserved by a kernel that restarts; only shown
    FULL = "full"  # shared by those who were promised parts of it, with too little left to promise
    AWAITED = "awaited"  # free, but somebody in the queue comes first
    BUSY = "busy"
    PROHIBITED = "prohibited"  # its compute mode lets nobody use it
    UNKNOWN = "unknown"  # whether it is idle or reserved can't be seen
    BROKEN = "broken"  # the driver can't use it
    DENIED = "no permission"  # this user may not use it
    EMPTY = "no instance"  # MIG is on, and there is no instance
    DRAINED = "drained"  # the administrator hands it out no more
    LIMITED = "limited"  # this user may not have more
    UNFIT = "unfit"  # not what was asked for


# What ends only when somebody changes something.
STUCK = frozenset({State.BROKEN, State.DENIED, State.DRAINED, State.EMPTY, State.PROHIBITED})


class ComputeMode:
    """Who may use a GPU: NVML's numbers (nvmlComputeMode_t)."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class Unfit(Enum):
    """Why a device can never be what was asked for."""

    MODEL = "its name is another"
    MEMORY = "it has less memory"
    PART = "it has less memory than the part that is asked for"
    MEMORY_UNKNOWN = "it does not say how much memory it has"
    SECOND_INSTANCE = "this driver gives a process one MIG instance only"
    UNREADABLE = "what it is can't be read"


class Device(NamedTuple):
    """What CUDA can use: a whole GPU, or one MIG instance of it.

    index: of the GPU, as NVML and nvidia-smi number it (PCI bus order).
    instance: number of the MIG instance on that GPU, None for a whole GPU.
    memory_mib: total memory. reserve_mib: what of that the driver keeps for itself.
    link_width: PCIe lanes in use now.
    gpu_uuid, old_name: of an instance, its GPU's UUID, and the name that CUDA had for it before
        instances had UUIDs.
    """

    index: int  # type: ignore[assignment] # a tuple has a method of that name
    uuid: str
    name: str | None = None
    bus_id: str | None = None
    memory_mib: int | None = None
    vbios: str | None = None
    link_width: int | None = None
    instance: int | None = None
    gpu_uuid: str | None = None
    old_name: str | None = None
    reserve_mib: int | None = None

    def __repr__(self) -> str:
        name, uuid = ascii(self.name)[1:-1], ascii(self.uuid)[1:-1]  # the driver's words, escaped
        return f"<{self.label}: {name if self.name else 'a GPU without a name'}, {uuid}>"

    @property
    def number(self) -> str:
        """Return what people type for it: `2`, or `1:0` for a MIG instance."""
        return _number(self.index, self.instance)

    @property
    def entry(self) -> str:
        """Return its entry in CUDA_VISIBLE_DEVICES.

        A whole GPU goes by its NVML index, as much code calls int() on it; a MIG instance has none.
        """
        return str(self.index) if self.instance is None else self.uuid

    @property
    def label(self) -> str:
        """Return what people call it: `GPU2`, or `GPU1:0`."""
        return f"GPU{self.number}"

    @property
    def description(self) -> str:
        """Return `0000:03:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)`, as far as known."""
        lanes = f"{self.link_width}x" if self.link_width else None
        vbios = f"(VBIOS {self.vbios})" if self.vbios else None
        parts = filter(None, (self.bus_id, lanes, self.name, vbios))
        return " ".join(map(sanitize, parts))

    @property
    def usable_mib(self) -> int | None:
        """Return the memory that the driver leaves."""
        return None if self.memory_mib is None else self.memory_mib - (self.reserve_mib or 0)


class Board(NamedTuple):
    """What a whole GPU is like, which holds for all parts of it.

    has_screen: a display is active on it.
    awaits_reset: some of its memory is out of use until then.
    has_host_memory: its memory is the host's, or a NUMA node of the host.
    """

    has_screen: bool
    awaits_reset: bool
    has_host_memory: bool


class Fault(NamedTuple):
    """A place where a device should be, and why none there can be used.

    is_lost: the driver has lost the device.
    """

    index: int  # type: ignore[assignment]
    reason: str
    instance: int | None = None
    state: State = State.BROKEN
    is_lost: bool = False

    @property
    def number(self) -> str:
        """Return `3`, or `3:0` of a MIG instance."""
        return _number(self.index, self.instance)

    @property
    def label(self) -> str:
        """Return `GPU3`, or `GPU3:0` of a MIG instance."""
        return f"GPU{self.number}"


GRAPHICS = "graphics"  # the kind of a process that draws, as a desktop or a simulator does


class Process(NamedTuple):
    """A process on a device.

    kind: `compute`, `MPS` or `graphics`, the first that it is.
    zombie_of: its parent, in a word, if it has ended and the parent has not taken notice.
    """

    pid: int
    memory_mib: int | None = None  # device memory that it holds
    user: str | None = None
    command: str | None = None
    has_reserved: bool | None = None  # it or an ancestor has the device; None: not known
    beside: str | None = None  # a holder of the same user, in a word, that it does not belong to
    kind: str = "compute"
    zombie_of: str | None = None


class Usage(NamedTuple):
    """What NVML reports about the use of one device."""

    compute: int | None = None  # how many compute processes
    mps: int | None = None  # how many MPS clients
    sees_all: bool = True  # no process listed means that there is none (not so in a container)
    total_mib: float | None = None
    used_mib: float | None = None  # where the memory is the host's: by processes
    reserve_known: bool = True  # used_mib is without the driver's own reserve
    graphics_mib: float = 0.0  # what listed graphics processes account for
    mode: int | None = None  # one of ComputeMode
    awaits_reset: bool = False  # some of its memory is out of use until then
    is_wsl: bool = False  # Windows uses the device too
    has_host_memory: bool = False  # or a NUMA node of it, where pages are left for nobody

    @property
    def unexplained_mib(self) -> float | None:
        """Return the memory in use of no graphics process; None where that says nothing."""
        is_known = self.used_mib is not None and not self.has_host_memory
        return (self.used_mib or 0.0) - self.graphics_mib if is_known else None


class Gauges(NamedTuple):
    """Readings that decide nothing; a MIG instance has the temperature and power of its GPU.

    utilisation: percent of the time. power_limit_w: above which the driver slows the GPU down.
    """

    utilisation: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


def _number(index: int, instance: int | None) -> str:
    return str(index) if instance is None else f"{index}:{instance}"
