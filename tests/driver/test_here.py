"""Tests of the simulated machine in the test process: each test leaves the process unchanged."""

from __future__ import annotations

import builtins
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

import reserve_gpu
from tests.support.here import Here

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine


def test_locks_exclude_other_processes(here: Here) -> None:
    """Other processes on the machine cannot reserve the test process's GPU."""
    assert reserve_gpu.reserve("0").environ["CUDA_VISIBLE_DEVICES"] == "0"
    with here.child() as child:
        assert child.reserve("'0'").error == "NoFreeDeviceError"
        assert child.reserve().value == "1"
    assert "nvmlDeviceGetComputeMode 0" in here.calls()


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


def test_missing_function(here: Here) -> None:
    """A function is missing as long as the scenario has a `missing` line for it."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    here.add("missing nvmlDeviceGetName")
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetName(handle)
    here.use("two")
    assert pynvml.nvmlDeviceGetName(handle) == "GeForce GTX 1050 Ti"
    pynvml.nvmlShutdown()


def test_hanging_call_ends_with_the_test(tmp_path: Path) -> None:
    """A call that hangs ends with the machine, and NVML is shut down."""
    with Here(tmp_path) as here:
        here.add("delay nvmlDeviceGetUUID 0 3600")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        threading.Thread(target=pynvml.nvmlDeviceGetUUID, args=(handle,), daemon=True).start()
        while here.calls()[-1] != "nvmlDeviceGetUUID 0":
            time.sleep(0.001)
        start = time.monotonic()
    assert time.monotonic() - start < 3
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


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


def test_shells_leave_no_trace(tmp_path: Path) -> None:
    """After the test, IPython knows no shell, and Python's state is restored."""
    import IPython

    def state() -> Any:
        added = [hasattr(builtins, name) for name in ("__IPYTHON__", "display", "get_ipython")]
        return added, hasattr(sys, "ps1"), list(sys.path), sys.modules["__main__"], sys.displayhook

    before = state()
    with Here(tmp_path) as here:
        shells = here.shell(), here.shell(is_notebook=True)
        for shell in (*shells, *shells):
            shown = shell.run("import IPython; IPython.get_ipython() is get_ipython()").values
            assert shown == [{"text/plain": "True"}]
    assert state() == before
    assert IPython.get_ipython() is None
