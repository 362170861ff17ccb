"""Real waiters: holders that release or die, users, containers, kernels, a terminal."""

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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
    import subprocess
    from collections.abc import Iterator

    from tests.support.machine import Kernel


ONE = "gpu\n  uuid GPU-00000000-0000-4000-8000-000000000000\n"
# A wait in which no look is due before its end, where all is reserved: somebody has to tell.
UNDUE_S = policy.QUIET_S - 0.5

users_machine = users.machine  # for more than one Unix user


@pytest.fixture
def one(machine: Machine) -> Machine:
    """Make a machine with one idle GPU."""
    machine.write(ONE)
    return machine


@pytest.mark.promise
@pytest.mark.parametrize("is_several", [False, True], ids=["one user", "three users"])
def test_first_come_first_served(request: pytest.FixtureRequest, *, is_several: bool) -> None:
    """A GPU that is released, or whose holder dies, goes to those in the queue in their order."""
    machine: Machine = request.getfixturevalue("users_machine" if is_several else "machine")
    machine.write(ONE)
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
                    waiter.sees(place, "awaited")  # in vain, though the first one is slow
            assert waiters.pop(0).answer().value == "0"
        assert queued(machine) == []


@pytest.mark.promise
def test_a_killed_waiter_leaves_no_trace(one: Machine) -> None:
    """Who is killed with -9 while waiting is out of the queue, and the next one is served."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        killed, waiter = Waiter(one, a), Waiter(one, b)
        assert queued(one) == [killed.pid, waiter.pid]
        a.kill()
        assert queued(one) == [waiter.pid]
        waiter.sees(1, "reserved")
        holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"


def test_a_lock_directory_that_is_made_anew(one: Machine) -> None:
    """Where somebody removes the lock directory, waiters go on in a new one, in the old order."""
    one.write(f"{ONE}  compute 4321000 3500\n")
    with one.child() as a, one.child() as b, one.child() as c:
        first, second = Waiter(one, a), Waiter(one, b)
        shutil.rmtree(one.locks)
        wait_for(lambda: sorted(queued(one)) == sorted([first.pid, second.pid]))
        assert queued(one) == [first.pid, second.pid]
        third = Waiter(one, c)
        one.write(ONE)
        for waiter in (first, second, third):
            assert waiter.answer().value == "0"
            waiter.child.run("reserve_gpu.release()")


@pytest.mark.full
def test_a_wait_outlives_a_mutex_holder_that_is_stopped(one: Machine) -> None:
    """Who waits waits for the mutex, too, for longer than others do, and then goes on."""
    with one.child() as stopped_child, one.child() as child:
        assert stopped_child.run(TAKE_THE_MUTEX).error is None
        child.send(f"reserve_gpu.reserve(wait={2 * MUTEX_LIMIT_S}).devices[0].label")
        time.sleep(MUTEX_LIMIT_S + 1)
        stopped_child.kill()
        assert child.answer().value == "GPU0"


@pytest.mark.full
def test_who_is_stopped_is_passed_over(one: Machine) -> None:
    """A GPU that a stopped process does not take goes to the next one; it is next when it is on."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        first, second = Waiter(one, a), Waiter(one, b)
        with stopped(one, first.pid):
            holder.run("reserve_gpu.release()")
            start = time.monotonic()
            assert second.answer().value == "0"
            assert time.monotonic() - start > STOPPED_S - 1  # it may have been stopped for one
            assert queued(one) == [first.pid]
        b.kill()
        assert first.answer().value == "0"


def test_a_stopped_waiter_does_not_block_a_request_without_wait(one: Machine) -> None:
    """A request without `wait` gets a GPU that a stopped waiter has left alone for 5 s."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, a)
        with stopped(one, waiter.pid):
            holder.run("reserve_gpu.release()")
            assert b.reserve().value == "0"


def test_a_request_without_wait_gives_waiters_time(one: Machine) -> None:
    """A waiter gets the GPU that came free, and a request without `wait` that came later does not.

    The waiter is stopped until the other request has seen that it comes first.
    """
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, a)
        with stopped(one, waiter.pid):
            holder.run("reserve_gpu.release()")
            looks = len(one.calls())
            b.send("reserve_gpu.reserve().environ['CUDA_VISIBLE_DEVICES']")
            wait_for(lambda: len(one.calls()) > looks)
        assert waiter.answer().value == "0"
        answer = b.answer()
        assert answer.error == "NoFreeDeviceError"
        assert "GPU0 is reserved" in answer.text


def test_a_waiter_that_takes_nothing_does_not_block_a_request_without_wait(one: Machine) -> None:
    """A request without `wait` gets a GPU that a living waiter has left alone for 5 s."""
    one.write(f"{ONE}  memory 16384\n  used 700\n")
    with one.child(RESERVE_GPU_IDLE_MEMORY="100MiB") as a, one.child() as b:
        Waiter(one, a)
        assert b.reserve().value == "0"


def test_a_request_without_wait_does_not_pass_a_waiter_for_several(machine: Machine) -> None:
    """A request without `wait` is refused the GPU that a living waiter for two GPUs needs."""
    machine.write("gpu\ngpu\n")
    with machine.child() as holder, machine.child() as a, machine.child() as b:
        assert holder.reserve().value == "0"
        Waiter(machine, a, "count=2")
        assert b.reserve().error == "NoFreeDeviceError"
        assert b.visible() == ""


@pytest.mark.promise
@pytest.mark.parametrize("when", ["in its sleep", "while the driver starts"])
def test_interrupt(one: Machine, when: str) -> None:
    """Ctrl-C ends a wait with no GPU visible, out of the queue, also before it has begun."""
    with one.child() as holder, one.child() as child:
        if when == "in its sleep":
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
def test_a_waiter_sees_that_a_gpu_comes_free(one: Machine, end: str, place: str) -> None:
    """Who waits need not look to see a GPU released, or its holder killed; a container looks."""
    waiting = one.child() if place == "here" else behind(one, *CONTAINER)
    with one.child() as holder, waiting as child:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, child, limit_s=UNDUE_S)
        if end == "kill":
            holder.kill()
        else:
            holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"


# -- what is seen of it ----------------------------------------------------------------------------


def shown(kernel: Kernel, message: str) -> list[tuple[str, dict[str, Any]]]:
    """Return what the cell sent to the notebook until it ended, by kind."""
    parts: list[tuple[str, dict[str, Any]]] = []
    while True:
        part = kernel.client.get_iopub_msg(timeout=LIMIT_S)
        if part["parent_header"].get("msg_id") == message:
            content = part["content"]
            if content.get("execution_state") == "idle":
                return parts
            if part["msg_type"] not in ("status", "execute_input"):
                parts.append((part["msg_type"], content))


def test_a_notebook_shows_one_line_that_changes(one: Machine) -> None:
    """A cell that waits has one display, updated in place and empty at the end, then the output."""
    pytest.importorskip("ipykernel.kernelspec")
    with one.child() as holder, one.child() as ahead, one.kernel() as kernel:
        assert holder.reserve("note='the thesis'").value == "0"
        pid, first = kernel.pid, Waiter(one, ahead)
        cell = kernel.start("%reserve_gpu --wait")
        wait_for(lambda: queued(one) == [first.pid, pid])
        holder.kill()
        assert first.answer().value == "0"
        ahead.run("reserve_gpu.release()")
        messages = shown(kernel, cell)
    *displays, last = messages
    kinds = [kind for kind, _ in displays]
    assert kinds == ["display_data", *["update_display_data"] * (len(kinds) - 1)]
    assert len({content["transient"]["display_id"] for _, content in displays}) == 1
    texts = [content["data"]["text/plain"] for _, content in displays]
    assert "number 2 in the queue" in texts[0]
    assert texts[-1] == ""
    assert last[0] == "stream"
    assert last[1]["text"].startswith("Reserving GPU0: ")


def test_interrupting_a_cell_that_gives_waiters_time(one: Machine) -> None:
    """An interrupt during the wait for a stopped waiter ends like one during `--wait`."""
    pytest.importorskip("ipykernel.kernelspec")
    with one.child() as holder, one.child() as a, one.kernel() as kernel:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, a)
        with stopped(one, waiter.pid):
            holder.run("reserve_gpu.release()")
            cell = kernel.start("%reserve_gpu")
            while kernel.client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "display_data":
                pass
            kernel.manager.interrupt_kernel()
            done = kernel.finish(cell)
        assert (done.error, done.traceback) == (None, [])
        assert re.fullmatch("Stopped waiting.*\n", done.stdout)
        assert "place" not in done.stdout
        visible = kernel.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])")
        assert visible.stdout == "['']\n"


def test_a_waiter_for_several_behind_one_that_leaves(machine: Machine) -> None:
    """A request without `wait` is refused once a free GPU is kept for a request for several."""
    machine.write("gpu\n  memory 16384\n  used 700\n" * 2)
    with (
        machine.child() as holder,
        machine.child(RESERVE_GPU_IDLE_MEMORY="100MiB") as a,
        machine.child() as b,
        machine.child() as c,
    ):
        assert holder.reserve("'1'").value == "1"
        Waiter(machine, a)
        Waiter(machine, b, "count=2")
        told = machine.folder / "told"
        c.send(f"reserve_gpu.reserve(progress=lambda _: open({str(told)!r}, 'w').close())")
        wait_for(told.exists)
        a.kill()
        assert c.answer().error == "NoFreeDeviceError"


def test_interrupting_a_cell_that_waits(one: Machine) -> None:
    """Interrupting a waiting cell shows one line; the kernel holds nothing and is not queued."""
    pytest.importorskip("ipykernel.kernelspec")
    with one.child() as holder, one.kernel() as kernel:
        assert holder.reserve().value == "0"
        pid = kernel.pid
        cell = kernel.start("%reserve_gpu --wait")
        wait_for(lambda: queued(one) == [pid])
        while kernel.client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "display_data":
            pass
        kernel.manager.interrupt_kernel()
        done = kernel.finish(cell)
        assert kernel.reply(cell)["status"] == "error"
        assert (done.error, done.traceback) == (None, [])
        assert re.fullmatch("Stopped waiting.*\n.* is kept for 2 min; .*\n", done.stdout)
        assert done.values[-1]["text/plain"] == ""
        assert queued(one) == []
        visible = kernel.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])")
        assert visible.stdout == "['']\n"
        holder.run("reserve_gpu.release()")
        assert holder.reserve().value == "0"


@contextmanager
def wait_in_ipython(
    machine: Machine, stdout: int, **extra: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Make a terminal IPython that waits; killed at the end."""
    ipython = (sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor")
    cell = ("--ext=reserve_gpu", "-c", "%reserve_gpu --wait")
    with machine.running(
        *ipython, *cell, environ=machine.environ(**extra), stdout=stdout
    ) as process:
        yield process


def test_a_terminal_shows_a_picture_that_is_rewritten(one: Machine) -> None:
    """In a terminal the picture, never wider than that, is rewritten, and gone at the end."""
    columns = 60
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    text = ""
    with one.child() as holder, wait_in_ipython(one, end, TERM="vt100") as process:
        assert holder.reserve("note='a very long story'").value == "0"
        os.close(end)
        while part := read(terminal):
            text += part
            if text.count("Waiting for") == 2:  # the seconds have changed
                holder.kill()
        assert process.wait(LIMIT_S) == 0
    os.close(terminal)
    waited, reserved, rest = text.partition("Reserving GPU0: ")
    assert reserved
    assert rest.count("\n") == 4
    first, *rewritten, last = re.sub("\x1b\\[[0-9;]*m", "", waited).split("\x1b[J")
    assert first == "\r"
    assert re.match(r"Waited for \d+ s\.\r\n$", last)
    assert len(rewritten) >= 2
    for picture in rewritten:
        *rows, below, back = re.split("\r?\n|\r", picture)
        assert below == ""
        assert rows[0].startswith("Waiting for a GPU: next in the queue")
        assert back == f"\x1b[{len(rows)}A"  # from below the last line to the first
        assert all(0 < len(row) < columns for row in rows)
        assert not re.search("[\r\n\x1b]", "".join(rows))
