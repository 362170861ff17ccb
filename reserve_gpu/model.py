"""The values that are talked about: devices, what uses them, who holds them, what is asked for.

All of them are plain and immutable, and cheap to define, as every shell loads them. `None` always
means "not reported", never zero. Memory is in MiB, and moments are in seconds since the epoch
unless a name says otherwise.
"""

import math
from enum import Enum
from typing import NamedTuple


class State(Enum):
    """How a device stands, in a word."""

    IDLE = "idle"  # by its readings alone: nothing runs on it
    FREE = "free"  # idle, and nobody has reserved it or waits for it
    RESERVED = "reserved"
    AWAITED = "awaited"  # free, but somebody in the queue comes first
    BUSY = "busy"
    PROHIBITED = "prohibited"  # its compute mode lets nobody use it
    UNKNOWN = "unknown"  # whether it is idle or reserved can't be seen
    BROKEN = "broken"  # the driver can't use it
    UNFIT = "unfit"  # not what was asked for


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
    MEMORY_UNKNOWN = "it does not say how much memory it has"
    SECOND_INSTANCE = "this driver gives a process one MIG instance only"


class Device(NamedTuple):
    """What CUDA can use: a whole GPU, or one MIG instance of it.

    index: of the GPU, as NVML and nvidia-smi number it (PCI bus order).
    instance: number of the MIG instance on that GPU, None for a whole GPU.
    memory_mib: total memory.
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

    def __repr__(self) -> str:
        name, uuid = ascii(self.name)[1:-1], ascii(self.uuid)[1:-1]  # the driver's words, escaped
        return f"<{self.label}: {name if self.name else 'a GPU without a name'}, {uuid}>"

    @property
    def number(self) -> str:
        """`2`, or `1:0` for a MIG instance: what people type for it."""
        return _number(self.index, self.instance)

    @property
    def label(self) -> str:
        """`GPU2`, or `GPU1:0`: what people call it."""
        return f"GPU{self.number}"


class Fault(NamedTuple):
    """A place where a device should be, and why none there can be used.

    index, instance: as of a Device.
    """

    index: int  # type: ignore[assignment]
    reason: str
    instance: int | None = None

    @property
    def number(self) -> str:
        """As of a Device."""
        return _number(self.index, self.instance)

    @property
    def label(self) -> str:
        """As of a Device."""
        return f"GPU{self.number}"


class Process(NamedTuple):
    """A process on a device.

    memory_mib: device memory that it holds. user, command: as the system says.
    has_reserved: it, or a process that it descends from, holds the device; None if that can't be
        seen from here.
    """

    pid: int
    memory_mib: int | None = None
    user: str | None = None
    command: str | None = None
    has_reserved: bool | None = None


class Usage(NamedTuple):
    """What NVML reports about the use of one device.

    compute, mps: number of compute processes and of MPS clients.
    sees_all: an empty process list means that there are no processes (not so in a container).
    used_mib: memory in use; without the driver's own reserve where reserve_known.
    graphics_mib: memory that listed graphics processes account for.
    mode: the compute mode, one of ComputeMode.
    """

    compute: int | None = None
    mps: int | None = None
    sees_all: bool = True
    total_mib: float | None = None
    used_mib: float | None = None
    reserve_known: bool = True
    graphics_mib: float = 0.0
    mode: int | None = None

    @property
    def unexplained_mib(self) -> float | None:
        """Memory in use that no graphics process accounts for."""
        return None if self.used_mib is None else self.used_mib - self.graphics_mib


class Holder(NamedTuple):
    """The process that has a lock, and what it says of itself.

    seen: the kernel's own list of locks names this pid. The rest was written by somebody else: it
        is shown, made fit to print, and never decides anything.
    confirmed: the record names the same pid as the kernel.
    elsewhere: the pid belongs to another PID namespace, where it means another process.
    since: when it took the lock. last_cell: when it last ended a cell after that.
    """

    pid: int | None = None
    user: str | None = None
    notebook: str | None = None
    note: str | None = None
    since: float | None = None
    seen: bool = False
    confirmed: bool = False
    elsewhere: bool = False
    last_cell: float | None = None


class Ticket(NamedTuple):
    """A place in the queue.

    number: the clock since boot when its holder joined, in ns; the lowest comes first.
    name: of its file. wants: UUIDs of the devices that its holder could use, None for any.
    asks: the request in words, as its holder wrote it. needs: how many devices at once.
    beat: when its holder last gave a sign of life; only whether it changes means anything.
    """

    number: int
    name: str
    wants: frozenset[str] | None
    holder: Holder
    asks: str | None = None
    beat: int = 0
    needs: int = 1

    def could_use(self, uuid: str) -> bool:
        """Whether its holder waits for that device too."""
        return self.wants is None or uuid in self.wants


class Request(NamedTuple):
    """What is asked for.

    devices: as typed, none for "any". count: how many where none are named, None for "one, or all
        that I have already". min_memory_mib: total memory that each must have.
    model: text that its name must contain. exclude: devices that will not do, as typed.
    share: together with others who share. note: for others to read.
    """

    devices: tuple[str, ...] = ()
    count: int | None = None  # type: ignore[assignment]
    min_memory_mib: float = 0.0
    model: str = ""
    exclude: tuple[str, ...] = ()
    share: bool = False
    note: str | None = None

    @property
    def needed(self) -> int:
        """How many devices that makes."""
        return len(self.devices) or self.count or 1


class Refusal(NamedTuple):
    """Why one device was not taken.

    state: FREE where it was others that were missing.
    usage: the reading that decided, or that there is beside the state. processes: who is on it,
        None where nobody has asked yet. holder: who has it, or waits for it.
    unfit: why it can never be what was asked for. fault: why it can't be used or asked, as the
        driver or the system says.
    """

    device: Device | Fault
    state: State
    usage: Usage | None = None
    processes: tuple[Process, ...] | None = None
    holder: Holder | None = None
    unfit: Unfit | None = None
    fault: str | None = None

    @property
    def label(self) -> str:
        """Of the device."""
        return self.device.label


class Caution(NamedTuple):
    """What there is to be said against a device that was taken all the same.

    state: of its use. processes: who is on it, besides this process. sharers: who shares it.
    """

    device: Device
    state: State
    usage: Usage
    processes: tuple[Process, ...] = ()
    sharers: tuple[Holder, ...] = ()


class Waiting(NamedTuple):
    """How a wait stands.

    place: in the queue, 1 is next. waited_s, limit_s: for how long so far, and at most.
    refusals: why no device can be had yet.
    """

    request: Request
    place: int
    waited_s: float
    refusals: tuple[Refusal, ...]
    limit_s: float = math.inf


class Row(NamedTuple):
    """One device in the status of a machine.

    device: a Fault for one that can't be used. reason: why, where the state alone does not say.
    usage: its reading, None where there is none. utilisation: percent of the time.
    holders: who has reserved it; several where they share it.
    is_mine: this process is one of them.
    is_unused: reserved, but no process of its holders' is on it; None if that can't be seen.
    is_unreserved_use: in use by somebody who has not reserved it; None if that can't be seen.
    next_in_queue: the place, from 1, of the first one in the queue who could use it.
    """

    device: Device | Fault
    state: State
    usage: Usage | None = None
    utilisation: int | None = None
    processes: tuple[Process, ...] = ()
    holders: tuple[Holder, ...] = ()
    reason: str | None = None
    is_mine: bool = False
    is_unused: bool | None = False
    is_unreserved_use: bool | None = False
    next_in_queue: int | None = None

    @property
    def label(self) -> str:
        """Of the device."""
        return self.device.label


def _number(index: int, instance: int | None) -> str:
    return str(index) if instance is None else f"{index}:{instance}"
