"""Managed memory, which some drivers leave out of the sizes of processes.

https://github.com/gpuopenanalytics/pynvml/issues/63
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reserve_gpu.gpus.usage import DRIVER_RESERVE_MIB, promisable_mib
from reserve_gpu.model.devices import Device, Usage
from tests.support.platforms import on_a_host

pytestmark = on_a_host

TOTAL_MIB = 10000
DEVICE = Device(0, "GPU-1", memory_mib=TOTAL_MIB)


def available_mib(
    used: float, listed: float | None, *parts: tuple[float | None, float | None], **more: Any
) -> float | None:
    """Return the available memory of a GPU with 10000 MiB."""
    reading = Usage(used_mib=used, listed_mib=listed, total_mib=TOTAL_MIB, **more)
    return promisable_mib(DEVICE, reading, parts)


@pytest.mark.parametrize(
    ("used", "listed", "parts", "expected"),
    [
        (3300, 300, [(4000, 300)], 6000),  # 3000 MiB fit into the part
        (3300, 3300, [(4000, 3300)], 6000),  # the driver lists all memory
        (3300, 300, [(4000, 0)], 2700),  # the holder has no process here
        (3300, 300, [(4000, 0), (1000, 300)], 2700),  # only 700 MiB fit into the second part
        (4300, 1300, [(4000, 300)], 5000),  # 1000 MiB of a process without a reservation
        (3300, None, [(4000, 300)], 3000),  # an incomplete list explains nothing
        (300, 4000, [(2000, 300)], 8000),  # memory that was freed between two readings
        (3000, 0, [(4000, 300)], 6000),  # a process that has ended between two readings
    ],
)
def test_unlisted_memory_counts_towards_the_parts_of_listed_holders(
    used: float, listed: float | None, parts: list[tuple[float, float]], expected: float
) -> None:
    """Memory that no listed process explains fills the parts of holders that use the GPU."""
    assert available_mib(used, listed, *parts) == expected


def test_the_drivers_own_memory_counts_towards_no_part() -> None:
    """The driver's reserve and the pages of a NUMA node are never a holder's managed memory."""
    assert available_mib(900, 300, (4000, 300), reserve_known=False) == 5400
    more_mib = DRIVER_RESERVE_MIB + 300
    assert available_mib(300 + more_mib, 300, (4000, 300), reserve_known=False) == 5360
    assert available_mib(3300, 300, (4000, 300), has_host_memory=True) == 3000


SIZES = st.integers(0, TOTAL_MIB)


@settings(max_examples=300)
@given(
    parts=st.lists(st.tuples(SIZES, SIZES), max_size=4),
    own=st.tuples(SIZES, SIZES),
    used_mib=SIZES,
    listed_mib=st.none() | SIZES,
    reserve_mib=st.integers(0, 500),
    is_known=st.booleans(),
)
def test_available_memory_and_all_parts_fit_on_the_gpu(
    parts: list[tuple[int, int]],
    own: tuple[int, int],
    used_mib: int,
    listed_mib: int | None,
    reserve_mib: int,
    *,
    is_known: bool,
) -> None:
    """For any readings, available memory plus all parts, or plus all use, is at most the GPU's."""
    device = DEVICE._replace(reserve_mib=reserve_mib)
    reading = Usage(used_mib=used_mib, listed_mib=listed_mib, reserve_known=is_known)
    room = promisable_mib(device, reading, parts, own)
    today = promisable_mib(device, reading._replace(listed_mib=None), parts, own)
    assert room is not None
    assert today is not None
    assert room >= today
    if room:
        usable_mib = TOTAL_MIB - reserve_mib
        assert room + used_mib <= usable_mib
        assert room + sum(max(size, use) for size, use in [*parts, own]) <= usable_mib
