"""Is a device idle or busy, by what NVML reports of it? Pure functions of a reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model.devices import GRAPHICS, ComputeMode, Device, Process, State, Usage

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


DEFAULT_IDLE_MIB = 1024.0
DESKTOP_MIB = 1024.0  # of one process
DEFAULT_IDLE_FRACTION = 0.05
# Graphics processes of a desktop hold up to 2 GiB together. Renderers and simulators hold more, and
# are in no list of compute processes (https://github.com/google-deepmind/mujoco/issues/461).
DESKTOP_TOTAL_MIB = 2048.0
GRAPHICS_LIMIT_MIB = 4096.0
GRAPHICS_FRACTION = 0.5
# The first version of NVML's memory reading, all that drivers before 510 have, counts the driver's
# own reserve as used: 100 to 600 MB on an idle card
# (https://github.com/wookayin/gpustat/issues/141).
DRIVER_RESERVE_MIB = 640.0


def is_desktop(process: Process, drawing: Collection[int]) -> bool:
    """Tell whether a process that computes and draws is a desktop's, and no job.

    Remote desktops, applets and browsers stand in both of NVML's lists, with 14 to 596 MiB in what
    people have posted; a simulator that renders and trains has gigabytes.
    process: one of the list of compute processes. drawing: the pids in that of graphics processes.
    """
    is_small = process.memory_mib is not None and process.memory_mib <= DESKTOP_MIB
    return is_small and process.pid in drawing


def graphics_limit_mib(total_mib: float | None, idle_mib: float | None = None) -> float:
    """Return the memory that graphics processes may hold together on an idle device, in MiB.

    It is 4 GiB or half of the device's memory, whichever is less, but at least 2 GiB.

    Args:
        total_mib: The device's memory in MiB, None if unknown.
        idle_mib: The user's own limit for memory in use, None for the default. It can only raise
            the limit for graphics.
    """
    limit = GRAPHICS_LIMIT_MIB
    if total_mib:
        limit = max(DESKTOP_TOTAL_MIB, min(limit, total_mib * GRAPHICS_FRACTION))
    return max(limit, idle_mib or 0.0)


def split_graphics(
    processes: Sequence[Process], total_mib: float | None, idle_mib: float | None = None
) -> tuple[list[Process], list[Process]]:
    """Return the processes that use a device, and apart from them the processes of a desktop.

    If graphics processes together hold more than `graphics_limit_mib`, the largest of them use the
    device, until the rest is within the limit.

    Args:
        processes: The processes of all kinds on the device.
        total_mib: The device's memory in MiB, None if unknown.
        idle_mib: The user's own limit for memory in use, None for the default.
    """
    left_mib = graphics_limit_mib(total_mib, idle_mib)
    drawing = set()
    graphics = (process for process in processes if process.kind == GRAPHICS)
    for process in sorted(graphics, key=lambda process: process.memory_mib or 0):
        left_mib -= process.memory_mib or 0
        if left_mib >= 0:
            drawing.add(process)
    uses = [process for process in processes if process not in drawing]
    return uses, [process for process in processes if process in drawing]


def judge(usage: Usage, idle_mib: float | None = None) -> State:
    """Tell whether the device is IDLE, BUSY, PROHIBITED or UNKNOWN.

    A device is idle if nothing shows use, and at least one reading can be trusted.
    idle_mib: memory in use up to which it is idle, None for the default.
    """
    if usage.mode == ComputeMode.PROHIBITED:
        return State.PROHIBITED
    if usage.compute or usage.mps:
        return State.BUSY
    if is_rendered_on(usage, idle_mib):
        return State.BUSY
    if usage.unexplained_mib is not None:
        is_idle = usage.unexplained_mib <= idle_limit_mib(usage, idle_mib)
        return State.IDLE if is_idle else State.BUSY
    if usage.compute is None or not usage.sees_all:
        return State.UNKNOWN
    return State.IDLE


def is_rendered_on(usage: Usage, idle_mib: float | None = None) -> bool:
    """Return whether graphics processes hold more memory than those of a desktop."""
    return usage.graphics_mib > graphics_limit_mib(usage.total_mib, idle_mib)


def idle_limit_mib(usage: Usage, idle_mib: float | None = None) -> float:
    """Return the memory in use, in MiB, up to which a device without processes is idle.

    It is 1 GiB or 5 % of its memory, whichever is less, but never less than the driver's own
    reserve if the reading counts that as used.
    idle_mib: a limit that somebody has set instead; None for the default.
    """
    if idle_mib is not None:
        return idle_mib
    limit = DEFAULT_IDLE_MIB
    if usage.total_mib:
        limit = min(limit, usage.total_mib * DEFAULT_IDLE_FRACTION)
    return limit if usage.reserve_known else max(limit, DRIVER_RESERVE_MIB)


def is_usable(usage: Usage) -> bool:
    """Tell whether CUDA would let one more process onto the device."""
    if usage.mode == ComputeMode.EXCLUSIVE_PROCESS:
        return not (usage.compute or usage.mps)
    return usage.mode != ComputeMode.PROHIBITED


def promisable_mib(
    device: Device,
    usage: Usage,
    parts: Sequence[tuple[float | None, float | None]],
    own: tuple[float, float | None] = (0.0, 0.0),
) -> float | None:
    """Return how much memory can still be promised, in MiB; None if it can't be read.

    Each part counts in full, even if its holder uses less, and counts as what is used if that is
    more. All other memory in use belongs to processes without a part, which may keep it.
    parts: for each other sharer, the size that it was promised and the memory that its processes
    use. The size is None for a sharer that may use all; the use is None if it can't be seen.
    own: the same for the process that asks.
    """
    if device.usable_mib is None or usage.used_mib is None:
        return None
    is_exclusive = usage.mode == ComputeMode.EXCLUSIVE_PROCESS and bool(parts)
    is_open = is_usable(usage) or bool(own[1])  # in exclusive mode this may be the one process
    parts = [*parts, own]
    promised = [size for size, _ in parts if size is not None]
    if len(promised) < len(parts) or is_exclusive or not is_open:
        return 0.0
    uses = [use for _, use in parts if use is not None]
    if len(uses) < len(parts):  # in a container, say
        taken = max(sum(promised), usage.used_mib)
    else:
        strangers_mib = max(0.0, usage.used_mib - sum(uses))
        taken = strangers_mib + sum(max(size or 0.0, use or 0.0) for size, use in parts)
    return max(0.0, device.usable_mib - taken)
