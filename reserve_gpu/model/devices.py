"""GPUs and MIG instances: their identity, state and use.

`None` means "not reported", never zero. Memory is in MiB.
"""

from enum import Enum
from typing import NamedTuple

from reserve_gpu.model.untrusted import sanitize

MIB = 2**20


class State(Enum):
    """The state of a device."""

    IDLE = "idle"  # NVML's readings show no use; reservations are not considered
    FREE = "free"  # idle, not reserved, and not offered to a waiter
    RESERVED = "reserved"
    KEPT = "kept"  # reserved for a restarting kernel; only displayed
    FULL = "full"  # shared, with too little memory left for the requested part
    AWAITED = "awaited"  # free, but a waiter in the queue comes first
    BUSY = "busy"
    PROHIBITED = "prohibited"  # the compute mode forbids all use
    UNKNOWN = "unknown"  # its use or its lock can't be read
    BROKEN = "broken"  # the driver can't use it
    DENIED = "no permission"  # this user has no permission to use it
    EMPTY = "no instance"  # MIG is on, but the GPU has no instance
    DRAINED = "drained"  # an administrator's rule withdraws it
    LIMITED = "limited"  # this user's quota is used up
    UNFIT = "unfit"  # does not match the request


# States that last until a user or an administrator changes something.
STUCK = frozenset({State.BROKEN, State.DENIED, State.DRAINED, State.EMPTY, State.PROHIBITED})


class ComputeMode:
    """The values of NVML's nvmlComputeMode_t, which limit the processes that may use a GPU."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class Unfit(Enum):
    """The reason why a device can never match a request."""

    MODEL = "its name does not match"
    MEMORY = "it has less memory than requested"
    PART = "it has less memory than the requested part"
    MEMORY_UNKNOWN = "its memory size is unknown"
    SECOND_INSTANCE = "this driver allows a process only one MIG instance"
    UNREADABLE = "its name and memory size can't be read"


class Device(NamedTuple):
    """A whole GPU, or one MIG instance of it.

    Attributes:
        index: The number of the GPU in PCI bus order, as in nvidia-smi.
        uuid: The UUID of the GPU or the MIG instance.
        name: The model name, or None if NVML does not report it.
        bus_id: The PCI bus ID, such as `0000:03:00.0`.
        memory_mib: The total memory in MiB.
        vbios: The version of the GPU's firmware.
        link_width: The number of PCIe lanes currently in use.
        instance: The number of the MIG instance on its GPU, or None for a whole GPU.
        gpu_uuid: The UUID of the GPU that a MIG instance is on, or None for a whole GPU.
        old_name: The name that CUDA used for a MIG instance before instances had UUIDs.
        reserve_mib: The part of `memory_mib` that the driver keeps for itself, in MiB.
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
        name, uuid = ascii(self.name)[1:-1], ascii(self.uuid)[1:-1]  # escape the driver's text
        return f"<{self.label}: {name if self.name else 'a GPU without a name'}, {uuid}>"

    @property
    def number(self) -> str:
        """Return the number that users type: `2`, or `1:0` for a MIG instance."""
        return _number(self.index, self.instance)

    @property
    def entry(self) -> str:
        """Return the device's entry in CUDA_VISIBLE_DEVICES.

        A whole GPU is listed by its index because much code calls int() on the entry. CUDA accepts
        a MIG instance only by its UUID.
        """
        return str(self.index) if self.instance is None else self.uuid

    @property
    def label(self) -> str:
        """Return the displayed name: `GPU2`, or `GPU1:0` for a MIG instance."""
        return f"GPU{self.number}"

    @property
    def description(self) -> str:
        """Return a sanitized description, without unknown fields.

        A complete description is `0000:03:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)`.
        """
        lanes = f"{self.link_width}x" if self.link_width else None
        vbios = f"(VBIOS {self.vbios})" if self.vbios else None
        parts = filter(None, (self.bus_id, lanes, self.name, vbios))
        return " ".join(map(sanitize, parts))

    @property
    def usable_mib(self) -> int | None:
        """Return the total memory in MiB without the driver's reserve, or None if unknown."""
        return None if self.memory_mib is None else self.memory_mib - (self.reserve_mib or 0)


class Board(NamedTuple):
    """Properties of a whole GPU that its MIG instances share.

    Attributes:
        has_screen: Whether a display is active on the GPU.
        awaits_reset: Whether some memory stays disabled until the GPU is reset.
        has_host_memory: Whether the GPU's memory is host memory, or a NUMA node of the host.
    """

    has_screen: bool
    awaits_reset: bool
    has_host_memory: bool


class Fault(NamedTuple):
    """A GPU or MIG instance that can't be used, and the reason.

    Attributes:
        index: The number of the GPU in PCI bus order.
        reason: The reason, as the driver or the system reports it.
        instance: The number of the MIG instance, or None for a whole GPU.
        state: The displayed state.
        is_lost: Whether the driver has lost the device.
    """

    index: int  # type: ignore[assignment]
    reason: str
    instance: int | None = None
    state: State = State.BROKEN
    is_lost: bool = False

    @property
    def number(self) -> str:
        """Return the number that users type: `3`, or `3:0` for a MIG instance."""
        return _number(self.index, self.instance)

    @property
    def label(self) -> str:
        """Return the displayed name: `GPU3`, or `GPU3:0` for a MIG instance."""
        return f"GPU{self.number}"


GRAPHICS = "graphics"  # `Process.kind` of a process that renders, such as a desktop or a simulator


class Process(NamedTuple):
    """A process that uses a device.

    Attributes:
        pid: The process ID.
        memory_mib: The device memory that the process uses, in MiB.
        user: The name of the process's user.
        command: The command of the process, in short.
        has_reserved: Whether the process or an ancestor holds the device, or None if unknown.
        beside: The name of the same user's holder on the device, if the process does not descend
            from a holder.
        kind: `compute`, `MPS` or `graphics`: the first of these that applies.
        zombie_of: The name and pid of the parent, if it has not yet reaped this ended process.
    """

    pid: int
    memory_mib: int | None = None
    user: str | None = None
    command: str | None = None
    has_reserved: bool | None = None
    beside: str | None = None
    kind: str = "compute"
    zombie_of: str | None = None


class Usage(NamedTuple):
    """NVML's readings of the use of one device.

    Attributes:
        compute: The number of compute processes.
        mps: The number of MPS clients.
        sees_all: Whether every process is visible. In a container, an empty list proves nothing.
        total_mib: The total memory in MiB.
        used_mib: The memory in use in MiB. If the memory is the host's, the sum over the processes.
        reserve_known: Whether `used_mib` excludes the driver's reserve.
        graphics_mib: The memory of the listed graphics processes, in MiB.
        mode: The compute mode, one of `ComputeMode`.
        awaits_reset: Whether some memory stays disabled until the GPU is reset.
        is_wsl: Whether this is WSL, where Windows also uses the device.
        has_host_memory: Whether the memory is the host's, or a NUMA node of the host. On such a
            node, memory in use need not belong to a process.
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

    @property
    def unexplained_mib(self) -> float | None:
        """Return the used memory in MiB without the memory of graphics processes.

        The result is None if the used memory is unknown or the device uses host memory.
        """
        is_known = self.used_mib is not None and not self.has_host_memory
        return (self.used_mib or 0.0) - self.graphics_mib if is_known else None


class Gauges(NamedTuple):
    """Readings that are only displayed.

    For a MIG instance, the temperature and the power are those of its GPU.

    Attributes:
        utilisation: The percentage of time in which the device is active.
        temperature_c: The temperature in degrees Celsius.
        power_w: The power draw in watts.
        power_limit_w: The power in watts above which the driver slows the GPU down.
    """

    utilisation: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None


def _number(index: int, instance: int | None) -> str:
    return str(index) if instance is None else f"{index}:{instance}"
