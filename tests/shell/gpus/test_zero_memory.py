"""Tests of processes that the driver lists with 0 MiB, which do not make a GPU busy.

https://github.com/llm-d-incubation/llm-d-rl-time-slicing/issues/148
https://github.com/pytorch/pytorch/issues/54564
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.model.devices import Device, State
from reserve_gpu.reservation import activity
from reserve_gpu.reservation.session import session
from tests.support.platforms import on_a_host
from tests.support.reserving import got

if TYPE_CHECKING:
    from tests.support.here import Here


QUERIES = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]
NO_V3 = "".join(f"missing {query}_v3\n" for query in QUERIES)
NO_V2 = "".join(f"missing {query}_v2\n" for query in QUERIES)

pytestmark = on_a_host

TWO = "gpu\n compute 5000001 0\n compute 5000002 0\n"
LIST = "nvmlDeviceGetComputeRunningProcesses_v2"
BROKEN_V3 = f"driver 535.86.10\nfail {LIST} * 999\n"


@pytest.mark.parametrize(
    "scenario",
    [
        f"{NO_V3}{TWO}",
        f"missing {LIST}\n{TWO}",
        f"{BROKEN_V3}gpu\n compute 7001 0",
        "gpu\n mig on\n instance 3\n  compute 5000001 0",
    ],
)
def test_a_gpu_with_only_such_processes_is_free(here: Here, scenario: str) -> None:
    here.write(scenario)
    (row,) = reserve_gpu.status().rows
    assert row.state is State.FREE
    assert isinstance(row.device, Device)
    assert got() == row.device.entry


@pytest.mark.parametrize(
    "scenario",
    [
        "gpu\n mode exclusive_process\n compute 5000001 0",
        "gpu\n compute 5000001 -",
        "gpu\n compute 5000001 0\n compute 5000002 10",
        "gpu\n mps 5000001 0",
        f"{NO_V3}{NO_V2}gpu\n compute 5000001 0",  # the driver only counts processes
        f"{BROKEN_V3}gpu\n compute 7001 0\n compute 7002 10",
    ],
)
def test_a_gpu_with_other_use_is_busy(here: Here, scenario: str) -> None:
    """Unknown or unreadable memory, an exclusive mode, or other use makes a GPU busy."""
    here.write(scenario)
    assert [row.state for row in reserve_gpu.status().rows] == [State.BUSY]
    with pytest.raises(reserve_gpu.NoFreeDeviceError):
        reserve_gpu.reserve()


@pytest.mark.parametrize(
    ("lines", "is_unused"),
    [
        ("", True),
        ("used 3000", None),
        ("compute 5000001 0", True),
        ("mode exclusive_process", False),
    ],
)
def test_a_holder_without_memory(here: Here, lines: str, *, is_unused: bool | None) -> None:
    """A GPU whose holder has 0 MiB is idle, unless memory or the mode shows that it is in use."""
    here.write(f"gpu\n compute {os.getpid()} 0\n {lines}")
    with here.rival("0"):
        status = reserve_gpu.status()
    (device,) = status.to_dict()["devices"]
    assert (device["state"], device["is_reserved_but_idle"]) == ("reserved", is_unused)
    assert (device["reason"] is None) is (is_unused is not False)
    assert device["is_used_without_reservation"] is False
    assert ("5000001" in str(status)) is ("5000001" in lines)
    assert str(status).count("no memory") == lines.count("5000001")  # not the holder's process


def test_a_child_without_memory_keeps_a_gpu_in_use(here: Here) -> None:
    """A child process that is listed with 0 MiB has a context, so its GPU is not released."""
    assert got("0") == "0"
    with subprocess.Popen(["sleep", "99"]) as child:
        try:
            here.write(f"gpu\n compute {child.pid} 0\n")
            held = session().held
            assert held
            assert activity.by_child(held)
            here.write("gpu\n compute 5000001 0\n")
            assert not activity.by_child(held)
        finally:
            child.kill()
