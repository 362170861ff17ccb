"""Pure functions that use NVML readings to decide whether a device is idle or busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model.devices import COMPUTE, GRAPHICS, ComputeMode, Device, Process, State, Usage

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from reserve_gpu.model.clocks import Instant
    from reserve_gpu.model.devices import UseSample


DEFAULT_IDLE_MIB = 1024.0
DESKTOP_MIB = 1024.0  # maximum memory of a single desktop process
DEFAULT_IDLE_FRACTION = 0.05
# A desktop's graphics processes hold up to 2 GiB in total. Renderers and simulators hold more, and
# NVML does not list them as compute processes
# (https://github.com/google-deepmind/mujoco/issues/461).
DESKTOP_TOTAL_MIB = 2048.0
GRAPHICS_LIMIT_MIB = 4096.0
GRAPHICS_FRACTION = 0.5
# Minimum memory limit for an idle device when NVML counts the driver's reserve as used memory.
# Version 1 of the memory query, the only version before driver 510, counts a reserve of
# 100 to 600 MB (https://github.com/wookayin/gpustat/issues/141).
DRIVER_RESERVE_MIB = 640.0
# In these modes, a process with a context keeps all others off the device.
EXCLUSIVE = frozenset({ComputeMode.EXCLUSIVE_THREAD, ComputeMode.EXCLUSIVE_PROCESS})
# A sample that seems to be older than OLDEST_SAMPLE_S by every clock, or more than EARLY_SAMPLE_S
# ahead, can't be understood. Drivers keep samples for seconds or minutes. Driver 580 keeps them for
# 15 s on an H100.
OLDEST_SAMPLE_S = 3600.0
EARLY_SAMPLE_S = 5.0
MOST_PERCENT = 100


def is_desktop(process: Process, drawing: Collection[int]) -> bool:
    """Return whether a compute process belongs to a desktop.

    NVML lists remote desktops, applets and browsers as both compute and graphics processes. In
    nvidia-smi output that users have posted, these processes hold 14 to 596 MiB, whereas a
    simulator that renders and trains holds gigabytes.

    Args:
        process: The process, from the list of compute processes.
        drawing: The pids of the graphics processes.
    """
    is_small = process.memory_mib is not None and process.memory_mib <= DESKTOP_MIB
    return is_small and process.pid in drawing


def has_no_memory(process: Process, mode: int | None) -> bool:
    """Return whether a process does not count as use, because it holds no device memory.

    NVML can list a process that has only counted the devices, or a PyTorch process that sees all
    GPUs, with 0 MiB on each GPU (https://github.com/llm-d-incubation/llm-d-rl-time-slicing/issues/148,
    https://github.com/pytorch/pytorch/issues/54564). A process that is just starting CUDA might
    also be listed like this for a moment. Without a reservation it isn't protected at that moment,
    just as it isn't protected before it is listed.

    An MPS client always counts as use, because before Volta, its memory belongs to the MPS server
    (https://docs.nvidia.com/deploy/mps/). In an exclusive mode, a process blocks the device even if
    it holds no memory.

    Args:
        process: The process, with memory None if it is unknown.
        mode: The device's compute mode, or None if it is unknown.
    """
    return process.kind == COMPUTE and process.memory_mib == 0 and mode not in EXCLUSIVE


def graphics_limit_mib(total_mib: float | None, idle_mib: float | None = None) -> float:
    """Return the maximum total memory of the graphics processes on an idle device, in MiB.

    The limit is 4 GiB or half of the device's memory, whichever is less, but at least 2 GiB.

    Args:
        total_mib: The device's memory in MiB, or None if it is unknown.
        idle_mib: The user's limit for memory in use on an idle device, in MiB, or None for the
            default. It can raise the limit for graphics processes, but not lower it.
    """
    limit = GRAPHICS_LIMIT_MIB
    if total_mib:
        limit = max(DESKTOP_TOTAL_MIB, min(limit, total_mib * GRAPHICS_FRACTION))
    return max(limit, idle_mib or 0.0)


def split_graphics(
    processes: Sequence[Process], total_mib: float | None, idle_mib: float | None = None
) -> tuple[list[Process], list[Process]]:
    """Split a device's processes into processes that are using it and desktop processes.

    If the graphics processes together exceed `graphics_limit_mib`, the largest ones count as using
    the device, until the rest are within the limit.

    Args:
        processes: The processes of all kinds on the device.
        total_mib: The device's memory in MiB, or None if it is unknown.
        idle_mib: The user's limit for memory in use on an idle device, in MiB, or None for the
            default.

    Returns:
        The processes that are using the device, and the desktop processes.
    """
    remaining_mib = graphics_limit_mib(total_mib, idle_mib)
    drawing = set()
    graphics = (process for process in processes if process.kind == GRAPHICS)
    for process in sorted(graphics, key=lambda process: process.memory_mib or 0):
        remaining_mib -= process.memory_mib or 0
        if remaining_mib >= 0:
            drawing.add(process)
    uses = [process for process in processes if process not in drawing]
    return uses, [process for process in processes if process in drawing]


def split_uses(
    processes: Sequence[Process],
    total_mib: float | None,
    mode: int | None,
    idle_mib: float | None = None,
) -> tuple[list[Process], list[Process]]:
    """Split a device's processes into processes that count as use and all others.

    Args:
        processes: The processes of all kinds on the device.
        total_mib: The device's memory in MiB, or None if it is unknown.
        mode: The device's compute mode, or None if it is unknown.
        idle_mib: The user's limit for memory in use on an idle device, in MiB, or None for the
            default.

    Returns:
        The processes that are using the device, and the desktop processes and processes without
        device memory.
    """
    uses, background = split_graphics(processes, total_mib, idle_mib)
    background += [process for process in uses if has_no_memory(process, mode)]
    return [process for process in uses if not has_no_memory(process, mode)], background


def judge(usage: Usage, idle_mib: float | None = None) -> State:
    """Return a device's state, which is IDLE, BUSY, PROHIBITED or UNKNOWN.

    A device is idle if none of its readings shows use and at least one of them is reliable.

    Args:
        usage: The device's usage, as reported by NVML.
        idle_mib: The maximum memory in use on an idle device, in MiB, or None for the default.
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


def is_surely_busy(usage: Usage, idle_mib: float | None = None) -> bool:
    """Return whether the memory in use shows that a device is busy, whatever its processes are.

    `judge` returns BUSY or PROHIBITED for such a device. This function does not need the numbers of
    processes and the graphics processes' memory.

    Args:
        usage: The device's usage, as reported by NVML.
        idle_mib: The maximum memory in use on an idle device, in MiB, or None for the default.
    """
    if usage.used_mib is None or usage.has_host_memory:
        return False
    desktop_mib = graphics_limit_mib(usage.total_mib, idle_mib)
    return usage.used_mib > desktop_mib + idle_limit_mib(usage, idle_mib)


def is_rendered_on(usage: Usage, idle_mib: float | None = None) -> bool:
    """Return whether the graphics processes hold more memory than a desktop would."""
    return usage.graphics_mib > graphics_limit_mib(usage.total_mib, idle_mib)


def idle_limit_mib(usage: Usage, idle_mib: float | None = None) -> float:
    """Return the maximum memory in use on an idle device without processes, in MiB.

    The default is 1 GiB or 5 % of the device's memory, whichever is less. If NVML counts the
    driver's reserve as used memory, the default is at least `DRIVER_RESERVE_MIB`.

    Args:
        usage: The device's usage, as reported by NVML.
        idle_mib: The user's limit in MiB, or None for the default.
    """
    if idle_mib is not None:
        return idle_mib
    limit = DEFAULT_IDLE_MIB
    if usage.total_mib:
        limit = min(limit, usage.total_mib * DEFAULT_IDLE_FRACTION)
    return limit if usage.reserve_known else max(limit, DRIVER_RESERVE_MIB)


def is_usable(usage: Usage) -> bool:
    """Return whether the device's compute mode allows another process to use the device."""
    if usage.mode == ComputeMode.EXCLUSIVE_PROCESS:
        return not (usage.compute or usage.mps)
    return usage.mode != ComputeMode.PROHIBITED


def unlisted_mib(usage: Usage) -> float:
    """Return the memory in use that belongs to no listed process, in MiB, or 0 if it is unknown.

    It can be the managed memory of a listed process, because some drivers leave managed memory out
    of the process's size (https://github.com/gpuopenanalytics/pynvml/issues/63).

    Args:
        usage: The device's usage, as reported by NVML.
    """
    # A NUMA node also holds pages of the operating system.
    if usage.used_mib is None or usage.listed_mib is None or usage.has_host_memory:
        return 0.0
    reserve_mib = 0.0 if usage.reserve_known else DRIVER_RESERVE_MIB
    return max(0.0, usage.used_mib - usage.listed_mib - reserve_mib)


def has_managed_memory(
    usage: Usage, processes: Sequence[Process], idle_mib: float | None = None
) -> bool:
    """Return whether a holder's process might use more memory than the driver lists for it.

    This is the case if it is the only process on the device, and more memory is in use than on an
    idle device.

    Args:
        usage: The device's usage, as reported by NVML.
        processes: The processes on the device, except a desktop's and other users' processes
            without device memory.
        idle_mib: The user's limit for memory in use on an idle device, in MiB, or None for the
            default.
    """
    is_holders = len(processes) == 1 and processes[0].has_reserved is True
    return is_holders and unlisted_mib(usage) > idle_limit_mib(usage, idle_mib)


def promisable_mib(
    device: Device,
    usage: Usage,
    parts: Sequence[tuple[float | None, float | None]],
    own: tuple[float, float | None] = (0.0, 0.0),
) -> float | None:
    """Return the device memory that can still be reserved, in MiB.

    Each reservation takes up its reserved size or the memory that its holder is using, whichever is
    larger. Memory used by processes without a reservation is not available. Memory of no listed
    process can be the holders' managed memory, so it counts towards the parts of holders that are
    using the device, as far as these parts have room. The available memory never exceeds the
    device's free memory, and all reserved sizes together never exceed the device's memory.

    Args:
        device: The device.
        usage: The device's usage, as reported by NVML.
        parts: The reserved size and used memory of each other holder, in MiB. The size is None for
            a holder without a memory limit. The used memory is None if it can't be read.
        own: The reserved size and used memory of the requesting process, in MiB.

    Returns:
        The available memory, or None if the device's total or used memory is unknown.
    """
    if device.usable_mib is None or usage.used_mib is None:
        return None
    is_exclusive = usage.mode == ComputeMode.EXCLUSIVE_PROCESS and bool(parts)
    # In exclusive mode, the only allowed process might be the requesting process.
    is_open = is_usable(usage) or bool(own[1])
    parts = [*parts, own]
    promised = [size for size, _ in parts if size is not None]
    if len(promised) < len(parts) or is_exclusive or not is_open:
        return 0.0
    uses = [use for _, use in parts if use is not None]
    if len(uses) < len(parts):  # some used memory is unknown, for example in a container
        taken = max(sum(promised), usage.used_mib)
    else:
        unreserved_mib = max(0.0, usage.used_mib - sum(uses))
        room_mib = sum(max(0.0, (size or 0.0) - use) for size, use in parts if use)
        managed_mib = min(unlisted_mib(usage), room_mib, unreserved_mib)
        reserved_mib = sum(max(size or 0.0, use or 0.0) for size, use in parts)
        taken = unreserved_mib - managed_mib + reserved_mib
    return max(0.0, device.usable_mib - taken)


def period_start_s(
    sample: UseSample, since: Instant, now: Instant, monotonic: float
) -> float | None:
    """Return the start of a period by the clock of a sample, in seconds.

    Drivers stamp the samples by the wall clock or by a clock that starts at boot
    (https://github.com/NVIDIA/gpu-metrics-agent/issues/37). The nearest clock is assumed.

    Args:
        sample: The sample.
        since: The start of the period.
        now: The time of the reading.
        monotonic: The time of the reading by CLOCK_MONOTONIC, which stops during suspension.

    Returns:
        The start of the period, or None if the time of the sample fits no clock.
    """
    period_s = now.boot - since.boot
    clocks = (  # the current time and the start of the period
        (now.wall, min(since.wall, now.wall - period_s)),  # the wall clock might have been set
        (now.boot, since.boot),
        (monotonic, monotonic - period_s),
    )
    at, start = min(clocks, key=lambda clock: abs(clock[0] - sample.time_s))
    has_clock = -EARLY_SAMPLE_S <= at - sample.time_s <= OLDEST_SAMPLE_S
    return max(0.0, start) if has_clock else None


def samples_start_s(
    samples: Iterable[UseSample], since: Instant, now: Instant, monotonic: float
) -> float | None:
    """Return the time since which the driver's samples must be read again, in seconds.

    Driver 580 on an H100 returns one entry for each process. Its percentages are averages over the
    time since the requested start, at most over about 15 s, and its time is that of the newest
    sample, even if the process has been idle since. Entries from before the period therefore look
    like use in the period, unless they are requested by the start of the period.

    Args:
        samples: The samples of all processes since any time.
        since: The start of the period.
        now: The time of the reading.
        monotonic: The time of the reading by CLOCK_MONOTONIC.

    Returns:
        The start of the period by the clock of the samples. None if no sample shows any use, or if
        the time of a sample that shows use fits no clock.
    """
    used = [sample for sample in samples if any(sample.percents)]
    starts = [period_start_s(sample, since, now, monotonic) for sample in used]
    known = [start for start in starts if start is not None]
    return min(known, default=None) if len(known) == len(starts) else None


def recent_use(
    samples: Iterable[UseSample],
    since: Instant,
    now: Instant,
    monotonic: float,
    suspects: Collection[int] = (),
) -> dict[int, int | None]:
    """Return the processes that have used a device since a given time, according to samples.

    If the assumed clock is wrong, a working process seems to have only old samples, so old or
    missing samples prove nothing while the device is active. Percentages can be arbitrary numbers,
    for example after a process has become a zombie (https://github.com/Syllo/nvtop/pull/110).

    Args:
        samples: The samples of all processes, read since `samples_start_s` if that is known.
        since: The start of the period.
        now: The time of the reading.
        monotonic: The time of the reading by CLOCK_MONOTONIC.
        suspects: The pids of the processes on the device if it is active at this moment.

    Returns:
        The percentage of time that each process spent computing, keyed by pid. None if a process's
        samples can't be understood.
    """
    recent: dict[int, int | None] = {}
    unclear = set()
    for sample in sorted(samples, key=lambda sample: sample.time_s):
        if not any(sample.percents):
            continue
        start_s = period_start_s(sample, since, now, monotonic)
        if start_s is not None and sample.time_s <= start_s:
            continue
        if start_s is not None and max(sample.percents) <= MOST_PERCENT:
            recent[sample.pid] = sample.percents[0]
        else:
            unclear.add(sample.pid)
    return dict.fromkeys(unclear) | recent or dict.fromkeys(suspects)
