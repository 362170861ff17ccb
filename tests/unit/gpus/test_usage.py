"""Tests of the rules that decide from readings whether a device is idle, and of use samples."""

from __future__ import annotations

from itertools import product

import pynvml
import pytest

from reserve_gpu.gpus import nvml, usage
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import (
    COMPUTE,
    GRAPHICS,
    MPS,
    ComputeMode,
    Process,
    State,
    Usage,
    UseSample,
)

IDLE = Usage(compute=0, mps=0, total_mib=40960, used_mib=0)
PROHIBITED, EXCLUSIVE = ComputeMode.PROHIBITED, ComputeMode.EXCLUSIVE_PROCESS


@pytest.mark.parametrize(
    "reading",
    [
        IDLE,
        Usage(compute=0, mps=0),  # no memory reading, but all processes are visible
        Usage(used_mib=0, total_mib=40960, sees_all=False),  # no process list, but memory
        IDLE._replace(used_mib=3048, graphics_mib=2024),
        IDLE._replace(used_mib=4096, graphics_mib=4096),
        IDLE._replace(used_mib=6144, graphics_mib=3072, total_mib=6144, has_host_memory=True),
        IDLE._replace(mode=EXCLUSIVE),
    ],
)
def test_idle(reading: Usage) -> None:
    """A device is idle if one reliable reading exists and no reading shows use."""
    assert usage.judge(reading) is State.IDLE


@pytest.mark.parametrize(
    "reading",
    [
        IDLE._replace(compute=1),
        IDLE._replace(mps=1),
        IDLE._replace(used_mib=3049, graphics_mib=2024),
        IDLE._replace(used_mib=4097, graphics_mib=4097),
        IDLE._replace(used_mib=2049, graphics_mib=2049, total_mib=2048),
        IDLE._replace(graphics_mib=9000, has_host_memory=True),
    ],
)
def test_busy(reading: Usage) -> None:
    """Any sign of use makes a device busy."""
    assert usage.judge(reading) is State.BUSY


MEMORY_MIB = [0, 1024, 2048, 4096, 5120, 5121, 9000, 40000]


@pytest.mark.parametrize("idle_mib", [None, 0, 3000])
@pytest.mark.parametrize("total_mib", [None, 2048, 6144, 40960])
def test_a_surely_busy_device_is_not_idle(total_mib: float | None, idle_mib: float | None) -> None:
    """Memory makes a device surely busy only if `judge` does not find it idle."""
    verdicts = set()
    for used_mib, graphics_mib in product([None, *MEMORY_MIB], MEMORY_MIB):
        reading = IDLE._replace(total_mib=total_mib, used_mib=used_mib, graphics_mib=graphics_mib)
        for each in (reading, reading._replace(has_host_memory=True)):
            is_busy = usage.is_surely_busy(each, idle_mib)
            verdicts.add(is_busy)
            assert not (is_busy and usage.judge(each, idle_mib) is State.IDLE), each
    assert verdicts == {True, False}


@pytest.mark.parametrize("reading", [Usage(), IDLE._replace(compute=1)])
def test_prohibited(reading: Usage) -> None:
    """A device in prohibited mode is prohibited, whatever the other readings are."""
    assert usage.judge(reading._replace(mode=PROHIBITED)) is State.PROHIBITED


@pytest.mark.parametrize(
    "reading",
    [
        Usage(compute=0, mps=0, sees_all=False),
        Usage(mps=0),
    ],
)
def test_unknown(reading: Usage) -> None:
    """A device without a reliable reading is unknown, not idle."""
    assert usage.judge(reading) is State.UNKNOWN


@pytest.mark.parametrize(
    ("reading", "configured", "limit"),
    [
        (Usage(), None, 1024),
        (Usage(total_mib=10240), None, 512),
        (Usage(total_mib=2048, reserve_known=False), None, 640),
        (Usage(reserve_known=False), None, 1024),
        (Usage(total_mib=2048, reserve_known=False), 0.0, 0),
    ],
)
def test_idle_limit(reading: Usage, configured: float | None, limit: float) -> None:
    """The limit is the smaller of 1 GiB and 5 %, but at least the reserve, unless it is set."""
    assert usage.idle_limit_mib(reading, configured) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("changes", "configured", "state"),
    [
        ({"used_mib": 3000}, 3000.0, State.IDLE),
        ({"used_mib": 3001}, 3000.0, State.BUSY),
        ({"used_mib": 5000, "graphics_mib": 5000}, 6000.0, State.IDLE),
    ],
)
def test_configured_limit(changes: dict[str, int], configured: float, state: State) -> None:
    """A configured limit applies to all memory, also to graphics memory, but to no process."""
    assert usage.judge(IDLE._replace(**changes), configured) is state  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (IDLE._replace(mode=PROHIBITED), False),
        (IDLE._replace(mode=EXCLUSIVE), True),
        (IDLE._replace(mode=EXCLUSIVE, compute=1), False),
        (IDLE._replace(mode=EXCLUSIVE, mps=1), False),
    ],
)
def test_usable(reading: Usage, *, expected: bool) -> None:
    """CUDA allows no process on a prohibited device, and only one on an exclusive device."""
    assert usage.is_usable(reading) is expected


@pytest.mark.parametrize(
    ("process", "mode", "expected"),
    [
        (Process(1, 0), None, True),
        (Process(1, 0), ComputeMode.EXCLUSIVE_PROCESS, False),
        (Process(1, 0), ComputeMode.EXCLUSIVE_THREAD, False),
        (Process(1, 1), ComputeMode.DEFAULT, False),
        (Process(1, None), ComputeMode.DEFAULT, False),
        (Process(1, 0, kind=MPS), ComputeMode.DEFAULT, False),
        (Process(1, 0, kind=GRAPHICS), ComputeMode.DEFAULT, False),
    ],
)
def test_processes_without_memory(process: Process, mode: int | None, *, expected: bool) -> None:
    """Only a compute process whose memory is known to be 0 does not count as use."""
    assert usage.has_no_memory(process, mode) is expected


def test_memory_is_rounded_up() -> None:
    """A process with a single byte of memory has 1 MiB, so it counts as use."""
    entries = [pynvml.c_nvmlProcessInfo_v2_t(7, size) for size in (0, 1, 2**20, 2**20 + 1)]
    sizes = [nvml._process(entry, COMPUTE).memory_mib for entry in entries]
    assert sizes == [0, 1, 1, 2]


# -- samples of use --------------------------------------------------------------------------------

NOW, MONOTONIC = Instant(1_800_000_000.0, 500_000.0), 400_000.0  # suspended for 100,000 s
MINUTE_S, HOUR_S = 60.0, 3600.0
INVALID_PERCENT = 4_294_000_000
MINUTE_AGO = NOW.later(-MINUTE_S)


def sample(time_s: float, gpu: int = 80, pid: int = 1, memory: int = 0) -> UseSample:
    """Return a sample of a process's use of the device and its memory, in percent."""
    return UseSample(pid, time_s, (gpu, memory, 0, 0))


def recent(
    *samples: UseSample, since: Instant = MINUTE_AGO, suspects: tuple[int, ...] = ()
) -> dict[int, int | None]:
    """Return the recent use by each process, in percent."""
    return usage.recent_use(samples, since, NOW, MONOTONIC, suspects)


@pytest.mark.parametrize("clock", [NOW.wall, NOW.boot, MONOTONIC], ids=["wall", "boot", "mono"])
def test_the_clock_of_samples_is_detected(clock: float) -> None:
    """The age of a sample is computed with the clock that the driver uses."""
    assert recent(sample(clock - 1.0)) == {1: 80}
    assert recent(sample(clock + 1.0)) == {1: 80}  # taken during the reading
    assert recent(sample(clock - 59.0, gpu=0, memory=3)) == {1: 0}
    assert recent(sample(clock - 60.0)) == {}
    assert recent(sample(clock - 1.0, gpu=0)) == {}


@pytest.mark.parametrize(
    "time_s",
    [NOW.wall + 6.0, NOW.wall - HOUR_S - 1.0],
)
def test_a_sample_of_an_unknown_clock_is_inconclusive(time_s: float) -> None:
    """If a sample's time fits no clock, the use by its process is unknown."""
    assert recent(sample(time_s)) == {1: None}
    assert recent(sample(time_s, gpu=0)) == {}
    assert recent(sample(time_s), sample(NOW.wall)) == {1: 80}


def test_an_invalid_percentage_is_inconclusive() -> None:
    """A percentage above 100 shows neither that its process is active nor that it is idle."""
    assert recent(sample(NOW.wall, 100)) == {1: 100}
    assert recent(sample(NOW.wall, 101)) == {1: None}
    assert recent(sample(NOW.wall, 0, memory=INVALID_PERCENT)) == {1: None}
    assert recent(sample(NOW.wall - 61.0, INVALID_PERCENT)) == {}
    assert recent(sample(NOW.wall, INVALID_PERCENT), sample(NOW.wall - 1.0, 5)) == {1: 5}
    assert recent(sample(NOW.wall, INVALID_PERCENT, pid=2), sample(NOW.wall, 5)) == {1: 5, 2: None}


def test_old_samples_are_inconclusive_while_the_device_is_active() -> None:
    """If no sample explains why the device is active, each of its processes might be active."""
    old = sample(NOW.boot - 600.0)  # a driver with a slow clock might mean a recent time
    assert recent(old, suspects=(1, 2)) == {1: None, 2: None}
    assert recent(suspects=(1,)) == {1: None}
    assert recent(old) == {}
    assert recent(old, sample(NOW.boot, pid=2), suspects=(1, 2)) == {2: 80}


@pytest.mark.parametrize("set_s", [HOUR_S / 2, -HOUR_S, -1_700_000_000.0])
def test_setting_the_wall_clock_does_not_hide_use(set_s: float) -> None:
    """Use since the last reading is found even if the wall clock was set in between."""
    since = Instant(NOW.wall - MINUTE_S - set_s, NOW.boot - MINUTE_S)
    assert recent(sample(NOW.wall - 1.0), since=since) == {1: 80}
    before = recent(sample(NOW.wall - 1.0 - set_s), since=since)  # from before the clock was set
    assert before == ({1: 80} if set_s > 0 else {1: None})


def start_s(*samples: UseSample, since: Instant = MINUTE_AGO, mono: float = MONOTONIC) -> object:
    """Return the time from which samples should be read again, on the driver's clock."""
    return usage.samples_start_s(samples, since, NOW, mono)


@pytest.mark.parametrize("clock", [NOW.wall, NOW.boot, MONOTONIC], ids=["wall", "boot", "mono"])
def test_samples_are_read_again_since_the_start_of_the_period(clock: float) -> None:
    """The start of the period is on the clock of the samples that show use."""
    assert start_s(sample(clock)) == clock - MINUTE_S
    assert start_s(sample(clock, gpu=0, memory=3), sample(clock - 9.0, pid=2)) == clock - MINUTE_S
    assert start_s(sample(clock, INVALID_PERCENT)) == clock - MINUTE_S


def test_samples_are_not_read_again_if_that_could_hide_use() -> None:
    """Samples are read once if none shows use, or if their clock is unknown."""
    assert start_s() is None
    assert start_s(sample(NOW.wall, gpu=0)) is None
    assert start_s(sample(NOW.wall * 1000)) is None
    assert start_s(sample(NOW.wall), sample(NOW.wall * 1000, pid=2)) is None


def test_the_period_starts_at_boot_at_the_earliest() -> None:
    """The start is never negative, because NVML would read that as a time in the future."""
    assert start_s(sample(30.0), since=Instant(NOW.wall - 60.0, NOW.boot - 60.0), mono=30.0) == 0.0
