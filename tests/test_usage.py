"""Idle or busy, by what the driver reports: tables of readings."""

from __future__ import annotations

import pytest

from reserve_gpu.gpus import usage
from reserve_gpu.model.devices import ComputeMode, State, Usage

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
