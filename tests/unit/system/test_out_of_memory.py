"""Processes that the driver lists with 0 MiB: they show up, but do not make a GPU busy.

https://github.com/llm-d-incubation/llm-d-rl-time-slicing/issues/148
https://github.com/pytorch/pytorch/issues/54564
"""

from __future__ import annotations

import pynvml
import pytest

from reserve_gpu.gpus import nvml, usage
from reserve_gpu.model.devices import COMPUTE, GRAPHICS, MPS, ComputeMode, Process
from tests.support.platforms import on_a_host

pytestmark = on_a_host


@pytest.mark.parametrize(
    ("process", "mode", "expected"),
    [
        (Process(1, 0), None, True),
        (Process(1, 0), ComputeMode.DEFAULT, True),
        (Process(1, 0), ComputeMode.PROHIBITED, True),
        (Process(1, 0), ComputeMode.EXCLUSIVE_PROCESS, False),
        (Process(1, 0), ComputeMode.EXCLUSIVE_THREAD, False),
        (Process(1, 1), ComputeMode.DEFAULT, False),
        (Process(1, None), ComputeMode.DEFAULT, False),
        (Process(1, 0, kind=MPS), ComputeMode.DEFAULT, False),
        (Process(1, 0, kind=GRAPHICS), ComputeMode.DEFAULT, False),
    ],
)
def test_the_rule(process: Process, mode: int | None, *, expected: bool) -> None:
    """Only a compute process whose memory is known to be 0 does not count as use."""
    assert usage.has_no_memory(process, mode) is expected


def test_less_than_a_mib_is_not_0() -> None:
    """A process with a single byte of memory counts as use."""
    entries = [pynvml.c_nvmlProcessInfo_v2_t(7, size) for size in (0, 1, 2**20, 2**20 + 1)]
    sizes = [nvml._process(entry, COMPUTE).memory_mib for entry in entries]
    assert sizes == [0, 1, 1, 2]
