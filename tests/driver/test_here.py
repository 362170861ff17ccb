"""The machine that the test process itself is on: it is real, and nothing of it is left behind."""

from __future__ import annotations

import builtins
import ctypes
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

import reserve_gpu
from tests.support.here import Here, Without
from tests.support.shell import Shell

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine

SCENARIOS = ["two", "mig", "mixed", "r470"]


def test_locks_hold_against_processes(here: Here) -> None:
    """What is reserved in the test process is reserved for everybody on the machine."""
    assert reserve_gpu.reserve("0").environ["CUDA_VISIBLE_DEVICES"] == "0"
    with here.child() as child:
        assert child.reserve("'0'").error == "NoFreeDeviceError"
        assert child.reserve().value == "1"
    assert "nvmlDeviceGetComputeMode 0" in here.calls()


def test_a_shell_leaves_no_path_of_another_test(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one test has put on sys.path beside a shell is not there for the next test."""
    del here
    before = list(sys.path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", ["/elsewhere", *sys.path])
        shell = Shell()
    shell.close()
    assert sys.path == before


def test_environment_is_restored(tmp_path: Path) -> None:
    """The environment and the working directory are the same again, whatever was reserved."""
    before = dict(os.environ), os.getcwd()
    with Here(tmp_path) as here:
        reserve_gpu.reserve()
        assert os.getcwd() == str(here.folder)
        assert os.environ["HOME"] == str(here.home)
    assert (dict(os.environ), os.getcwd()) == before
    assert reserve_gpu.current() is None


def test_failure_is_forgotten(tmp_path: Path) -> None:
    """A machine without a free GPU leaves no trace on the next one."""
    for name, use in (("busy", "compute 4321000 3500"), ("free", "")):
        (tmp_path / name).mkdir()
        with Here(tmp_path / name) as here:
            here.write(f"gpu\n{use}")
            if use:
                with pytest.raises(reserve_gpu.NoFreeDeviceError):
                    reserve_gpu.reserve()
                assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
            else:
                assert "CUDA_VISIBLE_DEVICES" not in os.environ
                assert reserve_gpu.reserve().environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("turn", range(2))
def test_first_call(here: Here, turn: int) -> None:
    """`delay-first` delays the first call of each test, and no other."""
    here.add("delay-first nvmlDeviceGetUUID 0 0.3")
    times = [time.monotonic()]
    for _ in range(2):
        reserve_gpu.reserve("0")
        reserve_gpu.release()
        times.append(time.monotonic())
    assert times[1] - times[0] >= 0.3
    assert times[2] - times[1] < 0.3


def test_missing_function(here: Here) -> None:
    """A function that the scenario calls missing is missing, until the scenario changes."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    here.add("missing nvmlDeviceGetName")
    with pytest.raises(pynvml.NVMLError_FunctionNotFound):
        pynvml.nvmlDeviceGetName(handle)
    here.use("two")
    assert pynvml.nvmlDeviceGetName(handle) == "GeForce GTX 1050 Ti"
    pynvml.nvmlShutdown()


def test_hanging_call_ends_with_the_test(tmp_path: Path) -> None:
    """A call that hangs is over when the machine is, and NVML is shut down anyway."""
    with Here(tmp_path) as here:
        here.add("delay nvmlDeviceGetUUID 0 3600")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        threading.Thread(target=pynvml.nvmlDeviceGetUUID, args=(handle,), daemon=True).start()
        while here.calls()[-1] != "nvmlDeviceGetUUID 0":
            time.sleep(0.001)
        start = time.monotonic()
    assert time.monotonic() - start < 3
    assert not is_initialised()


def test_unbalanced(tmp_path: Path) -> None:
    """An initialisation without its shutdown fails the test, and is undone."""
    with pytest.raises(AssertionError, match="NVML was not shut down: 1 more"), Here(tmp_path):
        pynvml.nvmlInit()
    assert not is_initialised()


def is_initialised() -> bool:
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError_Uninitialized:
        return False
    return True


@pytest.mark.process
def test_cuda_is_not_loaded(machine: Machine) -> None:
    """To load the stand-in driver loads no CUDA: each end would wait for what may be starting."""
    code = "from tests import driver; driver.load(); print(open('/proc/self/maps').read())"
    done = machine.python(code)
    assert "libnvidia-ml.so.1" in done.stdout, done.stderr
    assert "libcuda.so.1" not in done.stdout


@pytest.mark.parametrize("name", SCENARIOS)
def test_uuid(here: Here, name: str) -> None:
    """The UUID of a device by its number is the one that the driver gives."""
    here.use(name)
    rows: list[dict[str, Any]] = reserve_gpu.status().to_dict()["devices"]
    known = [row for row in rows if row["uuid"]]
    assert known
    for row in known:
        instance = row["instance"]
        number = str(row["index"]) if instance is None else f"{row['index']}:{instance}"
        assert here.uuid(number) == row["uuid"]


# ---- shells ------------------------------------------------------------------------------------


def test_shell_shows(here: Here) -> None:
    """A cell's output is what it printed, displayed, warned of and raised."""
    shell = here.shell()
    cell = shell.run("%reserve_gpu 1")
    assert cell.stdout.startswith("Reserving GPU1: ")
    assert (cell.stderr, cell.error, cell.values) == ("", None, [])
    cell = shell.run("import os; os.environ['CUDA_VISIBLE_DEVICES']")
    assert (cell.values, cell.error) == ([{"text/plain": "'1'"}], None)
    cell = shell.run("1/0")
    assert (cell.error, cell.stdout) == ("ZeroDivisionError", "")
    assert "division by zero" in cell.traceback[-1]
    assert "UserWarning: beware" in shell.run("import warnings; warnings.warn('beware')").stderr
    cell = shell.run("display(1); display(2)")
    assert cell.values == [{"text/plain": "1"}, {"text/plain": "2"}]
    assert shell.run("__name__").values == [{"text/plain": "'__main__'"}]
    assert "%reserve_gpu" in shell.complete("%reserve_g")


def test_two_shells(here: Here) -> None:
    """Each of two shells is the one that IPython knows while it runs a cell."""
    shells = here.shell(), here.shell()
    code = "import IPython; IPython.get_ipython() is get_ipython()"
    for shell in (*shells, *shells):
        assert shell.run(code).values == [{"text/plain": "True"}]


def test_shell_leaves_nothing(tmp_path: Path) -> None:
    """After its machine no shell is left: IPython knows of none, and Python is as it was."""
    import IPython

    def state() -> Any:
        added = [hasattr(builtins, name) for name in ("__IPYTHON__", "display", "get_ipython")]
        return added, hasattr(sys, "ps1"), list(sys.path), sys.modules["__main__"], sys.displayhook

    before = state()
    with Here(tmp_path) as here:
        here.shell().run("x = 1")
        here.shell(is_notebook=True).run("1")
        assert IPython.get_ipython()
    assert state() == before
    assert IPython.get_ipython() is None


def test_without() -> None:
    """A library without a function answers as the dynamic loader does, and for the rest."""
    library = Without(frozenset({"printf"}), ctypes.CDLL(None))
    assert library.getpid() == os.getpid()
    with pytest.raises(AttributeError, match="undefined symbol: printf"):
        _ = library.printf
