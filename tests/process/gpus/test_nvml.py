"""Tests of a missing or hanging driver in processes of their own."""

from __future__ import annotations

import ctypes.util
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.system.executor import wait_for
from tests.support.machine import LIMIT_S
from tests.support.reserving import got

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Child, Machine
HANGING_S = 0.1  # a call that takes longer is hanging


def check_no_driver_in(child: Child) -> None:
    """Check that a reservation without a driver fails, and changes nothing."""
    before = child.run("str(os.environ)").value
    answer = child.reserve()
    assert answer.error in ("DriverError", "NoDriverError")
    assert "no nvidia driver" in answer.text.lower()
    assert "\n" not in answer.text
    assert child.run("str(os.environ)").value == before


@pytest.mark.promise
@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has an NVIDIA driver"
)
def test_no_driver(machine: Machine) -> None:
    """Without the driver's library, a reservation fails without changes."""
    with machine.child(LD_LIBRARY_PATH="", CUDA_VISIBLE_DEVICES="1") as child:
        check_no_driver_in(child)


READ_ALL = f"""
import _thread
from reserve_gpu.model.errors import DriverError
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
def read():
    with Nvml({HANGING_S}) as nvml:
        try:
            return [nvml.usage(device).used_mib for device in nvml.walk()]
        except (DriverError, DeviceError) as error:
            return str(error)
"""


@pytest.mark.parametrize("function", ["nvmlInitWithFlags *", "nvmlDeviceGetComputeMode 0"])
def test_a_hanging_driver_leaves_one_thread(machine: Machine, function: str) -> None:
    """A process that starts NVML repeatedly while the driver hangs leaves one thread behind."""
    usual = machine.scenario.read_text()
    with machine.child() as child:
        child.run(READ_ALL)
        before = child.run("_thread._count()").value
        machine.add(f"delay {function} 1000")
        for _ in range(5):
            assert "hangs" in child.run("read()").value
        assert machine.calls().count(function.replace(" *", "")) == 1
        assert wait_for(lambda: child.run("_thread._count()").value == before + 1, LIMIT_S, 0.01)
        machine.scenario.unlink()  # ends the delay
        assert wait_for(lambda: child.run("_thread._count()").value == before, LIMIT_S, 0.01)
        machine.write(usual)
        assert child.run("read()").value == [0.0, 0.0]


def test_a_slow_gpu_is_reserved_while_another_gpu_hangs(here: Here) -> None:
    """Each GPU gets some time, even if a hanging one has used up the time for all readings."""
    delays = ("0 1000", "1 0.15")
    here.write("gpu\n" * 2 + "".join(f"delay nvmlDeviceGetComputeMode {each}\n" for each in delays))
    assert got() == "1"
