"""Tests of processes that the driver lists with 0 MiB, which do not make a GPU busy.

https://github.com/llm-d-incubation/llm-d-rl-time-slicing/issues/148
https://github.com/pytorch/pytorch/issues/54564
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.commands.hosts import status_from_json
from reserve_gpu.commands.top import live
from reserve_gpu.gpus import usage
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.devices import Device, State
from reserve_gpu.render import phrases
from reserve_gpu.reservation import activity
from reserve_gpu.reservation.session import session
from tests.support.nvml import NO_V2, NO_V3
from tests.support.platforms import on_a_host
from tests.support.processes import wait_for
from tests.support.reserving import got

if TYPE_CHECKING:
    from tests.support.here import Here

pytestmark = on_a_host

TWO = "gpu\n compute 5000001 0\n compute 5000002 0\n"
LIST = "nvmlDeviceGetComputeRunningProcesses_v2"
BROKEN_V3 = f"driver 535.86.10\nfail {LIST} * 999\n"


@pytest.mark.parametrize(
    "scenario",
    [
        f"{TWO} used 300",
        f"{TWO} graphics 5000003 900",
        f"{TWO} graphics 5000001 0",
        f"{NO_V3}{TWO}",
        f"missing {LIST}\n{TWO}",
        f"{BROKEN_V3}gpu\n compute 7001 0",
        f"{TWO} memory none",
        f"{TWO} numa 1\n used 5000",
        "fail nvmlDeviceGetComputeMode * 3\n" + TWO,
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
        f"{TWO} used 3000",
        f"{NO_V3}{NO_V2}gpu\n compute 5000001 0",  # the driver only counts processes
        f"{BROKEN_V3}gpu\n compute 7001 0\n compute 7002 10",
        f"{BROKEN_V3}gpu\n compute 7001 0\n compute 7002 10\n compute 7003 0",
        "gpu\n memory none\n compute 5000001 0\n compute 5000002 10",
    ],
)
def test_a_gpu_with_other_use_is_busy(here: Here, scenario: str) -> None:
    """Unknown or unreadable memory, an exclusive mode, or other use makes a GPU busy."""
    here.write(scenario)
    assert [row.state for row in reserve_gpu.status().rows] == [State.BUSY]
    with pytest.raises(reserve_gpu.NoFreeDeviceError):
        reserve_gpu.reserve()


@pytest.mark.parametrize(
    ("lines", "state"),
    [("", State.IDLE), ("used 3000", State.BUSY), ("memory none", State.UNKNOWN)],
)
def test_incomplete_lists(here: Here, lines: str, state: State) -> None:
    """In a container, memory decides, and without a memory reading the GPU's state is unknown."""
    here.write(f"{TWO} {lines}")
    with Nvml() as gpus:
        gpus.sees_all = False
        (device,) = gpus.walk()
        assert isinstance(device, Device)
        assert usage.judge(gpus.usage(device)) is state


def test_an_idle_gpu_needs_no_further_call(here: Here) -> None:
    """The list of compute processes is read only if the driver counts any."""
    here.write("gpu")
    assert got() == "0"
    assert here.calls().count(f"{LIST} 0") == 0
    here.write(TWO)
    reserve_gpu.release()
    assert got() == "0"
    assert here.calls().count(f"{LIST} 0") == 2  # one call for the length, and one for the list


def test_status_shows_them(here: Here) -> None:
    """Text, JSON, another machine's view and `top` list the processes without memory."""
    here.write(f"{TWO}gpu\n compute 5000001 0\n compute 5000003 700\n")
    status = reserve_gpu.status()
    assert [row.state for row in status.rows] == [State.FREE, State.BUSY]
    (note,) = status.picture().layout.entries[0].who
    assert isinstance(note, tuple)
    assert note[1] == phrases.FAINT
    assert "5000001" in note[0]
    assert "5000002" in note[0]
    fields = json.loads(json.dumps(status.to_dict()))
    first, second = fields["devices"]
    assert [process["memory_mib"] for process in first["processes"]] == [0, 0]
    assert [process["memory_mib"] for process in second["processes"]] == [700, 0]
    assert (first["is_used_without_reservation"], first["reason"]) == (False, None)
    read = status_from_json.status(fields)
    assert read.to_dict() == fields
    assert [entry.who for entry in read.picture().layout.entries] == [
        entry.who for entry in status.picture().layout.entries
    ]
    assert len(live.processes(status.rows, 80, 20)) == len(["", "processes", *range(4)])


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


def test_a_named_gpu(here: Here) -> None:
    """A named GPU causes a warning about other use, but not about a process without memory."""
    here.write(TWO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert got("0") == "0"
    reserve_gpu.release()
    here.write(f"{TWO} compute 5000003 700")
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        assert got("0") == "0"
    (warning,) = caught
    assert "5000003" in str(warning.message)
    assert "5000001" not in str(warning.message)


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


@pytest.mark.full
def test_processes_that_start_between_the_count_and_the_list(here: Here) -> None:
    """Processes that the driver lists but has not counted before are not subtracted."""
    here.write(f"gpu\n compute 5000001 0\ndelay {LIST} 0 3")
    with Nvml() as gpus, ThreadPoolExecutor() as pool:
        (device,) = gpus.walk()
        assert isinstance(device, Device)
        reading = pool.submit(gpus.usage, device)
        wait_for(lambda: f"{LIST} 0" in here.calls())  # the driver has counted one process
        here.write("gpu\n compute 5000001 0\n compute 5000002 0\n compute 5000003 10\n")
        assert reading.result().compute == 1
