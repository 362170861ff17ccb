"""The holder of a GPU is told at the end of a cell who waits for it, and who else uses it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.waiters.notifier import WaiterNotices, waiter_message
from reserve_gpu.model.devices import Device
from reserve_gpu.model.queue import Ticket
from reserve_gpu.render.pictures import awaited
from reserve_gpu.reservation.session import session
from reserve_gpu.system import procfs
from tests.support.here import feature
from tests.support.holders import a_holder
from tests.support.locked import watched
from tests.support.machine import CHILD
from tests.support.processes import own_name, wait_for
from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reserve_gpu.model.progress import Waiting
    from tests.support.here import Here
    from tests.support.shell import Shell

NO_PAUSE = """
from reserve_gpu.reservation.session import session
from reserve_gpu.features.waiters.notifier import WaiterNotices
waiters = WaiterNotices(session(), pause_s=0.0, idle_s=0.0)
session().features = {**session().features, "WaiterNotices": waiters}
"""
TELL = """
from reserve_gpu.features.waiters import notifier
devices = reserve_gpu.reserve().devices
notifier.waiter_message(notifier.first_waiter(devices, ()), devices, is_late=False)
"""
IDLE = "gpu\n  memory 8192\n"


@pytest.fixture(autouse=True)
def _nobody_was_told(here: Here) -> None:
    waiters = WaiterNotices(session(), pause_s=0.0, idle_s=0.0)
    session().features = {**session().features, "WaiterNotices": waiters}


@pytest.mark.promise
def test_who_waits_is_told_once(here: Here) -> None:
    """One line says who waits and what to type; it comes once, and not while the GPU is used."""
    here.write(IDLE)
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu")
    assert shell.run("pass").all.strip() == ""
    with here.child() as child:
        waiter = Waiter(here, child, "'0', note='thesis'")
        here.write(f"{IDLE}  compute {os.getpid()} 900\n  utilisation 90\n")
        assert "has waited" not in shell.run("pass").all
        here.write(IDLE)
        feature(WaiterNotices)._tell_at = 0.0  # a moment later
        told = shell.run("pass").shown.strip()
        assert told.startswith(f"Your {CHILD} has waited ")
        how = f"GPU0 is idle here. To give it to your {CHILD}:\n%reserve_gpu --release"
        assert told.endswith(f' for GPU0 ("thesis"). {how}')
        assert "has waited" not in shell.run("pass").all
        shell.run("%reserve_gpu --release")
        assert waiter.answer().value == "0"


def test_nothing_is_called_idle_in_its_first_ten_minutes(here: Here) -> None:
    """A GPU that was reserved or used in the last ten minutes is not offered to waiters."""
    here.write(IDLE)
    waiters = WaiterNotices(session(), pause_s=0.0)
    session().features = {**session().features, "WaiterNotices": waiters}
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu")
    with here.child() as child:
        Waiter(here, child)
        assert "has waited" not in shell.run("pass").all
        for lock in session().holding.locks.values():
            lock.taken = lock.taken.later(-600.0)  # ten minutes later
        here.write(f"{IDLE}  compute {os.getpid()} 900\n  utilisation 90\n")
        assert "has waited" not in shell.run("pass").all
        here.write(IDLE)
        assert "has waited" not in shell.run("pass").all  # it was in use just now
        waiters._used_at -= 600.0
        assert "has waited" in shell.run("pass").all


def test_a_restarted_kernel_is_not_idle(here: Here) -> None:
    """A GPU that was kept for a restart is not called idle in the next ten minutes."""
    here.write(IDLE)
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu")
    for lock in session().holding.locks.values():
        lock.taken = lock.taken.later(-3600.0)
    waiters = WaiterNotices(session(), pause_s=0.0)  # the new kernel's
    session().features = {**session().features, "WaiterNotices": waiters}
    with here.child() as child:
        Waiter(here, child)
        assert "has waited" not in shell.run("pass").all
        waiters._used_at -= 600.0
        assert "has waited" in shell.run("pass").all


def test_another_user_who_waits_is_named() -> None:
    """A waiter of another user is called by that user's name, and a user's own by its notebook."""
    own = a_holder(os.getpid(), own_name(), "b.ipynb", seen=True, since=time.time())
    for holder, who, them in (
        (own._replace(owner="bob"), "bob", "bob"),
        (own, "Your b.ipynb", "your b.ipynb"),
    ):
        ticket = Ticket(procfs.boot_clock_ns(), "queue-1-0.lock", None, holder)
        told = waiter_message(ticket, [Device(0, "GPU-a")], is_late=True)
        assert told.startswith(f"{who} has waited 0 s for a GPU. GPU0 is idle here. ")
        give = f"To give it to {them}, release it and restart this kernel"
        assert told.endswith(f"{give}:\n%reserve_gpu --release")


def test_a_wait_has_one_duration(here: Here) -> None:
    """A waiter that has returned to its position has waited equally long on every screen."""
    here.write(IDLE)
    screens: list[str] = []
    with here.child() as holder:
        holder.reserve()

        def look(waiting: Waiting) -> None:
            screens.extend([awaited(waiting), str(reserve_gpu.status()), holder.run(TELL).value])
            holder.run("reserve_gpu.release()")

        with pytest.raises(reserve_gpu.WaitTimeoutError):
            reserve_gpu.reserve(wait=0.1)
        (ticket,) = here.locks.glob("queue-*")
        os.utime(ticket, ns=(0, 0))  # as if it had joined before this process started
        reserve_gpu.reserve(wait=30, progress=look)
    matches = [re.search(r"(\d+) (s|min) (so far|for a GPU)", text) for text in screens]
    shown = [int(each[1]) * (60 if each[2] == "min" else 1) for each in matches if each]
    assert len(shown) == 3
    assert 0 < min(shown) >= max(shown) - 2  # read one after another


def test_at_most_every_ten_minutes(here: Here) -> None:
    """A second waiter is told of when ten minutes have passed, not before."""
    here.write(IDLE)
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu")
    with here.child() as one, here.child() as two:
        Waiter(here, one, "note='first'")
        assert '("first")' in shell.run("pass").shown
        Waiter(here, two, "note='second'")
        assert "has waited" not in shell.run("pass").shown
        feature(WaiterNotices)._tell_at = 0.0  # ten minutes later
        assert '("second")' in shell.run("pass").shown


@pytest.mark.parametrize("how", ["switched off", "another GPU"])
def test_who_is_not_told(here: Here, how: str) -> None:
    """Nobody is told who does not want it, or of somebody who waits for another GPU."""
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu 0")
    shell.run(f"%env RESERVE_GPU_TELL_WAITERS={int(how != 'switched off')}")
    with here.child() as other, here.child() as child:
        other.reserve("'1'")
        Waiter(here, child, "'1'" if how == "another GPU" else "'0'")
        assert "has waited" not in shell.run("pass").all


def test_who_waits_for_one_of_two(here: Here) -> None:
    """Who waits for one of the GPUs that are held is told of."""
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu 0,1")
    with here.child() as child:
        Waiter(here, child, "'1'")
        assert "has waited" in shell.run("pass").shown


def test_a_program_that_reads_the_output(here: Here) -> None:
    """A notebook that runs unattended is told nothing."""
    pytest.importorskip("ipykernel.kernelspec")
    with here.kernel() as kernel, here.child() as child:
        kernel.run("%reserve_gpu 0")
        kernel.run(NO_PAUSE)
        Waiter(here, child, "'0'")
        unattended = kernel.client.execute("pass", allow_stdin=False, stop_on_error=False)
        assert "has waited" not in kernel.finish(unattended).all
        assert "has waited" in kernel.run("pass").all


def test_files_of_the_queue_are_no_waiters(here: Here) -> None:
    """Ten thousand files that look like places in the queue are nobody's."""
    here.write(IDLE)
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu")
    for number in range(10_000):
        (here.locks / f"queue-4711-{number}.lock").touch()
    assert "has waited" not in shell.run("pass").all


def test_what_has_ended_meanwhile_is_told_of_nobody(here: Here) -> None:
    """A reservation that ends while this looks who waits stays ended, and nothing is told."""
    here.write(IDLE)
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu")
    with here.child() as child:
        Waiter(here, child)
        assert (
            feature(WaiterNotices).tell(session().holding, lambda: bool(reserve_gpu.release()))
            is None
        )
        assert os.environ.get("CUDA_VISIBLE_DEVICES") is None


def test_the_locks_are_not_listed_after_a_cell(here: Here) -> None:
    """Who waits is found by name: however many files there are, the end of a cell lists none."""
    here.write(IDLE)
    shell = here.shell(is_notebook=True)
    shell.run("%reserve_gpu")
    listed: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.listdir", "os.scandir"):
            listed.append(os.path.realpath(arguments[0]))

    with here.child() as child:
        Waiter(here, child)
        with watched(note):
            assert "has waited" in shell.run("pass").shown
    assert str(here.locks) not in listed


# -- who else uses it ------------------------------------------------------------------------------


@contextmanager
def a_process_of_somebody_else() -> Iterator[int]:
    """Make a process of another user; for all but root the first process is one."""
    if os.geteuid():
        yield 1
        return
    line = "setpriv --reuid=nobody --regid=nogroup --clear-groups sleep 600 >/dev/null & echo $!"
    pid = int(subprocess.check_output(["sh", "-c", line]))  # no child of this process
    try:
        command = Path(f"/proc/{pid}/cmdline")
        wait_for(lambda: command.read_bytes().startswith(b"sleep"))
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_stranger_on_the_gpu(here: Here) -> None:
    """A stranger's gigabytes on a reserved GPU are told at a cell's end, once, and whose."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    with a_process_of_somebody_else() as pid:
        here.add(f"compute {pid} 900\ncompute {os.getpid()} 2000")
        told = "GPU1 is reserved for this kernel, but other processes are using it: busy, "
        assert told not in shell.run("1").all
        here.use("two")
        here.add(f"compute {pid} 3000")
        assert f"(pid {pid}" in run_until(shell, told)
        assert told not in shell.run("1").all


def test_a_process_that_starts_in_the_cell_of_the_reservation(here: Here) -> None:
    """A process that starts right after the reservation of an idle GPU is reported."""
    shell = here.shell()
    with a_process_of_somebody_else() as pid:
        shell.shell.user_ns["start"] = lambda: here.add(f"compute {pid} 3000")
        told = "GPU1 is reserved for this kernel, but other processes are using it: busy, "
        assert told not in shell.run("%reserve_gpu 1\nstart()").all
        assert f"(pid {pid}" in run_until(shell, told)


def test_another_users_renderer_on_the_gpu(here: Here) -> None:
    """The holder hears of another user's graphics process that holds more than a desktop."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    with a_process_of_somebody_else() as pid:
        here.use("two")
        here.add(f"memory 24576\ngraphics {pid} 2000")
        told = "GPU1 is reserved for this kernel, but other processes are using it: busy, "
        assert told not in shell.run("1").all
        here.use("two")
        here.add(f"memory 24576\ngraphics {pid} 9000")
        assert f"(pid {pid}, graphics)" in run_until(shell, told)
        assert told not in shell.run("1").all


def run_until(shell: Shell, text: str) -> str:
    """Run cells until one shows the text, as a slow look at the driver is not made after each."""
    shown = [""]

    def is_shown() -> bool:
        shown[0] = shell.run("1").all
        return text in shown[0]

    wait_for(is_shown)
    return shown[0]


def test_the_next_cell_does_not_look_again(here: Here) -> None:
    """Of two cells, one right after the other, only the first talks to the driver at its end."""
    waiters = WaiterNotices(session())
    session().features = {**session().features, "WaiterNotices": waiters}
    shell = here.shell()
    assert not shell.run("%reserve_gpu").error
    before = here.calls().count("nvmlInitWithFlags")
    shell.run("1")
    # At its begin the number of the GPU is looked up, as CUDA has not started.
    assert here.calls().count("nvmlInitWithFlags") == before + 1
