"""Waiting processes: the order of service, killed and stopped processes, and the display."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import sys
import termios
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from reserve_gpu.allocation import policy
from reserve_gpu.locks.directory import MUTEX_LIMIT_S
from reserve_gpu.locks.queue import STOPPED_S
from tests.support import users
from tests.support.machine import LIMIT_S, TAKE_THE_MUTEX, Machine
from tests.support.platforms import CONTAINER, behind
from tests.support.processes import wait_for
from tests.support.waiters import Waiter, queued, read, stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.machine import Kernel

ONE_GPU = "gpu\n  uuid GPU-00000000-0000-4000-8000-000000000000\n"
# A timeout before which a waiter checks a reserved GPU only if /proc/locks shows a change.
NO_CHECK_S = policy.QUIET_S - 0.5
# With this setting, a waiter finds this GPU busy; other processes find it idle.
USED_GPU = "gpu\n  memory 16384\n  used 700\n"
FINDS_IT_BUSY = {"RESERVE_GPU_IDLE_MEMORY": "100MiB"}

users_machine = users.machine  # the fixture of a machine for several users


@pytest.fixture
def one(machine: Machine) -> Machine:
    """Make a machine with one idle GPU."""
    machine.write(ONE_GPU)
    return machine


# -- the order -------------------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.parametrize("is_several", [False, True], ids=["one user", "three users"])
def test_waiters_are_served_first_come_first_served(
    request: pytest.FixtureRequest, *, is_several: bool
) -> None:
    """A GPU that is released, or whose holder is killed, goes to the first waiter in the queue."""
    machine: Machine = request.getfixturevalue("users_machine" if is_several else "machine")
    machine.write(ONE_GPU)
    names = ["root", users.NOBODY, users.DAEMON, "root"]
    children = [users.child_of(machine, u) if is_several else machine.child() for u in names]
    with children[0] as holder, children[1] as a, children[2] as b, children[3] as c:
        assert holder.reserve().value == "0"
        waiters = [Waiter(machine, child) for child in (a, b, c)]
        for place, waiter in enumerate(waiters, 1):
            waiter.sees(place, "reserved")
        for end in (holder.kill, lambda: a.run("reserve_gpu.release()"), b.kill):
            assert queued(machine) == [waiter.pid for waiter in waiters]
            with stopped(machine, waiters[0].pid):
                end()
                for place, waiter in enumerate(waiters[1:], 2):
                    waiter.sees(place, "awaited")  # they don't overtake the slow first waiter
            assert waiters.pop(0).answer().value == "0"
        assert queued(machine) == []


@pytest.mark.promise
def test_a_killed_waiter_leaves_the_queue(one: Machine) -> None:
    """If a waiter is killed, the next waiter is first."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        killed, waiter = Waiter(one, a), Waiter(one, b)
        assert queued(one) == [killed.pid, waiter.pid]
        a.kill()
        assert queued(one) == [waiter.pid]
        waiter.sees(1, "reserved")
        holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"


def test_waiters_keep_their_order_in_a_new_lock_directory(one: Machine) -> None:
    """If the lock directory is deleted, waiters rejoin the queue in a new one in the old order."""
    one.write(f"{ONE_GPU}  compute 4321000 3500\n")
    with one.child() as a, one.child() as b, one.child() as c:
        first, second = Waiter(one, a), Waiter(one, b)
        shutil.rmtree(one.locks)
        wait_for(lambda: sorted(queued(one)) == sorted([first.pid, second.pid]))
        assert queued(one) == [first.pid, second.pid]
        third = Waiter(one, c)
        one.write(ONE_GPU)
        for waiter in (first, second, third):
            assert waiter.answer().value == "0"
            waiter.child.run("reserve_gpu.release()")


# -- stopped processes -----------------------------------------------------------------------------


@pytest.mark.full
def test_a_waiter_outlasts_a_stopped_holder_of_the_mutex(one: Machine) -> None:
    """A waiter waits for the mutex longer than other processes, and then continues."""
    with one.child() as stopped_child, one.child() as child:
        assert stopped_child.run(TAKE_THE_MUTEX).error is None
        child.send(f"reserve_gpu.reserve(wait={2 * MUTEX_LIMIT_S}).devices[0].label")
        time.sleep(MUTEX_LIMIT_S + 1)
        stopped_child.kill()
        assert child.answer().value == "GPU0"


@pytest.mark.full
def test_a_stopped_waiter_is_skipped(one: Machine) -> None:
    """A free GPU goes to the second waiter if the first one is stopped, which keeps its place."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        first, second = Waiter(one, a), Waiter(one, b)
        with stopped(one, first.pid):
            holder.run("reserve_gpu.release()")
            start = time.monotonic()
            assert second.answer().value == "0"
            assert time.monotonic() - start > STOPPED_S - 1  # its last heartbeat may be older
            assert queued(one) == [first.pid]
        b.kill()
        assert first.answer().value == "0"


def test_a_stopped_waiter_does_not_block_a_request_without_wait(one: Machine) -> None:
    """A request without `wait` gets a GPU that a stopped waiter has not taken for 5 s."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, a)
        with stopped(one, waiter.pid):
            holder.run("reserve_gpu.release()")
            assert b.reserve().value == "0"


def test_a_request_without_wait_gives_waiters_time(one: Machine) -> None:
    """A request without `wait` does not overtake a waiter that is stopped for a moment."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, a)
        with stopped(one, waiter.pid):
            holder.run("reserve_gpu.release()")
            calls = len(one.calls())
            b.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
            wait_for(lambda: len(one.calls()) > calls)
        assert waiter.answer().value == "0"
        answer = b.answer()
        assert answer.error == "NoFreeDeviceError"
        assert "GPU0 is reserved" in answer.text


def test_a_waiter_that_takes_no_gpu_does_not_block_a_request_without_wait(one: Machine) -> None:
    """A request without `wait` gets a GPU that a running waiter has not taken for 5 s."""
    one.write(USED_GPU)
    with one.child(**FINDS_IT_BUSY) as a, one.child() as b:
        Waiter(one, a)
        assert b.reserve().value == "0"


def test_a_request_without_wait_does_not_pass_a_waiter_for_several(machine: Machine) -> None:
    """A request without `wait` is refused the GPU that a running waiter for two GPUs needs."""
    machine.write("gpu\ngpu\n")
    with machine.child() as holder, machine.child() as a, machine.child() as b:
        assert holder.reserve().value == "0"
        Waiter(machine, a, "count=2")
        assert b.reserve().error == "NoFreeDeviceError"
        assert b.visible() == ""


def test_a_request_without_wait_is_refused_once_a_waiter_for_several_is_first(
    machine: Machine,
) -> None:
    """If the first waiter leaves, a request without `wait` is refused for the next one."""
    machine.write(USED_GPU * 2)
    with (
        machine.child() as holder,
        machine.child(**FINDS_IT_BUSY) as a,
        machine.child() as b,
        machine.child() as c,
    ):
        assert holder.reserve("'1'").value == "1"
        Waiter(machine, a)
        Waiter(machine, b, "count=2")
        has_begun = machine.folder / "has begun"
        c.send(f"reserve_gpu.reserve(progress=lambda _: open({str(has_begun)!r}, 'w').close())")
        wait_for(has_begun.exists)
        a.kill()
        assert c.answer().error == "NoFreeDeviceError"


# -- the end of a wait -----------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.parametrize("when", ["during the wait", "while the driver starts"])
def test_an_interrupt_ends_a_wait(one: Machine, when: str) -> None:
    """Ctrl-C ends a wait or its preparation, hides all GPUs and leaves the queue."""
    with one.child() as holder, one.child() as child:
        if when == "during the wait":
            assert holder.reserve().value == "0"
            Waiter(one, child)
        else:
            one.add("delay nvmlInitWithFlags * 60")
            child.send("reserve_gpu.reserve(wait=True)")
            wait_for(one.calls)
        os.kill(child.pid, signal.SIGINT)
        assert child.answer().error == "KeyboardInterrupt"
        assert queued(one) == []
        assert child.visible() == ""


@pytest.mark.promise
@pytest.mark.parametrize(
    ("end", "place"),
    [
        ("release", "here"),
        ("kill", "here"),
        ("kill", "in a container"),
        pytest.param("release", "in a container", marks=pytest.mark.full),
    ],
)
def test_a_waiter_notices_that_a_gpu_is_free(one: Machine, end: str, place: str) -> None:
    """A waiter notices at once that a GPU is released or its holder killed, even in a container."""
    waiting = one.child() if place == "here" else behind(one, *CONTAINER)
    with one.child() as holder, waiting as child:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, child, limit_s=NO_CHECK_S)
        if end == "kill":
            holder.kill()
        else:
            holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"


@pytest.mark.full
def test_a_waiter_uses_little_cpu_time(one: Machine) -> None:
    """Each waiter for a reserved GPU uses at most 2 % of a core."""
    children = one.child(), one.child(), one.child(), one.child()
    with children[0] as holder, children[1] as a, children[2] as b, children[3] as c:
        assert holder.reserve().value == "0"
        processes = [psutil.Process(Waiter(one, child).pid) for child in (a, b, c)]
        time.sleep(1)
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(6)
        after = [sum(process.cpu_times()[:2]) for process in processes]
        assert all(late - early <= 0.12 for early, late in zip(before, after, strict=True))


# -- the display -----------------------------------------------------------------------------------


def start_waiting(kernel: Kernel, is_waiting: Callable[[], bool], code: str) -> str:
    """Start a cell that waits, and return its message's ID once it has displayed a line."""
    cell = kernel.start(code)
    wait_for(is_waiting)
    while kernel.client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "display_data":
        pass
    return cell


def visible_devices(kernel: Kernel) -> str:
    """Return the output of a cell that prints CUDA_VISIBLE_DEVICES."""
    return kernel.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])").stdout


def test_a_waiting_cell_updates_one_display(one: Machine) -> None:
    """A cell that waits updates one display in place, which is empty at the end."""
    pytest.importorskip("ipykernel.kernelspec")
    displays = []
    with one.child() as holder, one.child() as ahead, one.kernel() as kernel:
        assert holder.reserve("note='the thesis'").value == "0"
        pid, first = kernel.pid, Waiter(one, ahead)
        cell = kernel.start("%reserve_gpu --wait")
        wait_for(lambda: queued(one) == [first.pid, pid])
        holder.kill()
        assert first.answer().value == "0"
        ahead.run("reserve_gpu.release()")
        while (part := kernel.client.get_iopub_msg(timeout=LIMIT_S))["msg_type"] != "stream":
            if part["msg_type"].endswith("display_data"):
                displays.append(part)
        kernel.reply(cell)
    kinds = [part["msg_type"] for part in displays]
    assert kinds == ["display_data", *["update_display_data"] * (len(kinds) - 1)]
    assert len({part["content"]["transient"]["display_id"] for part in displays}) == 1
    shown = [part["content"]["data"]["text/plain"] for part in displays]
    assert "number 2" in shown[0]
    assert shown[-1] == ""
    assert "GPU0" in part["content"]["text"]


def test_interrupting_a_cell_that_waits(one: Machine) -> None:
    """An interrupted cell shows no traceback; the kernel holds nothing, and has left the queue."""
    pytest.importorskip("ipykernel.kernelspec")
    with one.child() as holder, one.kernel() as kernel:
        assert holder.reserve().value == "0"
        pid = kernel.pid
        cell = start_waiting(kernel, lambda: queued(one) == [pid], "%reserve_gpu --wait")
        kernel.manager.interrupt_kernel()
        done = kernel.finish(cell)
        assert kernel.reply(cell)["status"] == "error"
        assert (done.error, done.traceback) == (None, [])
        assert "is kept for 2 min" in done.stdout  # the place in the queue
        assert done.values[-1]["text/plain"] == ""
        assert queued(one) == []
        assert visible_devices(kernel) == "['']\n"
        holder.run("reserve_gpu.release()")
        assert holder.reserve().value == "0"


def test_interrupting_a_cell_that_gives_waiters_time(one: Machine) -> None:
    """An interrupted cell without `--wait` shows no traceback, and has no place in the queue."""
    pytest.importorskip("ipykernel.kernelspec")
    with one.child() as holder, one.child() as a, one.kernel() as kernel:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, a)
        with stopped(one, waiter.pid):
            holder.run("reserve_gpu.release()")
            cell = start_waiting(kernel, lambda: True, "%reserve_gpu")
            kernel.manager.interrupt_kernel()
            done = kernel.finish(cell)
        assert (done.error, done.traceback) == (None, [])
        assert len(done.stdout.splitlines()) == 1
        assert "is kept for" not in done.stdout
        assert visible_devices(kernel) == "['']\n"


def test_a_terminal_shows_a_picture_that_is_redrawn(one: Machine) -> None:
    """In a terminal, a picture that fits is redrawn during a wait, and erased at the end."""
    columns = 60
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    ipython = (sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor")
    cell = ("--ext=reserve_gpu", "-c", "%reserve_gpu --wait")
    environ = one.environ(TERM="vt100")
    text = ""
    with one.child() as holder:
        assert holder.reserve("note='a very long story'").value == "0"
        with one.running(*ipython, *cell, environ=environ, stdout=end) as process:
            os.close(end)
            while part := read(terminal):
                text += part
                if text.count("Waiting for") == 2:  # the number of seconds has changed
                    holder.kill()
            assert process.wait(LIMIT_S) == 0
    os.close(terminal)
    waited, reserved, rest = text.partition("Reserving GPU0: ")
    assert reserved
    assert rest.count("\n") == 4
    first, *pictures, last = re.sub("\x1b\\[[0-9;]*m", "", waited).split("\x1b[J")
    assert first == "\r"
    assert re.match(r"Waited for \d+ s\.\r\n$", last)
    assert len(pictures) >= 2
    for picture in pictures:
        *rows, below, back = re.split("\r?\n|\r", picture)
        assert below == ""
        assert rows[0].startswith("Waiting for")
        assert back == f"\x1b[{len(rows)}A"  # moves from below the last line to the first
        assert all(0 < len(row) < columns for row in rows)
        assert not re.search("[\r\n\x1b]", "".join(rows))
