"""Tests of the drivers in docs/machines.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.reserving import got, of_gpu, refused, variables, would_be_refused

if TYPE_CHECKING:
    from tests.support.here import Here


# -- drivers and bindings --------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["r470", "r440"])
def test_old_drivers(here: Here, scenario: str) -> None:
    """With a driver that lacks newer functions, a busy GPU is found with its older functions."""
    here.use(scenario)
    assert of_gpu(refused(count=2)).startswith("busy: ")
    assert got() == "1"
    assert variables()["CUDA_DEVICE_MEMORY"] == "16160"


def test_drivers_with_a_broken_query(here: Here) -> None:
    """The third process query, which drivers 535.43 to 535.98 break, is only used for counts."""
    here.write(
        "driver 535.86.10\ngpu\n  graphics 1100 350\n  compute 4321000 3500\n"
        "  compute 4321001 7000\n  mps 777 100"
    )
    (row,) = would_be_refused().rows
    listed = {process.pid: process.memory_mib for process in row.processes}
    assert listed == {4321000: 3500, 4321001: 7000, 777: 100}
    functions = {call.split()[0] for call in here.calls()}
    assert "nvmlDeviceGetComputeRunningProcesses_v2" in functions
    assert "nvmlDeviceGetGraphicsRunningProcesses_v2" in functions
    assert "nvmlDeviceGetGraphicsRunningProcesses_v3" not in functions  # of others: the count alone
