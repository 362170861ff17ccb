"""Tests of the simulated machine in the test process: each test leaves the process unchanged."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pynvml
import pytest

import reserve_gpu
from tests.support.here import Here

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine


@pytest.mark.parametrize("is_free", [True, False])
def test_environment_is_restored(tmp_path: Path, *, is_free: bool) -> None:
    """After a reservation or a refusal, the variables and the working directory are restored."""
    before = dict(os.environ), os.getcwd()
    with Here(tmp_path) as here:
        assert os.getcwd() == str(here.folder)
        assert os.environ["HOME"] == str(here.home)
        if is_free:
            reserve_gpu.reserve()
        else:
            here.write("gpu\ncompute 4321000 3500")
            with pytest.raises(reserve_gpu.NoFreeDeviceError):
                reserve_gpu.reserve()
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert (dict(os.environ), os.getcwd()) == before
    assert reserve_gpu.current() is None


def test_missing_shutdown_fails_the_test(tmp_path: Path) -> None:
    """An initialization of NVML without a shutdown fails the test, and is undone."""
    with pytest.raises(AssertionError, match="NVML was not shut down: 1 more"), Here(tmp_path):
        pynvml.nvmlInit()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_cuda_is_not_loaded(machine: Machine) -> None:
    """Loading the stand-in driver does not load CUDA, because every reservation would wait."""
    code = "from tests import driver; driver.load(); print(open('/proc/self/maps').read())"
    done = machine.python(code)
    assert "libnvidia-ml.so.1" in done.stdout, done.stderr
    assert "libcuda.so.1" not in done.stdout
