"""Leases in scripts and kernels, with and without CUDA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from textwrap import indent
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.lease.timer import waiters_for
from tests.support.descriptors import BEFORE, assert_all_are_told
from tests.support.executor import LOCK_IMPORTS
from tests.support.lease import IMPORTS, wait_for_action
from tests.support.locked import held, locked
from tests.support.machine import LIMIT_S
from tests.support.processes import US, queue, wait_for
from tests.support.unread import full_pipe

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
UNATTENDED = """
import time

import nbformat
from nbclient import NotebookClient

import reserve_gpu


def wait_for_the_end(cell, cell_index):
    until = time.monotonic() + 60
    while cell_index == 2 and reserve_gpu.status().rows[0].holders and time.monotonic() < until:
        time.sleep(0.1)


codes = ["%load_ext reserve_gpu", "%reserve_gpu --for 1s"]
codes += ["import os; print('sees [' + os.environ['CUDA_VISIBLE_DEVICES'] + ']')"]
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
NotebookClient(book, kernel_name="python3", on_cell_start=wait_for_the_end).execute()
for cell in book.cells[1:]:
    print(cell.outputs)
"""
SOON_S = 0.2
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def is_overdue(machine: Machine) -> bool:
    """Return whether other processes see that the holder of the first GPU is overdue."""
    status = json.loads(machine.command(*US, "status", "--json").stdout)
    return any(holder["overdue"] for holder in status["devices"][0]["holders"])


def displays(kernel: Kernel, message: str) -> list[dict[str, Any]]:
    """Return the messages of a started cell that show or replace a display."""
    found = []
    while True:
        part = kernel.client.get_iopub_msg(timeout=LIMIT_S)
        if part["parent_header"].get("msg_id") != message:
            continue
        if part["msg_type"] in ("display_data", "update_display_data"):
            found.append(part)
        elif part["content"].get("execution_state") == "idle":
            return found


def replacements(kernel: Kernel, last: str) -> list[str]:
    """Return the texts that replace displays, up to one that contains the given text."""
    texts = [""]
    while last not in texts[-1]:
        message = kernel.client.get_iopub_msg(timeout=LIMIT_S)
        if message["msg_type"] == "update_display_data":
            texts.append(message["content"]["data"]["text/plain"])
    return texts


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


def test_waiter_sees_the_device_that_ends_first(here: Here) -> None:
    with here.child() as later, here.child() as sooner, here.child() as waiter:
        later.reserve("0, for_='5h'")
        sooner.reserve("1, for_='2h'")
        waiter.run(
            "seen = []\ndef stop(waiting):\n    seen.append(waiting)\n    raise KeyboardInterrupt\n"
            "reserve_gpu.reserve(wait=60, progress=stop)"
        )
        text = waiter.run(
            "from reserve_gpu.render import pictures; str(pictures.wait(seen[0]))"
        ).value
    assert "GPU1, reserved until " in text.splitlines()[-1]


def test_wait_for_another_device_does_not_delay_the_end(here: Here) -> None:
    with here.child() as child, here.child() as other:
        other.reserve("1")
        child.run("reserve_gpu.reserve('0', for_=0.5)")
        child.send("reserve_gpu.reserve(count=2, wait=60)")
        wait_for(lambda: queue(here))
        wait_for(lambda: held(here) == [1])
        child.kill()


# -- scripts ---------------------------------------------------------------------------------------


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


def test_script_logs_once_that_it_is_overdue(busy: Machine) -> None:
    wait = WAIT_FOR_ACTION.format("MARK_OVERDUE")
    done = busy.python(f"import reserve_gpu\n{IMPORTS}\n{OVERDUE}\n{wait}")
    assert done.stderr.count("overdue since") == 1


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


def test_loaded_cuda_library_does_not_keep_the_device(busy: Machine) -> None:
    """The variables are emptied before the release, in case CUDA starts meanwhile."""
    with busy.child() as child:
        child.run("import ctypes; cuda = ctypes.CDLL('libcuda.so.1')")
        child.run("reserve_gpu.reserve(for_=0.2)")
        wait_for(lambda: child.visible() == "")
        assert locked(busy.locks)
        wait_for(lambda: not locked(busy.locks))
        assert child.run("cuda.cuInit(0)").value == NO_DEVICE


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


def test_refused_request_does_not_extend_the_lease(busy: Machine) -> None:
    with busy.child() as child:
        child.run(f"first = reserve_gpu.reserve('0,1', for_='1h'); {USE_GPU}")
        until = child.run("first.lease.until").value
        assert child.run("reserve_gpu.reserve('1,0', for_='3h')").error == "TooLateError"
        assert child.run("first.lease.until").value == until


def test_background_process_is_a_descendant(machine: Machine) -> None:
    """A process that a kernel starts with `nohup ... &` has the kernel's session."""
    machine.write("gpu\n")
    with machine.child() as child:
        child.run("os.setsid()")  # as Jupyter starts a kernel
        child.run("os.system('nohup sleep 1000 >/dev/null 2>&1 & echo $! > pid')")
        wait_for(lambda: (machine.folder / "pid").read_text().strip())
        pid = int((machine.folder / "pid").read_text())
        try:
            machine.write(f"gpu\n  compute {pid} 300\n")
            child.run("import reserve_gpu.allocation.snapshot")
            child.run("reserve_gpu.reserve('0')")
            (row,) = child.run("reserve_gpu.status().to_dict()['devices']").value
            assert row["is_used_without_reservation"] is False
            assert [process["has_reserved"] for process in row["processes"]] == [True]
        finally:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("before", BEFORE)
def test_missing_descriptors_are_reported(machine: Machine, before: str) -> None:
    assert_all_are_told(machine, before, "for_='1h'")


def test_lease_ends_if_the_import_lock_is_held(machine: Machine) -> None:
    """A lease begins and ends although a signal handler has left Python's import lock acquired."""
    with machine.child() as child:
        child.run(LOCK_IMPORTS)
        assert child.reserve("'1', for_='1h'").error is None
        assert child.run("reserve_gpu.release()\nreserve_gpu.current()").value is None
        assert child.reserve("for_=0.5").error is None
        wait_for(lambda: child.run("reserve_gpu.current() is None").value)
        assert child.visible() == ""


# -- the end of a process --------------------------------------------------------------------------


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


def test_before_end_is_called_at_each_end(busy: Machine) -> None:
    """A function that extends the lease is called again at the next end, which ends the process."""
    done = busy.python(
        f"import reserve_gpu\n{IMPORTS}\n"
        "calls = []\n"
        "@reserve_gpu.before_end\n"
        "def save():\n"
        "    calls.append(len(calls))\n"
        "    print(calls, flush=True)\n"
        "    if len(calls) > 1:  # the first end is canceled, and must not affect this one\n"
        + indent(WAIT_FOR_ENDS.format(1), " " * 8)
        + "    else:\n"
        "        reserve_gpu.reserve(for_=0.2)\n"
        "        while len(calls) == 1: time.sleep(0.01)\n"
        f"{END_PROCESS}\n"
        "time.sleep(60)"
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "[0]\n[0, 1]\n"), done


def test_process_ends_after_before_end_releases(busy: Machine) -> None:
    with busy.child() as child:
        child.run("reserve_gpu.before_end(lambda: reserve_gpu.release())")
        child.run(END_PROCESS)
        assert child.process.wait(LIMIT_S) == -signal.SIGTERM


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


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_output_of_the_reserving_cell_is_updated(machine: Machine) -> None:
    """The output of the cell that has reserved changes at a warning and at the end."""
    with notebook(machine, "--for 4s") as kernel:
        texts = replacements(kernel, "GPU0 ended at")
        assert any("ends at" in text for text in texts)
        assert "visible ''" in kernel.run(
            "import os; print('visible', repr(os.environ['CUDA_VISIBLE_DEVICES']))"
        ).stdout  # fmt: skip


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ("--for 0.5s", "ended at"),
        pytest.param("--for 1h", "was released", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("next_options", ["", "--for 1h"])
def test_last_message_is_not_replaced_by_the_next_reservation(
    machine: Machine, options: str, last: str, next_options: str
) -> None:
    with notebook(machine, options) as kernel:
        if last == "was released":
            assert last in kernel.run("%reserve_gpu --release").shown
        else:
            replacements(kernel, last)
        reserving = kernel.run(f"%reserve_gpu {next_options}").shown
        assert reserving.count("yours until") == bool(next_options)
        assert "was released" not in reserving
        shown = kernel.run("%reserve_gpu --release").shown
        assert shown.count("was released") == bool(next_options)


def test_all_reserving_cells_share_a_display(machine: Machine) -> None:
    """Each cell that extends or repeats a reservation shows the same display."""
    with machine.kernel() as kernel:
        shown = [
            displays(kernel, kernel.start(f"%reserve_gpu {options}"))[-1]["content"]
            for options in ("--for 1h", "--for 2h", "", "--release")
        ]
    assert len({content["transient"]["display_id"] for content in shown}) == 1
    texts = [content["data"]["text/plain"] for content in shown]
    assert ["yours until" in text for text in texts] == [True, True, True, False]
    assert "released" in texts[-1]


@pytest.mark.ipython
def test_capture_does_not_capture_the_end(machine: Machine) -> None:
    """The end is shown in the output of the reserving cell, not in the running cell's."""
    (machine.folder / "on").touch()
    end = "reserve_gpu.reserve(for_=0.5, progress=None)"
    wait = "while os.path.exists('on'): time.sleep(0.01)"
    with notebook(machine, "--for 1h") as kernel:
        cell = kernel.start(f"%%capture captured\nimport os, time, reserve_gpu\n{end}\n{wait}")
        assert replacements(kernel, "when the running cell ends")
        (machine.folder / "on").unlink()
        kernel.finish(cell)
        assert kernel.run("print(captured.outputs)").stdout == "[]\n"


@pytest.mark.xdist_group("nbclient")  # importing nbformat takes seconds if JupyterLab is installed
@pytest.mark.full
def test_nbclient_stores_the_end(machine: Machine) -> None:
    """A lease that ends between two cells is shown by the next cell, and stored in the notebook.

    nbclient ignores updates between cells.
    """
    pytest.importorskip("nbclient")
    reserving, next_cell = machine.python(UNATTENDED).stdout.splitlines()
    assert "GPU0 ended at" in reserving  # replaced
    assert "GPU0 ended at" in next_cell
    assert "sees []" in next_cell


def test_overdue_kernel_shows_it_in_each_cell(busy: Machine) -> None:
    """A kernel that has started CUDA keeps its GPU, and shows this until the lease is extended."""
    with notebook(busy, f"--for 1s\n{USE_GPU}") as kernel:
        wait_for(lambda: is_overdue(busy), 0.2)
        for _ in range(2):
            assert "overdue since" in kernel.run("1").all
        new = [
            each
            for each in displays(kernel, kernel.start("%reserve_gpu"))
            if "update" not in each["msg_type"]
        ]
        assert sum("overdue since" in str(each) for each in new) == 1
        assert "is yours" not in str(new)
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
