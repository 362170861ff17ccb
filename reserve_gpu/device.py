"""The things that are talked about: devices, what is using them, and who holds them.

All of them are plain, immutable values. `None` always means "not reported", never zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform
else:
    dataclass_transform = lambda **_: lambda cls: cls  # noqa: E731 - for the type checker alone


@dataclass_transform(frozen_default=True)
class Value:
    """An immutable value with the fields that its class declares, like a frozen dataclass.

    Those compile code for each class, 0.5 ms a piece; a notebook would wait for it.
    """

    def __init__(self, *values: Any, **fields: Any) -> None:
        names = tuple(type(self).__annotations__)
        given = dict(zip(names, values, strict=False), **fields)
        if len(values) > len(names) or not given.keys() <= set(names):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(names)}")
        self.__dict__.update(
            {name: given[name] if name in given else getattr(type(self), name) for name in names}
        )

    def replace(self, **fields: Any) -> Self:
        """The same, but for these fields."""
        return type(self)(**{**self.__dict__, **fields})

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} can't be changed")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"


class State:
    """How a device stands, in a word. The first three are what its readings say of its use."""

    IDLE = "idle"
    BUSY = "busy"
    UNKNOWN = "unknown"
    FREE = "free"  # idle, and not reserved
    RESERVED = "reserved"
    BROKEN = "broken"  # can't be used, or not be read


class Device(Value):
    """What CUDA can use: a whole GPU, or one MIG instance of it.

    index: of the GPU, as NVML and nvidia-smi number it (PCI bus order).
    instance: number of the MIG instance on that GPU, None for a whole GPU.
    memory_mib: total memory in MiB.
    link_width: PCIe lanes in use now.
    gpu_uuid, old_name: of an instance, its GPU's UUID and its name in CUDA before it had its own.
    """

    index: int
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
        return f"<{self.label}: {self.name or 'a GPU without a name'}, {self.uuid}>"

    @property
    def label(self) -> str:
        """`GPU2`, or `GPU1:0` for a MIG instance: what people call it and can type."""
        return _label(self.index, self.instance)


class Fault(Value):
    """A place where a device should be, and why there is none to use. index, instance: as there."""

    index: int
    reason: str
    instance: int | None = None

    @property
    def label(self) -> str:
        """As a device's."""
        return _label(self.index, self.instance)


class Process(Value):
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


class Usage(Value):
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


class Holder(Value):
    """The process that holds a lock, and what it says of itself.

    seen: the kernel's own list of locks names this pid; all the rest was written by somebody else:
        it is shown, cleaned, and never decides anything.
    confirmed: the record names the same pid.
    elsewhere: the pid belongs to another PID namespace, where it means another process.
    since: seconds since the epoch. last_cell: when it last ended a cell after it wrote its record.
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


class Row(Value):
    """One device in the status of a machine.

    state: in a word, one of State's. reason: why, where that needs saying.
    used_mib, utilisation: memory in use in MiB, and percent of the time.
    holders: who has reserved it; several where they share it.
    is_mine: this process is one of them.
    is_unused: reserved, but no process of its holders' is on it; None if that can't be seen.
    is_unreserved_use: in use by somebody who has not reserved it; None if that can't be seen.
    next_in_line: the place in the line, from 1, of the first waiter who could use it.
    """

    label: str
    state: str
    device: Device | None = None
    used_mib: float | None = None
    utilisation: int | None = None
    processes: tuple[Process, ...] = ()
    holders: tuple[Holder, ...] = ()
    reason: str = ""
    is_mine: bool = False
    is_unused: bool | None = False
    is_unreserved_use: bool | None = False
    next_in_line: int | None = None


class Request(Value):
    """What is asked for.

    devices: as typed, none for "any". count: how many, in either case.
    min_memory_mib: total memory that each must have. model: text that its name must contain.
    exclude: devices that will not do, as typed.
    share: also what others hold. note: for others to read.
    """

    devices: tuple[str, ...] = ()
    count: int = 1
    min_memory_mib: float = 0.0
    model: str = ""
    exclude: tuple[str, ...] = ()
    share: bool = False
    note: str | None = None


class Refusal(Value):
    """Why one device was not taken.

    state: in a word: `free` (others were missing), reserved, busy, unknown, broken or unfit.
    way: how it could be had all the same: by `name`, by `share` or by `wait`.
    holder: who has it, or waits for it.
    """

    label: str
    state: str
    reason: str
    way: str = ""
    holder: Holder | None = None


def _label(index: int, instance: int | None) -> str:
    return f"GPU{index}" if instance is None else f"GPU{index}:{instance}"
