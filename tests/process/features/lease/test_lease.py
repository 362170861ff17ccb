"""Leases in real processes: by the clock, by idleness, where somebody waits; with CUDA or not.

When something is due is a table (test_schedule.py). Here is what happens then, and who is told.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from textwrap import indent
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.lease.timer import waiters_for
from tests.support.locked import locked
from tests.support.machine import LIMIT_S
from tests.support.processes import US, queue, wait_for
from tests.support.unread import full_pipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.machine import Kernel, Machine

from tests.support.lease import IMPORTS, WAIT_FOR_ENDS, wait_for_action

START_CUDA = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)"
USE_GPU = f"{START_CUDA}; cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)"
# It is over once CUDA has started, on however busy a machine.
OVER_WITH_CUDA = f"reserve_gpu.reserve(for_='1h')\n{USE_GPU}\nreserve_gpu.reserve(for_=0.5)"
END_WITH_CUDA = f"reserve_gpu.reserve(for_='1h', end_kernel=True)\n{OVER_WITH_CUDA}"
# In a process of its own: wait for the timer, and then for what its thread is in the midst of.
WAIT_FOR_ACTION = """
while timer()._action is not Action.{}: time.sleep(0.01)
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
SOON_S = 0.2  # a time that is over soon
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def looks(here: Here) -> int:
    """Return how often somebody has looked at the use of a GPU."""
    return sum("ProcessUtilization" in call for call in here.calls())


def is_free(machine: Machine, number: int = 0) -> bool:
    """Tell whether nobody has reserved the GPU."""
    return not any(name.startswith(uuid(machine, number)) for name in locked(machine.locks))


def uuid(machine: Machine, number: int = 0) -> str:
    """Return the UUID of a GPU, as the driver has it."""
    done = machine.python(
        f"import reserve_gpu; print(reserve_gpu.status().rows[{number}].device.uuid)"
    )
    return done.stdout.strip()


def updates(kernel: Kernel, last: str) -> list[str]:
    """Return what displays were replaced by, up to a text that has this in it."""
    texts = [""]
    while last not in texts[-1]:
        message = kernel.client.get_iopub_msg(timeout=LIMIT_S)
        if message["msg_type"] == "update_display_data":
            texts.append(message["content"]["data"]["text/plain"])
    return texts


def displays(kernel: Kernel, code: str) -> list[dict[str, Any]]:
    """Return what a cell displays: messages of new displays, and of those that it replaces."""
    message, found = kernel.start(code), []
    while True:
        part = kernel.client.get_iopub_msg(timeout=LIMIT_S)
        if part["parent_header"].get("msg_id") != message:
            continue
        if part["msg_type"] in ("display_data", "update_display_data"):
            found.append(part)
        elif part["content"].get("execution_state") == "idle":
            return found


def display(kernel: Kernel, code: str) -> tuple[str, str]:
    """Return the name of the last display of a cell, and its text."""
    content = displays(kernel, code)[-1]["content"]
    return content["transient"]["display_id"], content["data"]["text/plain"]


def visible(kernel: Kernel) -> str:
    return kernel.run("import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))").stdout.strip()


@contextmanager
def notebook(machine: Machine, line: str = "", *more: str) -> Iterator[Kernel]:
    """Make a kernel that has run these lines, the first one of %reserve_gpu."""
    with machine.kernel() as kernel:
        for code in (f"%reserve_gpu {line}", *more):
            cell = kernel.run(code)
            assert not cell.error, cell.all
        yield kernel


def test_only_who_could_use_it_wants_it(here: Here) -> None:
    """Whoever waits for another GPU wants nothing of this one; nor does one's own wait."""
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


def test_one_who_is_stopped_has_no_heartbeat(here: Here) -> None:
    """Whoever waits but is stopped (Ctrl-Z) takes nothing; they get the GPU when they go on."""
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


# -- processes ------------------------------------------------------------------------------------


def test_a_script_is_told_in_its_log(machine: Machine) -> None:
    """A program without cells reads it on stderr, as a warning of the log."""
    done = machine.python(
        f"import reserve_gpu\n{IMPORTS}\nreserve_gpu.reserve(for_='0.3s')\n"
        "while reserve_gpu.current(): time.sleep(0.01)\nprint(session().run(int))"
    )
    assert done.stdout == "0\n"
    assert "The reservation of GPU0 ended at" in done.stderr


def test_an_overdue_script_is_told_in_its_log(busy: Machine) -> None:
    """A program that goes on past the end, with CUDA, reads that it is overdue, once."""
    wait = WAIT_FOR_ACTION.format("MARK_OVERDUE")
    done = busy.python(f"import reserve_gpu\n{IMPORTS}\n{OVER_WITH_CUDA}\n{wait}")
    assert done.stderr.count("GPU0 has been overdue since") == 1


@pytest.mark.promise
def test_cuda_that_is_starting_keeps_it(busy: Machine) -> None:
    """A cuInit that has read the variables before the end gets what it has read."""
    busy.write(f"{busy.scenario.read_text()}\ndelay cuInit * 1")
    with busy.child() as child:
        child.run("from reserve_gpu.reservation.session import session")
        child.run("import threading, ctypes; cuda = ctypes.CDLL('libcuda.so.1')")
        child.run("start = threading.Thread(target=lambda: cuda.cuInit(0))")
        child.run("start.start(); reserve_gpu.reserve(for_=0.2)")
        wait_for(lambda: child.run("session().held.overdue").value)
        assert child.run("os.environ['CUDA_VISIBLE_DEVICES']").value == "0"
        assert not is_free(busy)


def test_cuda_that_does_not_start_keeps_nothing(busy: Machine) -> None:
    """Where the library is loaded, and nobody starts it, the GPU is released a little later."""
    with busy.child() as child:
        child.run("import ctypes; cuda = ctypes.CDLL('libcuda.so.1')")
        child.run("reserve_gpu.reserve(for_=0.2)")
        wait_for(lambda: child.run("os.environ['CUDA_VISIBLE_DEVICES']").value == "")
        assert locked(busy.locks)
        wait_for(lambda: not locked(busy.locks))
        assert child.run("cuda.cuInit(0)").value == NO_DEVICE


def test_a_wait_for_more_keeps_nothing_past_its_end(machine: Machine) -> None:
    """Who waits for a second GPU releases the first one in time."""
    with machine.child() as child, machine.child() as other:
        assert other.reserve("1").value == "1"
        child.run("reserve_gpu.reserve('0', for_=0.5)")
        child.send("reserve_gpu.reserve(count=2, wait=60)")
        wait_for(lambda: queue(machine))
        wait_for(lambda: is_free(machine))
        child.kill()


def test_a_child_on_the_gpu_keeps_it(busy: Machine) -> None:
    """What a launcher has started has the GPU past the end, and no longer than it runs."""
    with busy.child() as child:
        child.run("import subprocess, sys")
        child.run("reserve_gpu.reserve(for_='1h')")
        program = f"{USE_GPU}; print(flush=True); input()"
        child.run(
            f"job = subprocess.Popen([sys.executable, '-c', {program!r}], text=True, "
            "stdin=subprocess.PIPE, stdout=subprocess.PIPE)"
        )
        child.run("job.stdout.readline(); reserve_gpu.reserve(for_=0.2)")
        wait_for(lambda: "overdue since" in busy.command(*US, "status").stdout, 0.2)
        assert not is_free(busy)
        child.run("job.communicate('')")
        wait_for(lambda: is_free(busy))


def test_a_child_that_may_come_is_named(machine: Machine) -> None:
    """Who has started something that may use the GPU later reads what that is."""
    done = machine.python(
        "import reserve_gpu, subprocess, sys, time\n"
        "reserve_gpu.reserve(for_='1h')\n"
        "job = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "reserve_gpu.reserve(for_=0.2)\n"
        "while reserve_gpu.current(): time.sleep(0.01)\n"
        "job.communicate(b'\\n')"
    )
    assert re.search(r"started from here: python\S* -c input\(\) \(pid [0-9]+\)\.", done.stderr)


@pytest.mark.promise
def test_nothing_is_visible_before_it_is_released(machine: Machine) -> None:
    """At the end the variable is empty before the lock goes, and has no other value after."""
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
        "sys.addaudithook(note)\n"
        "while reserve_gpu.current(): time.sleep(0.01)\n"
        "from reserve_gpu.reservation.session import session\n"
        "session().run(int)  # comes after what its thread is in the midst of\n"
        "print(*dict.fromkeys(events))"
    )
    assert done.stdout == "b'' unlocked\n"


@pytest.mark.full
def test_what_was_left_to_the_next_program_ends(machine: Machine) -> None:
    """The program that a process becomes by exec, as a kernel does, waits for its end."""
    program = "import reserve_gpu, time\nwhile reserve_gpu.current(): time.sleep(0.01)"
    done = machine.python(
        "import os, sys, reserve_gpu\n"
        "from reserve_gpu import api\n"
        "reserve_gpu.reserve(for_=2)\n"
        "api.before_exec()\n"
        f"os.execv(sys.executable, [sys.executable, '-c', {program!r}])"
    )
    assert "The reservation of GPU0 ended at" in done.stderr


@pytest.mark.full
def test_a_stopped_process_is_overdue(machine: Machine) -> None:
    """Who is stopped (SIGSTOP) past the end is overdue for all; it ends as soon as it goes on."""
    with machine.child() as child:
        child.run("import time; reserve_gpu.reserve(for_=4)")  # it is stopped before that is over
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: "overdue since" in machine.command(*US, "status").stdout, 0.2)
        os.kill(child.pid, signal.SIGCONT)
        wait_for(lambda: not locked(machine.locks))


@pytest.mark.parametrize(
    ("wishes", "code", "sign"),
    [
        ("for_='1h', idle='1h'", "", "until "),
        ("for_=0.5, if_wanted=True", "", "join the queue"),
        ("for_=0.5", USE_GPU, "overdue since"),
        ("for_=0.5, end_kernel=True", f"reserve_gpu.before_end(save); {USE_GPU}", "overdue since"),
    ],
)
def test_killed_in_the_midst(busy: Machine, wishes: str, code: str, sign: str) -> None:
    """Killed before the end, after it, overdue or while it saves, it leaves a free GPU."""
    with busy.child() as child:
        child.run("import time; save = lambda: time.sleep(60)")
        begin, code = "reserve_gpu.reserve(for_='1h')", code or "0"
        assert not child.run(f"{begin}; {code}; reserve_gpu.reserve({wishes})").error
        wait_for(lambda: sign in busy.command(*US, "status").stdout, 0.2)
        child.kill()
        assert not locked(busy.locks)
        assert "Both GPUs are free" in busy.command(*US, "status").stdout


@pytest.mark.promise
def test_end_of_a_script(busy: Machine) -> None:
    """With end_kernel a program that uses CUDA is ended by SIGTERM, after what it wanted called."""
    done = busy.python(
        "import reserve_gpu, time\n"
        "reserve_gpu.before_end(lambda: open('saved', 'w'))\n"
        "reserve_gpu.before_end(lambda: 1 / 0)\n"
        "@reserve_gpu.before_end(limit=0.2)\n"
        "def save(): time.sleep(60)\n"
        "reserve_gpu.before_end(lambda: open('saved too', 'w'))\n"
        f"{END_WITH_CUDA}\n"
        "time.sleep(60)"
    )
    assert done.returncode == -signal.SIGTERM
    assert (busy.folder / "saved").exists()
    assert (busy.folder / "saved too").exists()
    assert "raised ZeroDivisionError: division by zero" in done.stderr
    assert "did not finish within 0.2 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert not locked(busy.locks)


@pytest.mark.parametrize("code", ["reserve_gpu.reserve(for_=0.5)", END_WITH_CUDA])
def test_an_end_with_a_full_stderr(busy: Machine, code: str) -> None:
    """A reservation ends though the process logs that into a full pipe."""
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


def test_each_end_calls_once(busy: Machine) -> None:
    """A function that prolongs by little is called once more, at the end of that."""
    done = busy.python(
        f"import reserve_gpu\n{IMPORTS}\n"
        "calls = []\n"
        "@reserve_gpu.before_end\n"
        "def save():\n"
        "    calls.append(len(calls))\n"
        "    print(calls, flush=True)\n"
        "    if len(calls) > 1:  # the first end is none, which changes nothing for this one\n"
        + indent(WAIT_FOR_ENDS.format(1), " " * 8)
        + "    else:\n"
        "        reserve_gpu.reserve(for_=0.2)\n"
        "        while len(calls) == 1: time.sleep(0.01)\n"
        f"{END_WITH_CUDA}\n"
        "time.sleep(60)"
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "[0]\n[0, 1]\n"), done


def test_released_before_the_end(busy: Machine) -> None:
    """A function of before_end() that releases does not keep the process from its end."""
    with busy.child() as child:
        child.run("reserve_gpu.before_end(lambda: reserve_gpu.release())")
        child.run(END_WITH_CUDA)
        assert child.process.wait(LIMIT_S) == -signal.SIGTERM


def test_before_end_is_replaced(busy: Machine) -> None:
    """A function of the same name takes the place of the earlier one, as its cell may run again."""
    with busy.child() as child:
        child.run("import time")
        for number in (1, 2):
            child.run(f"def save(): open('saved', 'a').write('{number}')")
            child.run("reserve_gpu.before_end(save); reserve_gpu.before_end(lambda: save())")
        child.run(END_WITH_CUDA)
        child.process.wait(LIMIT_S)
        assert (busy.folder / "saved").read_text() == "222"


def test_a_refused_order_prolongs_nothing(busy: Machine) -> None:
    """What is refused once CUDA has started changes no terms."""
    with busy.child() as child:
        child.run(f"first = reserve_gpu.reserve('0,1', for_='1h'); {USE_GPU}")
        until = child.run("first.lease.until").value
        assert child.run("reserve_gpu.reserve('1,0', for_='3h')").error == "TooLateError"
        assert child.run("first.lease.until").value == until


# -- kernels --------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_display_is_replaced(machine: Machine) -> None:
    """In a notebook the output of the cell that reserved changes at the warnings and the end."""
    with notebook(machine, "--for 4s") as kernel:
        texts = updates(kernel, "The reservation of GPU0 ended at")
        assert any("GPU0 ends at" in text for text in texts)
        assert visible(kernel) == ""


@pytest.mark.parametrize(
    ("line", "last"),
    [
        ("--for 0.5s", "ended at"),
        pytest.param("--for 1h", "was released", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("then", ["", "--for 1h"])
def test_the_last_word_of_a_cell_stays(machine: Machine, line: str, last: str, then: str) -> None:
    """What a cell shows of a reservation that is over is not replaced by what the next one says."""
    with notebook(machine, line) as kernel:
        if last == "was released":
            assert last in kernel.run("%reserve_gpu --release").shown
        else:
            updates(kernel, last)
        reserving = kernel.run(f"%reserve_gpu {then}").shown
        assert reserving.count("yours until") == bool(then)
        assert "was released" not in reserving
        assert kernel.run("%reserve_gpu --release").shown.count("was released") == bool(then)


def test_each_cell_that_has_reserved_tells_the_end(machine: Machine) -> None:
    """What prolongs a reservation, or asks for it again, shows the same line; one replaces all."""
    with machine.kernel() as kernel:
        lines = ("--for 1h", "--for 2h", "", "--release")
        shown = [display(kernel, f"%reserve_gpu {line}") for line in lines]
    assert len({known for known, _ in shown}) == 1
    assert all("GPU0 is yours until" in text for _, text in shown[:-1])
    assert shown[-1][1] == "This reservation was released."


@pytest.mark.ipython
def test_a_cell_that_runs_past_the_end(machine: Machine) -> None:
    """What has reserved says that it is over meanwhile, which no %%capture takes for its cell's."""
    (machine.folder / "on").touch()
    end = "reserve_gpu.reserve(for_=0.5, progress=None)"
    wait = "while os.path.exists('on'): time.sleep(0.01)"
    with notebook(machine, "--for 1h") as kernel:
        cell = kernel.start(f"%%capture captured\nimport os, time, reserve_gpu\n{end}\n{wait}")
        assert updates(kernel, "GPU0 will be released when the running cell ends")
        (machine.folder / "on").unlink()
        kernel.finish(cell)
        assert kernel.run("print(captured.outputs)").stdout == "[]\n"


@pytest.mark.xdist_group("nbclient")  # nbformat takes seconds to load where JupyterLab is, too
@pytest.mark.full
def test_run_unattended(machine: Machine) -> None:
    """A notebook that nbclient runs says in its next cell, and in its file, that it is over.

    It ends between two cells, when nbclient does not listen.
    """
    pytest.importorskip("nbclient")
    done = machine.python(UNATTENDED)
    reserving, told = done.stdout.splitlines()
    assert "GPU0 ended at" in reserving  # replaced
    assert "GPU0 ended at" in told
    assert "sees []" in told


def test_a_release_is_shown(machine: Machine) -> None:
    """The cell that has reserved says no more until when that was."""
    with notebook(machine, "--for 1h") as kernel:
        assert "was released" in kernel.run("%reserve_gpu --release").all


def test_overdue(busy: Machine) -> None:
    """With CUDA it stays reserved; all see that it is overdue, until it is prolonged."""
    with notebook(busy, f"--for 1s\n{USE_GPU}") as kernel:
        wait_for(lambda: "overdue since" in busy.command(*US, "status").stdout, 0.2)
        for _ in range(2):
            assert "GPU0 has been overdue since" in kernel.run("1").all
        new = [
            each for each in displays(kernel, "%reserve_gpu") if "update" not in each["msg_type"]
        ]
        assert sum("GPU0 has been overdue since" in str(each) for each in new) == 1
        assert "is yours" not in str(new)
        assert visible(kernel) == "0"
        kernel.run("%reserve_gpu --for 1h")
        assert "overdue" not in kernel.run("1").all
        assert "overdue" not in busy.command(*US, "status").stdout


@pytest.mark.promise
def test_end_of_a_kernel(busy: Machine) -> None:
    """With --end-kernel it ends as a kernel does, after what it wanted called, and all is free."""
    save = "import atexit, reserve_gpu; atexit.register(lambda: open('at exit', 'w'))\n"
    save += "reserve_gpu.before_end(lambda: open('saved', 'w'))"
    with notebook(busy, f"--idle 1s --end-kernel\n{save}\n{USE_GPU}") as kernel:
        wait_for(lambda: not kernel.manager.is_alive(), 0.1)
        assert (busy.folder / "saved").exists()
        assert (busy.folder / "at exit").exists()
        assert not locked(busy.locks)


@pytest.mark.full
def test_the_next_cell_of_run_all_prolongs(busy: Machine) -> None:
    """A cell that waits for its turn when the end comes is begun first, and can ask for more."""
    with busy.kernel() as kernel:
        line = "%reserve_gpu --for 0.5s --end-kernel"
        wait = WAIT_FOR_ACTION.format("PUT_OFF")
        first = kernel.start(f"{line}\n{USE_GPU}\n{IMPORTS}\n{wait}")
        last = kernel.start("%reserve_gpu --for 1h")
        kernel.finish(first)
        kernel.finish(last)
        assert not kernel.run(WAIT_FOR_ENDS.format(0)).error
        assert "overdue" not in busy.command(*US, "status").stdout


def test_a_process_that_nohup_has_left_is_a_child(machine: Machine) -> None:
    """What a kernel has started by `nohup ... &` is its own: it has the kernel's session still."""
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


def test_a_process_ends_without_a_thread(machine: Machine) -> None:
    """Where no thread can be had at the end of the time, the process ends all the same."""
    code = (
        "import ctypes, threading, time, reserve_gpu\n"
        "reserve_gpu.reserve(for_=1, end_kernel=True)\n"
        "assert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0\n"
        'def start(self): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = start\n"
        "time.sleep(60)\n"
    )
    assert machine.python(code).returncode == -signal.SIGTERM
