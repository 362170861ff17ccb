"""Idle or busy, by what the driver reports: tables of readings."""

from __future__ import annotations

from itertools import product

import pytest

from reserve_gpu.gpus import usage
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import ComputeMode, State, Usage, UseSample

SEEN = Usage(compute=0, mps=0, total_mib=40960, used_mib=0)
PROHIBITED, EXCLUSIVE = ComputeMode.PROHIBITED, ComputeMode.EXCLUSIVE_PROCESS


@pytest.mark.parametrize(
    "reading",
    [
        SEEN,
        Usage(compute=0, used_mib=0, total_mib=40960, mode=ComputeMode.DEFAULT),
        Usage(compute=0, mps=0),  # no memory reading, but all processes seen
        Usage(used_mib=0, total_mib=40960, sees_all=False),  # no process list, but memory
        Usage(compute=0, mps=0, used_mib=3, total_mib=40960, sees_all=False),
        SEEN._replace(used_mib=1024),
        SEEN._replace(used_mib=204.8, total_mib=4096),
        SEEN._replace(used_mib=640, total_mib=4096, reserve_known=False),
        SEEN._replace(used_mib=3048, graphics_mib=2024),
        SEEN._replace(used_mib=500, graphics_mib=2000),
        SEEN._replace(used_mib=4096, graphics_mib=4096),
        SEEN._replace(used_mib=2048, graphics_mib=2048, total_mib=2048),
        SEEN._replace(used_mib=6144, graphics_mib=3072, total_mib=6144, has_host_memory=True),
        SEEN._replace(mode=EXCLUSIVE),
        SEEN._replace(mode=ComputeMode.EXCLUSIVE_THREAD),
        SEEN._replace(mode=None),  # one that NVML has no name for either
    ],
)
def test_idle(reading: Usage) -> None:
    """No sign of use and one reading that can be trusted make a device idle."""
    assert usage.judge(reading) is State.IDLE


@pytest.mark.parametrize(
    "reading",
    [
        SEEN._replace(compute=1),
        SEEN._replace(compute=2),
        SEEN._replace(mps=1),
        Usage(compute=1),
        SEEN._replace(compute=1, sees_all=False),
        SEEN._replace(compute=1, mode=EXCLUSIVE),
        SEEN._replace(used_mib=1025),
        SEEN._replace(used_mib=205, total_mib=4096),
        SEEN._replace(used_mib=641, total_mib=4096, reserve_known=False),
        SEEN._replace(used_mib=3049, graphics_mib=2024),
        SEEN._replace(used_mib=4097, graphics_mib=4097),
        SEEN._replace(used_mib=3073, graphics_mib=3073, total_mib=6144),
        SEEN._replace(used_mib=2049, graphics_mib=2049, total_mib=2048),
        SEEN._replace(graphics_mib=9000, has_host_memory=True),
        Usage(graphics_mib=9000),
        Usage(used_mib=5000, total_mib=40960),
    ],
)
def test_busy(reading: Usage) -> None:
    """Any sign of use makes a device busy."""
    assert usage.judge(reading) is State.BUSY


MEMORY = [0, 1024, 2048, 4096, 5120, 5121, 9000, 40000]  # in MiB


@pytest.mark.parametrize("idle_mib", [None, 0, 3000])
@pytest.mark.parametrize("total_mib", [None, 2048, 6144, 40960])
def test_a_surely_busy_device_is_not_idle(total_mib: float | None, idle_mib: float | None) -> None:
    """Memory makes a device surely busy only if `judge` does not find it idle."""
    verdicts = set()
    for used_mib, graphics_mib in product([None, *MEMORY], MEMORY):
        reading = SEEN._replace(total_mib=total_mib, used_mib=used_mib, graphics_mib=graphics_mib)
        for each in (reading, reading._replace(has_host_memory=True)):
            is_busy = usage.is_surely_busy(each, idle_mib)
            verdicts.add(is_busy)
            assert not (is_busy and usage.judge(each, idle_mib) is State.IDLE), each
    assert verdicts == {True, False}


@pytest.mark.parametrize("reading", [Usage(), SEEN, SEEN._replace(compute=1)])
def test_prohibited(reading: Usage) -> None:
    """A compute mode that lets nobody on goes before all else."""
    assert usage.judge(reading._replace(mode=PROHIBITED)) is State.PROHIBITED


@pytest.mark.parametrize(
    "reading",
    [
        Usage(),
        Usage(compute=0, mps=0, sees_all=False),
        Usage(mps=0),
        Usage(mode=ComputeMode.DEFAULT, total_mib=40960),
        Usage(graphics_mib=100.0),
    ],
)
def test_unknown(reading: Usage) -> None:
    """Without a reading that can be trusted a device is not taken for idle."""
    assert usage.judge(reading) is State.UNKNOWN


@pytest.mark.parametrize(
    ("reading", "configured", "limit"),
    [
        (Usage(), None, 1024),
        (Usage(total_mib=81920), None, 1024),
        (Usage(total_mib=20480), None, 1024),
        (Usage(total_mib=10240), None, 512),
        (Usage(total_mib=2048), None, 102.4),
        (Usage(total_mib=2048, reserve_known=False), None, 640),
        (Usage(total_mib=81920, reserve_known=False), None, 1024),
        (Usage(reserve_known=False), None, 1024),
        (Usage(total_mib=2048), 3000.0, 3000),
        (Usage(total_mib=81920), 0.0, 0),
        (Usage(total_mib=2048, reserve_known=False), 5.0, 5),
    ],
)
def test_idle_limit(reading: Usage, configured: float | None, limit: float) -> None:
    """1 GiB or 5 %, the lesser; the driver's reserve is allowed for; a setting overrides both."""
    assert usage.idle_limit_mib(reading, configured) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("used_mib", "configured", "state"),
    [
        (3000, 3000.0, State.IDLE),
        (3001, 3000.0, State.BUSY),
        (1, 0.0, State.BUSY),
        (0, 0.0, State.IDLE),
    ],
)
def test_configured_limit_decides(used_mib: float, configured: float, state: State) -> None:
    """Memory up to the configured limit is idle, memory above it busy."""
    assert usage.judge(SEEN._replace(used_mib=used_mib), configured) is state


@pytest.mark.parametrize(("configured", "state"), [(6000.0, State.IDLE), (0.0, State.BUSY)])
def test_configured_limit_excuses_graphics(configured: float, state: State) -> None:
    """A configured limit above the default also holds for graphics processes."""
    reading = SEEN._replace(used_mib=5000, graphics_mib=5000)
    assert usage.judge(reading, configured) is state


def test_configured_limit_excuses_no_process() -> None:
    """A process makes a device busy however much memory is allowed for."""
    assert usage.judge(SEEN._replace(compute=1), 1e9) is State.BUSY


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (SEEN, True),
        (Usage(), True),
        (SEEN._replace(compute=3, mode=ComputeMode.DEFAULT), True),
        (SEEN._replace(mode=PROHIBITED), False),
        (SEEN._replace(mode=EXCLUSIVE), True),
        (SEEN._replace(mode=EXCLUSIVE, compute=1), False),
        (SEEN._replace(mode=EXCLUSIVE, mps=1), False),
        (Usage(mode=EXCLUSIVE), True),
    ],
)
def test_usable(reading: Usage, *, expected: bool) -> None:
    """CUDA lets nobody onto a prohibited device, and no second process onto an exclusive one."""
    assert usage.is_usable(reading) is expected


# -- samples of use --------------------------------------------------------------------------------

NOW, MONOTONIC = Instant(1_800_000_000.0, 500_000.0), 400_000.0  # suspended for 100,000 s in total
MINUTE_S, HOUR_S, RUBBISH = 60.0, 3600.0, 4_294_000_000
MINUTE_AGO = NOW.later(-MINUTE_S)


def sample(time_s: float, gpu: int = 80, pid: int = 1, memory: int = 0) -> UseSample:
    return UseSample(pid, time_s, (gpu, memory, 0, 0))


def recent(
    *samples: UseSample, since: Instant = MINUTE_AGO, suspects: tuple[int, ...] = ()
) -> dict[int, int | None]:
    return usage.recent_use(samples, since, NOW, MONOTONIC, suspects)


@pytest.mark.parametrize("clock", [NOW.wall, NOW.boot, MONOTONIC], ids=["wall", "boot", "mono"])
def test_the_clock_of_samples_is_recognized(clock: float) -> None:
    """Samples count as recent or old by whichever clock the driver uses."""
    assert recent(sample(clock - 1.0)) == {1: 80}
    assert recent(sample(clock + 1.0)) == {1: 80}  # taken during the reading
    assert recent(sample(clock - 59.0, gpu=0, memory=3)) == {1: 0}
    assert recent(sample(clock - 61.0)) == {}
    assert recent(sample(clock - 1.0, gpu=0)) == {}


@pytest.mark.parametrize(
    "time_s",
    [0.0, 1.0, NOW.wall * 1000, NOW.wall / 1000, NOW.wall + HOUR_S, NOW.wall - 2 * HOUR_S],
)
def test_a_sample_without_a_known_clock_is_unclear(time_s: float) -> None:
    """If a sample's time fits no clock, the use by its process is unknown."""
    assert recent(sample(time_s)) == {1: None}
    assert recent(sample(time_s, gpu=0)) == {}
    assert recent(sample(time_s), sample(NOW.wall)) == {1: 80}


def test_rubbish_percentages_are_unclear() -> None:
    """A percentage above 100 proves neither use nor idleness of its process."""
    assert recent(sample(NOW.wall, RUBBISH)) == {1: None}
    assert recent(sample(NOW.wall, 0, memory=RUBBISH)) == {1: None}
    assert recent(sample(NOW.wall - 61.0, RUBBISH)) == {}
    assert recent(sample(NOW.wall, RUBBISH), sample(NOW.wall - 1.0, 5)) == {1: 5}
    assert recent(sample(NOW.wall, RUBBISH, pid=2), sample(NOW.wall, 5)) == {1: 5, 2: None}


def test_old_samples_are_unclear_while_the_device_is_active() -> None:
    """If no sample explains why the device is active, any process on it might be working."""
    old = sample(NOW.boot - 600.0)  # by a driver whose clock is slow, this might be recent
    assert recent(old, suspects=(1, 2)) == {1: None, 2: None}
    assert recent(suspects=(1,)) == {1: None}
    assert recent(old) == {}
    assert recent(old, sample(NOW.boot, pid=2), suspects=(1, 2)) == {2: 80}


@pytest.mark.parametrize("set_s", [HOUR_S / 2, -HOUR_S, -1_700_000_000.0])
def test_setting_the_wall_clock_hides_no_use(set_s: float) -> None:
    """A process that has worked since the last look counts, although the wall clock was set."""
    since = Instant(NOW.wall - MINUTE_S - set_s, NOW.boot - MINUTE_S)
    assert recent(sample(NOW.wall - 1.0), since=since) == {1: 80}
    before = recent(sample(NOW.wall - 1.0 - set_s), since=since)  # before the clock was set
    assert before == ({1: 80} if set_s > 0 else {1: None})


def start_s(*samples: UseSample, since: Instant = MINUTE_AGO, mono: float = MONOTONIC) -> object:
    return usage.samples_start_s(samples, since, NOW, mono)


@pytest.mark.parametrize("clock", [NOW.wall, NOW.boot, MONOTONIC], ids=["wall", "boot", "mono"])
def test_samples_are_read_again_since_the_start_of_the_period(clock: float) -> None:
    """The start of the period is given on the clock of the samples that show use."""
    assert start_s(sample(clock)) == clock - MINUTE_S
    assert start_s(sample(clock, gpu=0, memory=3), sample(clock - 9.0, pid=2)) == clock - MINUTE_S
    assert start_s(sample(clock, RUBBISH)) == clock - MINUTE_S


def test_samples_are_not_read_again_if_that_could_hide_use() -> None:
    """Without a sample that shows use, or with an unknown clock, one reading is enough."""
    assert start_s() is None
    assert start_s(sample(NOW.wall, gpu=0)) is None
    assert start_s(sample(NOW.wall * 1000)) is None
    assert start_s(sample(NOW.wall), sample(NOW.wall * 1000, pid=2)) is None


def test_the_period_starts_at_boot_at_the_earliest() -> None:
    """A negative start is impossible, because NVML would read it as a time in the future."""
    assert start_s(sample(30.0), since=Instant(NOW.wall - 60.0, NOW.boot - 60.0), mono=30.0) == 0.0
