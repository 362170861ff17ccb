"""GPUs and MIG instances: their identity, state and usage.

`None` means that a value was not reported; it never means zero. Memory sizes are in MiB.
"""

from enum import Enum
from typing import NamedTuple

from reserve_gpu.model.untrusted import sanitize

MIB = 2**20


class State(Enum):
    """A device's availability."""

    IDLE = "idle"  # NVML shows that it is idle, but it might be reserved
    FREE = "free"  # idle, not reserved, and not offered to a waiter
    RESERVED = "reserved"
    KEPT = "kept"  # reserved for a Jupyter kernel that is restarting; only displayed
    FULL = "full"  # shared, but too little memory is left for the requested part
    AWAITED = "awaited"  # free, but a waiter is ahead in the queue
    BUSY = "busy"
    PROHIBITED = "prohibited"  # the compute mode allows no compute processes
    UNKNOWN = "unknown"  # its usage or its lock can't be read
    BROKEN = "broken"  # the driver can't use it
    DENIED = "no permission"  # this user has no permission to use it
    EMPTY = "no instance"  # MIG is enabled, but the GPU has no instances
    DRAINED = "drained"  # withdrawn by an administrator's rule
    LIMITED = "limited"  # this user's quota is used up
    UNFIT = "unfit"  # does not match the request


# A device stays in these states until a user or an administrator intervenes.
STUCK = frozenset({State.BROKEN, State.DENIED, State.DRAINED, State.EMPTY, State.PROHIBITED})


class ComputeMode:
    """Values of NVML's nvmlComputeMode_t, which limits the processes that can use a GPU."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class Unfit(Enum):
    """Reasons why a device can never match a request."""

    MODEL = "its name does not match"
    MEMORY = "it has less memory than requested"
    PART = "it has less memory than the requested amount"
    MEMORY_UNKNOWN = "its memory size is unknown"
    SECOND_INSTANCE = "this driver allows a process only one MIG instance"
    UNREADABLE = "its name and memory size can't be read"


class Device(NamedTuple):
    """A whole GPU or a single MIG instance.

    Attributes:
        index: The GPU's number in PCI bus order, as shown by nvidia-smi.
        uuid: The UUID of the GPU or MIG instance.
        name: The model name, or None if NVML does not report it.
        bus_id: The PCI bus ID, such as `0000:03:00.0`.
        memory_mib: The total memory in MiB.
        vbios: The GPU's VBIOS version.
        link_width: The number of PCIe lanes currently in use, or None for a GPU that uses the
            host's memory, because it is not a PCIe card.
        instance: The MIG instance's number on its GPU, or None for a whole GPU.
        gpu_uuid: The UUID of the MIG instance's GPU, or None for a whole GPU.
        old_name: The name that CUDA used for this MIG instance before MIG instances had UUIDs.
        reserve_mib: The part of `memory_mib` that the driver reserves for itself, in MiB.
    """

    index: int  # type: ignore[assignment] # tuple has an index() method
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
        name, uuid = ascii(self.name)[1:-1], ascii(self.uuid)[1:-1]  # escape text from the driver
        return f"<{self.label}: {name if self.name else 'a GPU without a name'}, {uuid}>"

    @property
    def number(self) -> str:
        """Return the device number as users type it: `2`, or `1:0` for a MIG instance."""
        return _number(self.index, self.instance)

    @property
    def entry(self) -> str:
        """Return the device's entry in CUDA_VISIBLE_DEVICES.

        A whole GPU is listed by its index, because many programs call int() on the entry. A MIG
        instance is listed by its UUID, because CUDA accepts nothing else.
        """
        return str(self.index) if self.instance is None else self.uuid

    @property
    def label(self) -> str:
        """Return the display name: `GPU2`, or `GPU1:0` for a MIG instance."""
        return f"GPU{self.number}"

    @property
    def description(self) -> str:
        """Return a sanitized description that leaves out unknown values.

        If all values are known, it looks like this:
        `0000:03:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)`.
        """
        lanes = f"{self.link_width}x" if self.link_width else None
        vbios = f"(VBIOS {self.vbios})" if self.vbios else None
        parts = filter(None, (self.bus_id, lanes, self.name, vbios))
        return " ".join(map(sanitize, parts))

    @property
    def usable_mib(self) -> int | None:
        """Return the memory in MiB, excluding what the driver reserves, or None if unknown."""
        return None if self.memory_mib is None else self.memory_mib - (self.reserve_mib or 0)


class Board(NamedTuple):
    """Properties of a whole GPU that also apply to its MIG instances.

    Attributes:
        has_screen: Whether a display is active on the GPU.
        awaits_reset: Whether some of the memory is disabled until the GPU is reset.
        has_host_memory: Whether the GPU uses the host's memory, or the host manages the GPU's
            memory as a NUMA node.
    """

    has_screen: bool
    awaits_reset: bool
    has_host_memory: bool


class Fault(NamedTuple):
    """A GPU or MIG instance that can't be used, and why.

    Attributes:
        index: The GPU's number in PCI bus order.
        reason: The reason, as reported by the driver or the operating system.
        instance: The MIG instance's number, or None for a whole GPU.
        state: The state to display.
        is_lost: Whether the driver has lost the device.
    """

    index: int  # type: ignore[assignment]
    reason: str
    instance: int | None = None
    state: State = State.BROKEN
    is_lost: bool = False

    @property
    def number(self) -> str:
        """Return the device number as users type it: `3`, or `3:0` for a MIG instance."""
        return _number(self.index, self.instance)

    @property
    def label(self) -> str:
        """Return the display name: `GPU3`, or `GPU3:0` for a MIG instance."""
        return f"GPU{self.number}"


COMPUTE = "compute"  # `Process.kind` of a CUDA process that is not an MPS client
MPS = "MPS"  # `Process.kind` of an MPS client
GRAPHICS = "graphics"  # `Process.kind` of a process that renders graphics, e.g. a desktop


class Process(NamedTuple):
    """A process that is using a device.

    Attributes:
        pid: The process ID.
        memory_mib: The device memory that the process is using, in MiB.
        user: The name of the user running the process.
        command: The process's command, shortened.
        has_reserved: Whether the process or one of its ancestors holds the device, or None if
            unknown.
        beside: The name of another process of the same user that holds the device, if this process
            does not descend from a holder.
        kind: The first of `compute`, `MPS` and `graphics` that applies.
        zombie_of: The parent's name and pid, if this process has exited but its parent has not yet
            reaped it.
        has_ended: Whether the process no longer exists, although the driver lists it.
        left_by: The name of the process that started this process, held the device, and has ended.
            None if there is no such process.
        started: The start time in seconds since the epoch, if `left_by` is set.
    """

    pid: int
    memory_mib: int | None = None
    user: str | None = None
    command: str | None = None
    has_reserved: bool | None = None
    beside: str | None = None
    kind: str = COMPUTE
    zombie_of: str | None = None
    has_ended: bool = False
    left_by: str | None = None
    started: float | None = None


class UseSample(NamedTuple):
    """A sample of how one process has used a device, as reported by NVML.

    Driver 580 on an H100 returns one for each process, with averages over several seconds; see
    `usage.samples_start_s`.

    Attributes:
        pid: The process ID.
        time_s: The time of the newest sample in seconds. The clock depends on the driver; driver
            580 on an H100 uses the wall clock.
        percents: The percentages of time during which the process was computing, accessing memory,
            encoding and decoding.
    """

    pid: int
    time_s: float
    percents: tuple[int, int, int, int]


class Usage(NamedTuple):
    """The usage of one device, as reported by NVML.

    Attributes:
        compute: The number of compute processes that count as use, without MPS clients.
        mps: The number of MPS clients.
        sees_all: Whether an empty process list means that no process is using the device. This is
            false in a container and under WSL, where NVML might not list every process.
        total_mib: The total memory in MiB.
        used_mib: The memory in use, in MiB. If the GPU uses host memory, this is the total for the
            listed processes.
        reserve_known: Whether `used_mib` excludes the memory that the driver reserves.
        graphics_mib: The memory used by the listed graphics processes, in MiB.
        mode: The compute mode, a value from `ComputeMode`.
        awaits_reset: Whether some of the memory is disabled until the GPU is reset.
        is_wsl: Whether this is WSL, where Windows also uses the device.
        has_host_memory: Whether the GPU uses the host's memory, or the host manages the GPU's
            memory as a NUMA node. Memory in use on such a node might not belong to any process.
        listed_mib: The memory used by all listed processes, in MiB, or None if the lists are
            incomplete or a process's memory is unknown.
        processes: The listed processes of all kinds, with one entry for each process.
    """

    compute: int | None = None
    mps: int | None = None
    sees_all: bool = True
    total_mib: float | None = None
    used_mib: float | None = None
    reserve_known: bool = True
    graphics_mib: float = 0.0
    mode: int | None = None
    awaits_reset: bool = False
    is_wsl: bool = False
    has_host_memory: bool = False
    listed_mib: float | None = None
    processes: tuple[Process, ...] = ()

    @property
    def unexplained_mib(self) -> float | None:
        """Return the memory in use, in MiB, excluding graphics processes.

        The result is None if the memory in use is unknown or `has_host_memory` is true.
        """
        is_known = self.used_mib is not None and not self.has_host_memory
        return (self.used_mib or 0.0) - self.graphics_mib if is_known else None


class Gauges(NamedTuple):
    """Measurements of a device that are displayed, but affect no decisions.

    A MIG instance has the same temperature and power readings as its GPU.

    Attributes:
        utilisation: The percentage of time during which the device was active.
        temperature_c: The temperature in degrees Celsius.
        power_w: The power draw in watts.
        power_limit_w: The power limit in watts. The driver slows the GPU down to stay below it.
    """

    utilisation: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


def _number(index: int, instance: int | None) -> str:
    return str(index) if instance is None else f"{index}:{instance}"
