"""Tests of killed processes that hang in the driver, and keep their locks without running code.

https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1333. A write to a frozen file system hangs
in the same state (D) as a call of such a driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks.directory import MUTEXES, LockDirectory
from reserve_gpu.model.errors import MutexHeldError
from reserve_gpu.system import procfs
from tests.support.locked import locked, needs_root
from tests.support.machine import LIMIT_S, TAKE_THE_MUTEX, Child
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Machine

TOOLS = ("mkfs.ext4", "fsfreeze", "mount", "umount")
PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
pytestmark = [
    pytest.mark.skipif(
        not all(shutil.which(tool, path=PATH) for tool in TOOLS), reason="needs e2fsprogs and mount"
    ),
]
# A reading on the bindings' worker thread, for which the main thread does not wait.
READ = """
import threading
from reserve_gpu.gpus.nvml import Nvml
def read():
    with Nvml() as gpus:
        gpus.read_all(gpus.devices(0)[0])
threading.Thread(target=read).start()
"""


def succeeds(*command: str) -> bool:
    """Run a command as root, and return whether it succeeds."""
    program = shutil.which(command[0], path=PATH)
    assert program
    return not subprocess.run([program, *command[1:]], check=False, capture_output=True).returncode


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """Mount a small file system, and yield its folder."""
    image, mounted = folder / "image", folder / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(4 << 20)
    assert succeeds("mkfs.ext4", "-q", "-F", str(image))
    if not succeeds("mount", "-o", "loop", str(image), str(mounted)):
        pytest.skip("needs loop devices")
    try:
        yield mounted
    finally:
        assert succeeds("umount", str(mounted))


@contextmanager
def stuck(machine: Machine, code: str, number: int = 1) -> Iterator[list[Child]]:
    """Yield processes that were killed while they hung in the driver.

    Args:
        machine: The machine whose driver hangs until all processes have been killed.
        code: The code that each process runs before it hangs.
        number: The number of processes.
    """
    with disk(machine.folder) as mounted:
        file = mounted / "file"
        file.touch()
        scenario = machine.scenario.read_text()
        children = []
        try:
            assert succeeds("fsfreeze", "-f", str(mounted))
            for _ in range(number):
                child = Child(machine.environ(), machine.folder)
                children.append(child)
                assert child.run(code).error is None
                machine.write(f"{scenario}\nstuck nvmlDeviceGetPowerUsage 0 {file}\n")
                assert child.run(READ).error is None
                wait_for(partial(is_in_driver, child.pid, file))
                machine.write(scenario)
                child.process.kill()
                wait_for(partial(procfs.is_dying, child.pid))
            yield children
        finally:
            succeeds("fsfreeze", "-u", str(mounted))
            for child in children:
                child.kill()


def is_in_driver(pid: int, file: Path) -> bool:
    """Return whether a thread hangs in the call that writes to the file."""
    with suppress(OSError):
        names = os.listdir(f"/proc/{pid}/fd")
        has_file = any(os.path.samefile(f"/proc/{pid}/fd/{name}", file) for name in names)
        return has_file and "D" in states(pid)
    return False


def states(pid: int) -> str:
    """Return the states of a process's threads, the leader first."""
    return "".join(state for state, *_ in procfs._threads(pid))


# -- the mutex -------------------------------------------------------------------------------------


@needs_root
def test_a_stuck_holder_of_the_mutex_is_bypassed(here: Here) -> None:
    """A killed process that keeps the mutex is bypassed, and its file is used again later."""
    with stuck(here, TAKE_THE_MUTEX) as (holder,), here.child() as child:
        assert procfs.is_dying(holder.pid)
        assert locked(here.locks) == {"mutex.lock"}
        assert child.reserve().value == "0"
        status = child.run("reserve_gpu.status().to_dict()").value
        assert status["problem"] is None
        assert child.run("reserve_gpu.release()").error is None
    with LockDirectory() as directory, directory.mutex(0.0):
        assert locked(here.locks) == {"mutex.lock"}


@needs_root
def test_several_stuck_holders_of_the_mutex_are_bypassed(here: Here) -> None:
    """Each killed process that keeps a file of the mutex is bypassed."""
    with stuck(here, TAKE_THE_MUTEX, 2), LockDirectory() as directory, directory.mutex():
        assert locked(here.locks) == {*MUTEXES[:3]}
    with LockDirectory() as directory, directory.mutex(0.0):
        assert locked(here.locks) == {"mutex.lock"}


@needs_root
def test_only_one_process_bypasses_a_stuck_one(here: Here) -> None:
    """A process that bypassed a stuck one keeps the mutex, even if its first file is free again."""
    with LockDirectory() as other:
        with here.child() as passed:
            with stuck(here, TAKE_THE_MUTEX) as (holder,):
                assert passed.run(TAKE_THE_MUTEX).error is None
                with pytest.raises(MutexHeldError, match=rf"process {passed.pid} of"):
                    other.mutex(1.0).__enter__()
            assert not procfs.is_dying(holder.pid)  # the first file of the mutex is free
            with pytest.raises(MutexHeldError, match=rf"process {passed.pid} of"):
                other.mutex(1.0).__enter__()
            with here.child() as reader:
                status = reader.run("reserve_gpu.status().to_dict()").value
                assert f"process {passed.pid} of" in status["problem"]
        with other.mutex(0.0):
            pass


@needs_root
def test_a_link_to_a_reserved_device_does_not_hold_the_mutex(here: Here) -> None:
    """A link from a file of the mutex to a device's lock does not count as the mutex."""
    with here.rival("0"):
        os.link(here.locks / f"{here.uuid('0')}.lock", here.locks / MUTEXES[1])
        with LockDirectory() as directory, directory.mutex(0.0):
            pass
        with (
            stuck(here, TAKE_THE_MUTEX) as (holder,),
            LockDirectory() as directory,
            pytest.raises(MutexHeldError, match=f"process {holder.pid} of"),
        ):
            directory.mutex(1.0).__enter__()


@needs_root
def test_a_living_process_in_the_driver_keeps_the_mutex(here: Here) -> None:
    """A process that hangs but was not killed keeps the mutex, because it might continue."""
    with disk(here.folder) as mounted, here.child() as holder, LockDirectory() as directory:
        file = mounted / "file"
        file.touch()
        assert holder.run(TAKE_THE_MUTEX).error is None
        try:
            assert succeeds("fsfreeze", "-f", str(mounted))
            here.add(f"stuck nvmlDeviceGetPowerUsage 0 {file}")
            assert holder.run(READ).error is None
            wait_for(partial(is_in_driver, holder.pid, file))
            assert not procfs.is_dying(holder.pid)
            with pytest.raises(MutexHeldError, match=rf"process {holder.pid} of"):
                directory.mutex(1.0).__enter__()
        finally:
            succeeds("fsfreeze", "-u", str(mounted))


# -- a GPU -----------------------------------------------------------------------------------------


@needs_root
def test_the_gpu_of_a_stuck_process_stays_reserved(here: Here) -> None:
    """The GPU of a killed process stays reserved until the process has ended."""
    with stuck(here, "reserve_gpu.reserve('0')") as (holder,), here.child() as child:
        text = child.run("str(reserve_gpu.status())").value
        refused = child.reserve("'0'")
        row = child.run("reserve_gpu.status().to_dict()['devices'][0]").value
        run_refused = here.command(sys.executable, "-m", "reserve_gpu", "run", "0", "--", "true")
        assert child.reserve().value == "1"
    for shown in (text, refused.text):
        assert f"(pid {holder.pid})" in shown
        assert "reboot" in shown
        assert "Ask " not in shown  # the holder's user can't release it
    assert refused.error == "NoFreeDeviceError"
    assert "in the queue" in run_refused.stderr  # the process might end at any time
    assert (row["state"], row["holders"][0]["is_dying"]) == ("reserved", True)
    assert row["holders"][0]["pid"] == holder.pid


# -- dying processes -------------------------------------------------------------------------------


def test_other_states_are_not_dying(machine: Machine) -> None:
    """A living process, a zombie, and a process whose first thread has ended are not dying."""
    left = "import ctypes, threading, time\n"
    left += "threading.Thread(target=time.sleep, args=(60,)).start()\nprint(1, flush=True)\n"
    left += "ctypes.CDLL(None).pthread_exit(None)"
    assert not procfs.is_dying(None)
    assert not procfs.is_dying(os.getpid())
    with subprocess.Popen([sys.executable, "-c", left], stdout=subprocess.PIPE) as process:
        try:
            wait_for(lambda: states(process.pid) == "ZS")
            assert not procfs.is_dying(process.pid)
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert states(process.pid) == "Z"
        assert not procfs.is_dying(process.pid)
        process.wait(LIMIT_S)
    assert not procfs.is_dying(process.pid)
