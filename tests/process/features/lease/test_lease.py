"""Leases in scripts and kernels, with and without CUDA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.features.lease.timer import waiters_for
from tests.support.full_pipes import full_pipe
from tests.support.lease import IMPORTS, wait_for_action
from tests.support.locked import locked
from tests.support.machine import LIMIT_S
from tests.support.processes import US, queue, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.machine import Kernel, Machine

# Code for child processes.
START_CUDA = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)"
USE_GPU = f"{START_CUDA}; cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)"
# The lease ends after CUDA has started, even on a busy machine.
OVERDUE = f"reserve_gpu.reserve(for_='1h')\n{USE_GPU}\nreserve_gpu.reserve(for_=0.5)"
END_PROCESS = f"reserve_gpu.reserve(for_='1h', end_kernel=True)\n{OVERDUE}"
WAIT_FOR_RELEASE = "while reserve_gpu.current(): time.sleep(0.01)"
# Wait for the timer's action, and until the session's thread has finished its step.
WAIT_FOR_ACTION = """
while timer()._action is not Action.{}: time.sleep(0.01)
session().run(int)
"""
# Wait until at most so many threads are about to end the process.
WAIT_FOR_ENDS = """
while sum(thread.name == "reserve_gpu end" for thread in threading.enumerate()) > {}:
    time.sleep(0.01)
session().run(int)
"""
SOON_S = 0.2


def is_overdue(machine: Machine) -> bool:
    """Return whether other processes see that the holder of the first GPU is overdue."""
    status = json.loads(machine.command(*US, "status", "--json").stdout)
    return any(holder["overdue"] for holder in status["devices"][0]["holders"])


@contextmanager
def notebook(machine: Machine, options: str) -> Iterator[Kernel]:
    """Start a kernel that has run `%reserve_gpu` with these options."""
    with machine.kernel() as kernel:
        cell = kernel.run(f"%reserve_gpu {options}")
        assert not cell.error, cell.all
        yield kernel


# -- waiters ---------------------------------------------------------------------------------------


def test_only_waiters_for_the_held_device_count(here: Here) -> None:
    """A waiter for another GPU, and the process's own wait, do not end an `--if-wanted` lease."""
    zero, one = reserve_gpu.reserve("0,1").devices
    with here.child() as child:
        child.send("reserve_gpu.reserve('1', wait=60)")
        wait_for(lambda: waiters_for([one]))
        assert not waiters_for([zero])
    reserve_gpu.reserve("0")
    own: list[int] = []
    with here.rival("1"), pytest.raises(reserve_gpu.WaitTimeoutError):
        reserve_gpu.reserve(
            count=2, wait=1, progress=lambda _: own.append(len(waiters_for([zero, one])))
        )
    assert own
    assert not any(own)


def test_stopped_waiter_does_not_count(here: Here) -> None:
    """A waiter stopped by Ctrl-Z gets the GPU only after it continues."""
    here.write("gpu")
    first = reserve_gpu.reserve(for_="1h", if_wanted=True)
    with here.child() as child:
        child.send("reserve_gpu.reserve(wait=60).environ['CUDA_VISIBLE_DEVICES']")
        wait_for(lambda: queue(here))
        os.kill(child.pid, signal.SIGSTOP)
        reserve_gpu.reserve(for_=SOON_S)
        wait_for_action("STAY")
        assert reserve_gpu.current() is first
        os.kill(child.pid, signal.SIGCONT)
        assert child.answer().value == "0"
    assert reserve_gpu.current() is None


def test_script_logs_the_end(machine: Machine) -> None:
    """A script without cells logs the end to stderr, and its child processes that see the GPU."""
    done = machine.python(
        "import reserve_gpu, subprocess, sys, time\n"
        "reserve_gpu.reserve(for_='1h')\n"
        "job = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        f"reserve_gpu.reserve(for_=0.2)\n{WAIT_FOR_RELEASE}\n"
        "print(job.pid)\n"
        "job.communicate(b'\\n')"
    )
    assert done.stderr.count("GPU0 ended at") == 1
    assert f"-c input() (pid {done.stdout.strip()})" in done.stderr


def test_cuda_that_is_starting_keeps_the_device(busy: Machine) -> None:
    """A cuInit that has read the variables before the end keeps the GPU."""
    busy.write(f"{busy.scenario.read_text()}\ndelay cuInit * 1")
    with busy.child() as child:
        child.run("from reserve_gpu.reservation.session import session")
        child.run("import threading, ctypes; cuda = ctypes.CDLL('libcuda.so.1')")
        child.run("start = threading.Thread(target=lambda: cuda.cuInit(0))")
        child.run("reserve_gpu.reserve(for_='1h'); start.start(); reserve_gpu.reserve(for_=0.2)")
        wait_for(lambda: child.run("session().held.overdue").value)
        assert child.visible() == "0"
        assert locked(busy.locks)


def test_child_process_on_the_device_keeps_it(busy: Machine) -> None:
    """A lease whose child process uses the GPU is overdue until the child process exits."""
    with busy.child() as child:
        child.run("import subprocess, sys")
        child.run("reserve_gpu.reserve(for_='1h')")
        program = f"{USE_GPU}; print(flush=True); input()"
        child.run(
            f"job = subprocess.Popen([sys.executable, '-c', {program!r}], text=True, "
            "stdin=subprocess.PIPE, stdout=subprocess.PIPE)"
        )
        child.run("job.stdout.readline(); reserve_gpu.reserve(for_=0.2)")
        wait_for(lambda: is_overdue(busy), 0.2)
        assert locked(busy.locks)
        child.run("job.communicate('')")
        wait_for(lambda: not locked(busy.locks))


@pytest.mark.promise
def test_variables_are_emptied_before_the_release(machine: Machine) -> None:
    done = machine.python(
        "import os, sys, time, reserve_gpu\n"
        "reserve_gpu.reserve(for_=0.2)\n"
        "events = []\n"
        "def note(event, words):\n"
        "    if event == 'os.putenv' and words[0] == b'CUDA_VISIBLE_DEVICES':\n"
        "        events.append(words[1])\n"
        "    if event == 'os.unsetenv' and words[0] == b'CUDA_VISIBLE_DEVICES':\n"
        "        events.append(None)\n"
        "    if event == 'fcntl.flock' and words[1] == 8:  # LOCK_UN\n"
        "        events.append('unlocked')\n"
        f"sys.addaudithook(note)\n{WAIT_FOR_RELEASE}\n"
        "from reserve_gpu.reservation.session import session\n"
        "session().run(int)  # until the session's thread has finished its step\n"
        "print(*dict.fromkeys(events))"
    )
    assert done.stdout == "b'' unlocked\n"


@pytest.mark.full
def test_lease_continues_after_exec(machine: Machine) -> None:
    program = f"import reserve_gpu, time\nprint(reserve_gpu.current())\n{WAIT_FOR_RELEASE}"
    done = machine.python(
        "import os, sys, reserve_gpu\n"
        "from reserve_gpu import api\n"
        "reserve_gpu.reserve(for_=2)\n"
        "api.before_exec()\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {program!r}])"
    )
    assert "GPU0" in done.stdout
    assert "GPU0 ended at" in done.stderr


@pytest.mark.full
def test_stopped_process_is_overdue(machine: Machine) -> None:
    """A process stopped by SIGSTOP is overdue after its lease, which ends when it continues."""
    with machine.child() as child:
        child.run("import time; reserve_gpu.reserve(for_=4)")
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: is_overdue(machine), 0.2)
        os.kill(child.pid, signal.SIGCONT)
        wait_for(lambda: not locked(machine.locks))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        pytest.param("for_='1h', idle='1h'", "0", id="before the end"),
        pytest.param("for_=0.5", USE_GPU, id="overdue"),
        pytest.param(
            "for_=0.5, end_kernel=True", f"reserve_gpu.before_end(save); {USE_GPU}", id="saving"
        ),
    ],
)
def test_killed_process_leaves_no_lease(busy: Machine, options: str, code: str) -> None:
    with busy.child() as child:
        child.run("import time; save = lambda: time.sleep(60)")
        begin = "reserve_gpu.reserve(for_='1h')"
        assert not child.run(f"{begin}; {code}; reserve_gpu.reserve({options})").error
        wait_for(lambda: is_overdue(busy) or code == "0", 0.2)
        child.kill()
        assert not locked(busy.locks)
        assert not is_overdue(busy)


@pytest.mark.promise
def test_script_is_ended_after_before_end(busy: Machine) -> None:
    """With `end_kernel`, SIGTERM follows all before_end() functions, even if some fail or hang."""
    done = busy.python(
        "import reserve_gpu, time\n"
        "reserve_gpu.before_end(lambda: open('saved', 'w'))\n"
        "reserve_gpu.before_end(lambda: 1 / 0)\n"
        "@reserve_gpu.before_end(limit=0.2)\n"
        "def save(): time.sleep(60)\n"
        "reserve_gpu.before_end(lambda: open('saved too', 'w'))\n"
        f"{END_PROCESS}\n"
        "time.sleep(60)"
    )
    assert done.returncode == -signal.SIGTERM
    assert (busy.folder / "saved").exists()
    assert (busy.folder / "saved too").exists()
    assert "ZeroDivisionError" in done.stderr
    assert "within 0.2 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert not locked(busy.locks)


@pytest.mark.parametrize("code", ["reserve_gpu.reserve(for_=0.5)", END_PROCESS])
def test_lease_ends_if_stderr_is_full(busy: Machine, code: str) -> None:
    reader, writer = full_pipe()
    script = f"import reserve_gpu, time\n{code}\nopen('began', 'w')\ntime.sleep(600)"
    with busy.running(
        sys.executable, "-c", script,
        environ=busy.environ(), stdout=subprocess.DEVNULL, stderr=writer,
    ):  # fmt: skip
        wait_for((busy.folder / "began").exists)
        wait_for(lambda: not locked(busy.locks))
    for each in (reader, writer):
        os.close(each)


@pytest.mark.full
def test_before_end_may_extend_the_lease(busy: Machine) -> None:
    """The process continues if a before_end() function extends the lease."""
    done = busy.python(
        f"import reserve_gpu\n{IMPORTS}\n"
        "is_called = []\n"
        "@reserve_gpu.before_end\n"
        "def extend(): reserve_gpu.reserve(for_='1h'); is_called.append(True)\n"
        f"{END_PROCESS}\n"
        "while not is_called: time.sleep(0.01)\n"
        f"{WAIT_FOR_ENDS.format(0)}\n"
        "print(reserve_gpu.current().devices[0].label)"
    )
    assert (done.returncode, done.stdout) == (0, "GPU0\n"), done


def test_before_end_replaces_a_function_of_the_same_name(busy: Machine) -> None:
    """A cell that is run again replaces its named function; lambdas are added."""
    with busy.child() as child:
        child.run("import time")
        for number in (1, 2):
            child.run(f"def save(): open('saved', 'a').write('{number}')")
            child.run("reserve_gpu.before_end(save); reserve_gpu.before_end(lambda: save())")
        child.run(END_PROCESS)
        child.process.wait(LIMIT_S)
        assert (busy.folder / "saved").read_text() == "222"


@pytest.mark.full
def test_process_that_ignores_sigterm_is_killed(busy: Machine) -> None:
    done = busy.python(
        "import reserve_gpu, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"{END_PROCESS}\n"
        "time.sleep(60)"
    )
    assert done.returncode == -signal.SIGKILL


def test_process_ends_if_no_thread_can_start(machine: Machine) -> None:
    code = (
        "import ctypes, threading, time, reserve_gpu\n"
        "reserve_gpu.reserve(for_=1, end_kernel=True)\n"
        "assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0\n"
        'def start(self): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = start\n"
        "time.sleep(60)\n"
    )
    assert machine.python(code).returncode == -signal.SIGTERM


def test_overdue_kernel_shows_it_in_each_cell(busy: Machine) -> None:
    """A kernel that has started CUDA keeps its GPU, and shows this until the lease is extended."""
    with notebook(busy, f"--for 1s\n{USE_GPU}") as kernel:
        wait_for(lambda: is_overdue(busy), 0.2)
        for _ in range(2):
            assert "overdue since" in kernel.run("1").all
        assert kernel.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])").stdout == "0\n"
        kernel.run("%reserve_gpu --for 1h")
        assert "overdue" not in kernel.run("1").all
        assert not is_overdue(busy)


@pytest.mark.promise
def test_kernel_ends_after_before_end_and_atexit(busy: Machine) -> None:
    save = "import atexit, reserve_gpu; atexit.register(lambda: open('at exit', 'w'))\n"
    save += "reserve_gpu.before_end(lambda: open('saved', 'w'))"
    with notebook(busy, f"--idle 1s --end-kernel\n{save}\n{USE_GPU}") as kernel:
        wait_for(lambda: not kernel.manager.is_alive(), 0.1)
        assert (busy.folder / "saved").exists()
        assert (busy.folder / "at exit").exists()
        assert not locked(busy.locks)


@pytest.mark.full
def test_queued_cell_can_extend_an_ended_lease(busy: Machine) -> None:
    """A cell that is queued when the lease ends runs first, and can extend the lease."""
    with busy.kernel() as kernel:
        wait = WAIT_FOR_ACTION.format("PUT_OFF")
        first = kernel.start(f"%reserve_gpu --for 0.5s --end-kernel\n{USE_GPU}\n{IMPORTS}\n{wait}")
        last = kernel.start("%reserve_gpu --for 1h")
        kernel.finish(first)
        kernel.finish(last)
        assert not kernel.run(WAIT_FOR_ENDS.format(0)).error
        assert not is_overdue(busy)
