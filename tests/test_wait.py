"""Waiting in line: real waiters, holders that release or die, kernels, a terminal and a log."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.awaited import Wait
from reserve_gpu.device import Request
from reserve_gpu.live import Live
from tests import test_users
from tests.machine import LIMIT_S, TAKE_THE_MUTEX, Child, Machine
from tests.test_machines import CONTAINER, behind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.machine import Answer, Kernel

NAMES = ["Tesla T4", "NVIDIA A100"]
UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
ONE = f"gpu\n  uuid {UUIDS[0]}\n"
TWO = "".join(
    f"gpu\n  uuid {uuid}\n  name {name}\n  memory {memory}\n"
    for uuid, name, memory in zip(UUIDS, NAMES, (15360, 40960), strict=True)
)
# On a driver with which a process can use only one MIG instance.
SPLIT = f"driver 550.54.15\n{TWO}gpu\n  mig on\n  instance 0\n"
BUSY = f"{ONE}  compute 4321 3500\n"
WAIT_S = 10
READING = "nvmlDeviceGetComputeRunningProcesses_v3 0"  # what a look at a busy GPU 0 asks

users_machine = test_users.machine  # for more than one Unix user


@pytest.fixture
def one(machine: Machine) -> Machine:
    """A machine with one idle GPU."""
    machine.write(ONE)
    return machine


@pytest.fixture
def two(machine: Machine) -> Machine:
    """A machine with two idle GPUs of different models."""
    machine.write(TWO)
    return machine


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds; fail after a long time."""
    deadline = time.monotonic() + LIMIT_S / 2
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_locked(path: Path, pid: int) -> bool:
    """Whether that process has the file locked, by the kernel's word."""
    found = path.stat()
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with open("/proc/locks", encoding="utf-8") as locks:
        return any({"FLOCK", str(pid), device} <= set(lock.split()) for lock in locks)


def tickets(machine: Machine) -> list[Path]:
    return sorted(machine.locks.glob("line-*.ticket"))


def line(machine: Machine) -> list[int]:
    """The pids of those in line, the first one first: the living tickets that name their holder."""
    found = []
    for path in tickets(machine):
        with suppress(ValueError, KeyError, TypeError, RecursionError):  # else it is nobody's
            record = json.loads(path.read_bytes())
            if has_locked(path, record["pid"]):
                found.append((record["number"], record["pid"]))
    return [pid for _, pid in sorted(found)]


class Waiter:
    """A process that stands in line, and tells of each of its looks.

    It waits for so long that it never gives up in a test that passes.
    """

    def __init__(
        self, machine: Machine, child: Child, arguments: str = "", limit_s: float = WAIT_S
    ) -> None:
        self.child, self.pid = child, child.pid
        self._answer: Answer | None = None
        self._looks = machine.folder / f"looks of {child.pid}"
        child.run(f"looks = open({str(self._looks)!r}, 'w')")
        child.run("def look(wait): print(wait.place, file=looks, flush=True)")
        child.send(
            f"reserve_gpu.reserve({arguments or None}, wait={limit_s}, progress=look)"
            ".environ['CUDA_VISIBLE_DEVICES']"
        )
        wait_for(self.looks)

    def answer(self) -> Answer:
        """What became of it, once that is known."""
        self._answer = self._answer or self.child.answer()
        return self._answer

    def looks(self) -> list[str]:
        """The place in line at each look so far."""
        return self._looks.read_text().splitlines()

    def look_again(self) -> None:
        """Return once it has looked in vain, from beginning to end, at how things stand now."""
        seen = len(self.looks())  # the next may have begun already
        wait_for(lambda: len(self.looks()) >= seen + 2)


def first_served(*waiters: Waiter) -> Waiter:
    """The first of the waiters that is done."""
    streams = [waiter.child.process.stdout for waiter in waiters]
    done: list[Any] = select.select(list(filter(None, streams)), [], [], LIMIT_S)[0]
    assert len(done) == 1
    return waiters[streams.index(done[0])]


@contextmanager
def stopped(machine: Machine, pid: int) -> Iterator[None]:
    """Let the process stand still, in line but not in the midst of a look."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        if not has_locked(machine.locks / "mutex.lock", pid):
            break
        os.kill(pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# -- first come, first served ----------------------------------------------------------------------


@pytest.mark.parametrize("several", [False, True], ids=["one user", "three users"])
def test_first_come_first_served(request: pytest.FixtureRequest, several: bool) -> None:  # noqa: FBT001
    """A GPU that is released, or whose holder dies, goes to those in line in their order."""
    machine: Machine = request.getfixturevalue("users_machine" if several else "machine")
    machine.write(ONE)
    users = ["root", test_users.NOBODY, test_users.DAEMON, "root"]
    children = [test_users.child(machine, user) if several else machine.child() for user in users]
    with children[0] as holder, children[1] as a, children[2] as b, children[3] as c:
        assert holder.reserve().value == "0"
        waiters = [Waiter(machine, child, "None") for child in (a, b, c)]
        for waiter in waiters:
            waiter.look_again()
        assert [waiter.looks()[-1] for waiter in waiters] == ["1", "2", "3"]
        for end in (holder.kill, lambda: a.run("reserve_gpu.release()"), b.kill):
            assert line(machine) == [waiter.pid for waiter in waiters]
            with stopped(machine, waiters[0].pid):
                end()
                for waiter in waiters[1:]:
                    waiter.look_again()  # in vain, though the first one is slow
            assert waiters.pop(0).answer().value == "0"
        assert line(machine) == []


def test_the_head_gets_what_comes_free_first(two: Machine) -> None:
    """Who is first in line gets the GPU that is free first, whichever it is."""
    with two.child() as a, two.child() as b, two.child() as c, two.child() as d:
        assert (a.reserve("0").value, b.reserve("1").value) == ("0", "1")
        first, second = Waiter(two, c), Waiter(two, d)
        with stopped(two, first.pid):
            b.run("reserve_gpu.release()")
            second.look_again()
        assert first.answer().value == "1"
        assert line(two) == [second.pid]
        a.run("reserve_gpu.release()")
        assert second.answer().value == "0"


def test_who_wants_two_is_not_starved(two: Machine) -> None:
    """Who waits for two GPUs gets them though others, who came later, want only one."""
    with two.child() as a, two.child() as b, two.child() as c, two.child() as d:
        assert (a.reserve("0").value, b.reserve("1").value) == ("0", "1")
        both, single = Waiter(two, c, "count=2"), Waiter(two, d)
        a.run("reserve_gpu.release()")
        both.look_again()
        single.look_again()
        refused = a.reserve()
        assert refused.error == "NoFreeDeviceError"
        assert f"pid {both.pid}" in refused.text
        assert line(two) == [both.pid, single.pid]
        b.run("reserve_gpu.release()")
        assert first_served(both, single) is both
        assert both.answer().value == "0,1"
        c.run("reserve_gpu.release()")
        assert single.answer().value == "0"


@pytest.mark.parametrize(
    ("scenario", "ahead", "later", "gets"),
    [
        (TWO, "'0'", "", "1"),
        (TWO, "'0'", "'1'", "1"),
        (TWO, "exclude='1'", "", "1"),
        (TWO, "name='T4'", "", "1"),
        (TWO.replace("15360", "81920"), "min_memory='64GiB'", "", "1"),
        (TWO, "'0'", "min_memory='32GiB'", "1"),
        (SPLIT, "count=2", "'2:0'", "MIG"),
    ],
)
def test_no_waiting_for_what_others_cannot_use(
    machine: Machine, scenario: str, ahead: str, later: str, gets: str
) -> None:
    """Who comes later takes a device that nobody ahead could use, from within the line or not."""
    machine.write(scenario)
    with machine.child() as a, machine.child() as b, machine.child() as c, machine.child() as d:
        assert a.reserve("0").value == "0"
        other = b.reserve(later)
        assert str(other.value).startswith(gets)
        first, second = Waiter(machine, c, ahead), Waiter(machine, d, later)
        b.run("reserve_gpu.release()")
        assert first_served(first, second) is second
        assert second.answer() == other
        d.run("reserve_gpu.release()")
        assert b.reserve(later) == other
        assert line(machine) == [first.pid]


@pytest.mark.parametrize("arguments", ["", "'0'", "share=True", "'0', share=True"])
def test_who_does_not_wait_does_not_overtake(one: Machine, arguments: str) -> None:
    """A free GPU that somebody waits for is refused to who does not, with that one's name."""
    with one.child() as holder, one.child() as child, one.child() as other:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, child, "note='the thesis'")
        with stopped(one, waiter.pid):
            holder.kill()
            refused = other.reserve(arguments)
        assert refused.error == "NoFreeDeviceError"
        assert re.search(rf"GPU0: awaited by .*pid {waiter.pid}\).*the thesis", refused.text)
        assert "--wait" in refused.text
        assert other.visible() == ""
        assert waiter.answer().value == "0"


def test_who_waits_behind_others_is_told_who_uses_a_gpu(one: Machine) -> None:
    """A GPU that others wait for as well is shown with what runs on it, not with them alone."""
    one.write(BUSY)
    with one.child() as child, one.child() as other:
        waiter = Waiter(one, child)
        waiter.look_again()
        for arguments in ("", "wait=0.3"):
            refused = other.reserve(arguments)
            assert re.search(
                rf"GPU0: busy, pid 4321, 3\.4 GiB; awaited by .*pid {waiter.pid}\)", refused.text
            )
        one.write(ONE)
        assert waiter.answer().value == "0"


def test_a_ticket_counts_though_one_before_it_is_deleted(one: Machine) -> None:
    """The line stands though something that clears old files deletes an unused ticket file."""
    with one.child() as holder, one.child() as a, one.child() as b, one.child() as other:
        assert holder.reserve().value == "0"
        gone, waiter = Waiter(one, a), Waiter(one, b)
        gone.child.kill()
        for path in tickets(one):
            if not has_locked(path, waiter.pid):
                path.unlink()
        with stopped(one, waiter.pid):
            holder.kill()
            assert other.reserve().error == "NoFreeDeviceError"
        assert waiter.answer().value == "0"


# -- the end of a wait -----------------------------------------------------------------------------


def test_a_killed_waiter_leaves_no_trace(one: Machine) -> None:
    """Who is killed with -9 while waiting is out of the line, and the next one is served."""
    with one.child() as holder, one.child() as a, one.child() as b:
        assert holder.reserve().value == "0"
        killed, waiter = Waiter(one, a), Waiter(one, b)
        assert line(one) == [killed.pid, waiter.pid]
        a.kill()
        assert line(one) == [waiter.pid]
        wait_for(lambda: waiter.looks()[-1] == "1")
        holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"


@pytest.mark.parametrize("held", ["", "1"], ids=["holds nothing", "holds another"])
def test_interrupt(two: Machine, held: str) -> None:
    """Ctrl-C ends a wait with KeyboardInterrupt, out of the line, with what was held before."""
    with two.child() as holder, two.child() as child, two.child() as other:
        assert holder.reserve("0").value == "0"
        assert not held or child.reserve(f"'{held}'").value == held
        waiter = Waiter(two, child, "'0'")
        waiter.look_again()
        os.kill(waiter.pid, signal.SIGINT)
        assert waiter.answer().error == "KeyboardInterrupt"
        assert line(two) == []
        assert child.visible() == held
        holder.run("reserve_gpu.release()")
        assert other.reserve("'0'" if held else "count=2").value == ("0" if held else "0,1")


def test_interrupt_while_the_driver_starts(one: Machine) -> None:
    """Ctrl-C ends a wait with no GPU visible also where it has not even begun."""
    one.add("delay nvmlInitWithFlags * 60")
    with one.child() as child:
        child.send("reserve_gpu.reserve(wait=True)")
        wait_for(one.calls)
        os.kill(child.pid, signal.SIGINT)
        assert child.answer().error == "KeyboardInterrupt"
        assert child.visible() == ""


# Interrupts a wait in each of our calls in turn, where a signal would too: as the call returns.
IN_EVERY_CALL = """
import glob
from reserve_gpu import descriptors, line

def interrupted(at):
    calls = []
    def profile(frame, event, argument):
        code = frame.f_code
        if event != "c_return" or "reserve_gpu/" not in code.co_filename:
            return
        if calls or code is line.join.__code__:
            calls.append(f"{argument.__name__} in {code.co_name}, {frame.f_lineno}")
            if calls[-1] == at:
                sys.setprofile(None)
                raise KeyboardInterrupt
    sys.setprofile(profile)
    try:
        reserve_gpu.reserve(wait=0.0)
    except BaseException as error:
        return calls, error  # kept with its frames and all that they hold, as IPython keeps it
    finally:
        sys.setprofile(None)

def locked():
    files = {os.stat(path).st_ino: os.path.basename(path) for path in glob.glob(folder + "/*")}
    held = [lock.split() for lock in open("/proc/locks") if f" {os.getpid()} " in lock]
    return [files[inode] for lock in held if (inode := int(lock[5].split(":")[2])) in files]

def leaks():
    interrupted(None)
    calls, bad = set(interrupted(None)[0]), []
    for call in sorted(calls):
        _, error = interrupted(call)
        if not isinstance(error, KeyboardInterrupt) or locked():
            bad.append([call, repr(error), locked()])
        for descriptor in list(descriptors._known):
            descriptors.close(descriptor)
        reserve_gpu.release()
    return len(calls), bad
"""


def test_interrupt_in_any_call(one: Machine) -> None:
    """Wherever Ctrl-C comes upon a wait nothing stays locked, even where the error is kept."""
    with one.child() as holder, one.child() as child:
        assert holder.reserve().value == "0"
        child.run(f"folder = {str(one.locks)!r}\n{IN_EVERY_CALL}")
        answer = child.run("leaks()")
        assert not answer.error, answer.text
        number, bad = answer.value
        assert number > 50
        assert bad == []


IN_A_THREAD = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    future = pool.submit(reserve_gpu.reserve, wait={})
future.result()
"""


@pytest.mark.parametrize(
    ("code", "limit", "said"),
    [
        ("reserve_gpu.reserve(wait={})", "0", ""),
        ("reserve_gpu.reserve(wait={})", "'0.3s'", "Waited for 0.3 s. "),
        ("reserve_gpu.reserve(wait={})", "0.1 + 0.2", "Waited for 0.3 s. "),
        ("reserve_gpu.reserve(wait={})", "1.5", "Waited for 1 s. "),
        (IN_A_THREAD, "0.3", "Waited for 0.3 s. "),
    ],
    ids=["none", "text", "number", "seconds", "thread"],
)
def test_limit(one: Machine, code: str, limit: str, said: str) -> None:
    """A wait that runs out fails closed, out of the line, and says what can be done but to wait."""
    with one.child() as holder, one.child() as child:
        assert holder.reserve().value == "0"
        ended = child.run(code.format(limit))
        assert ended.error == "WaitTimeoutError", ended.text
        assert ended.text.startswith(f"{said}No free GPU devices: 1 of 1 is in use.\n")
        assert f"pid {holder.pid}" in ended.text
        assert ("--wait" in ended.text) == (not said)
        assert "hare one with %reserve_gpu 0 --share." in ended.text
        assert child.visible() == ""
        assert line(one) == []


def test_limit_while_another_process_reserves(one: Machine) -> None:
    """A wait ends in time also where another process keeps everybody from looking."""
    with one.child() as holder, one.child() as child:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, child, limit_s=1.5)
        with stopped(one, waiter.pid):
            holder.run(TAKE_THE_MUTEX)
        ended = waiter.answer()  # far sooner than the 30 s that a mutex is otherwise waited for
        assert ended.error == "WaitTimeoutError", ended.text
        assert f"pid {holder.pid}" in ended.text
        assert child.visible() == ""


def test_a_wait_goes_on_while_another_process_reserves(one: Machine) -> None:
    """Who waits is shown that it does also where another process keeps everybody from looking."""
    with one.child() as holder, one.child() as child:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, child, limit_s=60)
        with stopped(one, waiter.pid):
            holder.run(TAKE_THE_MUTEX)
        seen = len(waiter.looks())
        wait_for(lambda: len(waiter.looks()) > seen + 7)  # for longer than between two looks
        holder.kill()
        assert waiter.answer().value == "0"


def test_a_thread_beside_one_that_waits(one: Machine) -> None:
    """While one thread stands in line another is refused, at once or when its own limit ends."""
    with one.child() as holder, one.child() as child:
        assert holder.reserve().value == "0"
        child.run("import time; from threading import Thread")
        child.run("thread = Thread(target=reserve_gpu.reserve, kwargs={'wait': 60}, daemon=True)")
        child.run("thread.start()")
        wait_for(lambda: line(one))
        for limit, least in (("None", 0.0), ("0.2", 0.2)):
            child.run("start = time.monotonic()")
            ended = child.run(f"reserve_gpu.reserve(wait={limit})")
            assert ended.error == "NoFreeDeviceError"
            assert "Another thread" in ended.text
            assert child.run("time.monotonic() - start").value >= least
            assert child.visible() == ""
        holder.kill()
        assert child.run("reserve_gpu.reserve(wait=30).devices[0].label").value == "GPU0"


def test_a_ticket_that_somebody_deletes(one: Machine) -> None:
    """A waiter whose ticket is deleted stands in line again."""
    with one.child() as holder, one.child() as child:
        assert holder.reserve().value == "0"
        waiter = Waiter(one, child)
        (ticket,) = tickets(one)
        ticket.unlink()
        wait_for(lambda: line(one) == [waiter.pid])
        holder.kill()
        assert waiter.answer().value == "0"


@pytest.mark.parametrize(
    ("arguments", "before", "error"),
    [
        ("count=9", None, "ImpossibleError"),
        ("name='H100'", None, "ImpossibleError"),
        ("min_memory='1TB'", None, "ImpossibleError"),
        ("exclude='0 1'", None, "ImpossibleError"),
        ("'7'", None, "ImpossibleError"),
        ("count=2", "1", "ImpossibleError"),
        ("", "", "NoFreeDeviceError"),
    ],
)
def test_impossible_is_not_waited_for(
    two: Machine, arguments: str, before: str | None, error: str
) -> None:
    """What no release could satisfy fails at once, without a place in the line."""
    extra = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    with two.child() as holder, two.child(**extra) as child:
        assert holder.reserve("count=2").value == "0,1"
        refused = child.run(f"reserve_gpu.reserve({arguments or None}, wait=True)")
        assert (refused.error, tickets(two)) == (error, []), refused.text


def test_a_gpu_that_becomes_idle_is_taken(one: Machine) -> None:
    """A GPU that somebody uses without a reservation is taken when they are done."""
    one.write(BUSY)
    with one.child() as child:
        waiter = Waiter(one, child)
        waiter.look_again()
        one.write(ONE)
        assert waiter.answer().value == "0"


# Whether a look is due, only the kernel tells such a waiter, or nobody.
PATIENT = "from reserve_gpu import waiting; waiting.LOOK_S = waiting.QUIET_S = 1e6"


def patient(machine: Machine, child: Child, limit_s: float = 1e6) -> Waiter:
    """Such a waiter, after its first look."""
    child.run(PATIENT)
    return Waiter(machine, child, limit_s=limit_s)


@pytest.mark.parametrize("place", ["here", "in a container"])
@pytest.mark.parametrize("end", ["release", "kill"])
def test_a_waiter_is_told_that_a_gpu_comes_free(one: Machine, end: str, place: str) -> None:
    """Who waits need not look in order to see a GPU released, or its holder killed."""
    waiting = one.child() if place == "here" else behind(one, *CONTAINER)
    with one.child() as holder, waiting as child:
        assert holder.reserve().value == "0"
        waiter = patient(one, child)
        if end == "kill":
            holder.kill()
        else:
            holder.run("reserve_gpu.release()")
        assert waiter.answer().value == "0"


@pytest.mark.parametrize("place", ["here", "in a container"])
def test_a_waiter_does_not_look_because_others_look(one: Machine, place: str) -> None:
    """Of a busy GPU only the looks that are due are taken, however many others look at it."""
    one.write(BUSY)
    waiting = one.child() if place == "here" else behind(one, *CONTAINER)
    with one.child() as other, waiting as child:
        waiter = patient(one, child, limit_s=2)
        before = one.calls().count(READING)
        for _ in range(10):
            other.reserve()
        by_others = one.calls().count(READING) - before
        assert waiter.answer().error == "WaitTimeoutError"
        assert one.calls().count(READING) - before == by_others > 0


@pytest.mark.parametrize("place", ["here", "in a container"])
def test_what_is_released_during_a_look_is_not_missed(two: Machine, place: str) -> None:
    """A GPU that is released when a look has passed it already is seen all the same."""
    two.add("compute 4321 3500\ndelay nvmlDeviceGetComputeMode 1 0.5")  # the second one is busy
    waiting = two.child() if place == "here" else behind(two, *CONTAINER)
    with two.child() as holder, waiting as child:
        assert holder.reserve("'0'").value == "0"
        child.run(PATIENT)
        child.send("reserve_gpu.reserve(wait=60).environ['CUDA_VISIBLE_DEVICES']")
        asked = "nvmlDeviceGetComputeMode 1"
        before = two.calls().count(asked) if two.log.exists() else 0
        wait_for(lambda: two.calls().count(asked) == before + 2)  # its first look as a waiter
        holder.run("reserve_gpu.release()")
        assert child.answer().value == "0"


HANDLER = """
import signal
def handler(*_):
    try:
        {}
    except reserve_gpu.ReserveGPUError as error:
        said.append(str(error))
    else:
        said.append("")
said = []
signal.signal(signal.SIGUSR1, handler)
"""


@pytest.mark.parametrize("does", ["release()", "reserve('1')"])
def test_a_handler_in_the_midst_of_a_look(two: Machine, does: str) -> None:
    """What a handler of a signal reserves or releases leaves the waiter what it gets just then."""
    with two.child() as holder, two.child() as child, two.child() as other:
        assert holder.reserve("'0'").value == "0"
        if does == "release()":
            assert child.reserve("'1'").value == "1"
        child.run(HANDLER.format(f"reserve_gpu.{does}"))
        waiter = Waiter(two, child, "'0'")
        two.add("delay nvmlDeviceGetComputeMode 0 1.5")
        before = two.calls().count("nvmlDeviceGetComputeMode 0")
        holder.run("reserve_gpu.release()")
        wait_for(lambda: two.calls().count("nvmlDeviceGetComputeMode 0") > before)
        os.kill(child.pid, signal.SIGUSR1)
        assert waiter.answer().value == "0"
        assert child.run("[str(d.index) for d in reserve_gpu.current().devices]").value == ["0"]
        assert other.reserve("'0'").error == "NoFreeDeviceError"
        (said,) = child.run("said").value
        assert said.startswith("" if does == "release()" else "This process is reserving already")


def test_a_handler_between_two_looks(one: Machine) -> None:
    """A handler of a signal that asks for a GPU in vain leaves the waiter its place in the line."""
    with one.child() as holder, one.child() as child:
        assert holder.reserve().value == "0"
        child.run(HANDLER.format("reserve_gpu.reserve()"))
        waiter = Waiter(one, child)
        with one.child() as later:
            second = Waiter(one, later)
            with stopped(one, waiter.pid):
                os.kill(waiter.pid, signal.SIGUSR1)
            waiter.look_again()
            assert line(one) == [waiter.pid, second.pid]
        holder.kill()
        assert waiter.answer().value == "0"
        assert child.run("said[0][:18]").value == "No free GPU device"


USED_AGAIN = """
import os
def use_again(wait):
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:inotify" and not used:
                os.close(int(name))
                used.append(os.eventfd(0, os.EFD_NONBLOCK))
                while used[-1] < int(name):
                    used.append(os.eventfd(0, os.EFD_NONBLOCK))
                assert used[-1] == int(name)
        except FileNotFoundError:
            pass
used = []
"""


def test_a_descriptor_that_others_close_and_open(one: Machine) -> None:
    """Where the number of a waiter's descriptor has become another file's, that is left alone."""
    with one.child() as holder, one.child() as child:
        assert holder.reserve().value == "0"
        child.run(USED_AGAIN)
        ended = child.run("reserve_gpu.reserve(wait=2, progress=use_again)")
        assert ended.error == "WaitTimeoutError", ended.text
        assert child.run("[os.eventfd_write(number, 1) for number in used]").value == [None]


def test_a_waiter_is_told_that_another_leaves_the_line(one: Machine) -> None:
    """Who waits need not look in order to see that it is next in line."""
    with one.child() as holder, one.child() as first, one.child() as second:
        assert holder.reserve().value == "0"
        Waiter(one, first)
        waiter = patient(one, second)
        assert waiter.looks()[-1] == "2"
        first.kill()
        wait_for(lambda: waiter.looks()[-1] == "1")


UNTOLD = 'echo 0 > /proc/sys/user/max_inotify_instances && exec "$@"'


def test_a_waiter_whom_the_kernel_does_not_tell(one: Machine) -> None:
    """Where too many files are watched already, a waiter looks by itself."""
    alone = ("unshare", "--user", "--map-root-user", "sh", "-c", UNTOLD, "sh")
    if subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("this system allows no user namespaces")
    child = Child(one.environ(), one.folder, *alone)
    try:
        with one.child() as holder:
            assert holder.reserve().value == "0"
            waiter = patient(one, child)
            holder.run("reserve_gpu.release()")
            assert waiter.answer().value == "0"
    finally:
        child.kill()


# -- what others may have put there ----------------------------------------------------------------


@dataclass
class Crowd:
    """A machine with one GPU and three processes, of which the first has it."""

    machine: Machine
    holder: Child
    others: list[Child]
    waiters: list[Waiter] = field(default_factory=list)

    def wait(self) -> Waiter:
        """Let one more of the others stand in line."""
        self.waiters.append(Waiter(self.machine, self.others[len(self.waiters)]))
        return self.waiters[-1]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    machine = Machine(tmp_path_factory.mktemp("crowd"))
    machine.write(ONE)
    with machine.child() as a, machine.child() as b, machine.child() as c:
        yield Crowd(machine, a, [b, c])


@pytest.fixture
def crowd(trio: Crowd) -> Iterator[Crowd]:
    """The GPU is taken, and nobody waits; in the end all is as it was."""
    assert trio.holder.reserve().value == "0"
    yield trio
    trio.holder.run("reserve_gpu.release()")
    while trio.waiters:
        waiter = trio.waiters.pop(0)
        waiter.answer()
        waiter.child.run("reserve_gpu.release()")
    for path in tickets(trio.machine):
        if stat.S_ISDIR(path.lstat().st_mode):
            path.rmdir()
        else:
            path.unlink()


def ticket(number: object, wants: object = tuple(UUIDS)) -> bytes:
    return json.dumps({"pid": 1, "number": number, "wants": wants}).encode()


RECORDS = {
    "empty": b"",
    "rubbish": b"rubbish\x00\xff",
    "a list": b"[]",
    "deep": b"[" * 50000,
    "negative": ticket(-5),
    "infinite": ticket(float("inf")),
    "huge": ticket(10**400),
    "nearly too high": ticket(2**53 - 1, []),
    "too high": ticket(2**53, []),
    "more wants than fit": ticket(1, [*UUIDS, *map(str, range(20000))]),
    "wants are none": ticket(1, [1, None, {}, [UUIDS[0]]]),
    "wants are a mapping": ticket(1, {UUIDS[0]: 1}),
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_ticket_that_makes_no_sense_waits_for_nothing(crowd: Crowd, record: str) -> None:
    """Rubbish in a ticket that is held keeps nobody from anything, and leaves the others' order."""
    path = crowd.machine.locks / "line-0.ticket"
    path.write_bytes(RECORDS[record])
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first, second = crowd.wait(), crowd.wait()
        with stopped(crowd.machine, first.pid):
            crowd.holder.run("reserve_gpu.release()")
            second.look_again()
        assert first.answer().value == "0"
        first.child.run("reserve_gpu.release()")
        assert second.answer().value == "0"
    assert path.read_bytes() == RECORDS[record]


@pytest.mark.parametrize(
    "record", [b"", b"rubbish", ticket(-1), ticket(1), ticket(8), ticket(2**53 - 1)]
)
def test_who_waits_is_served_whatever_is_written_into_the_ticket(
    crowd: Crowd, record: bytes
) -> None:
    """Whatever somebody writes into the ticket of the only one in line, that one gets the GPU."""
    other, path = (crowd.machine.locks / f"line-{place}.ticket" for place in range(2))
    other.write_bytes(ticket(7, []))
    with other.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiter = crowd.wait()
    assert json.loads(path.read_bytes())["number"] == 8
    path.write_bytes(record)
    waiter.look_again()
    crowd.holder.run("reserve_gpu.release()")
    assert waiter.answer().value == "0"


PLACES: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, work: path.symlink_to(work),
    "link to nowhere": lambda path, work: path.symlink_to(work.with_name("nowhere")),
    "second name": lambda path, work: os.link(work, path),
    "FIFO": lambda path, _: os.mkfifo(path),
    "directory": lambda path, _: path.mkdir(),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_ticket_is_passed_over(crowd: Crowd, place: str) -> None:
    """What is no plain file in a ticket's place is neither waited for nor written to."""
    path, work = crowd.machine.locks / "line-0.ticket", crowd.machine.folder / "work"
    work.write_text("years of work")
    work.chmod(0o600)
    PLACES[place](path, work)
    assert crowd.others[0].reserve().error == "NoFreeDeviceError"
    assert crowd.others[0].reserve("wait=0").error == "WaitTimeoutError"
    assert (crowd.machine.locks / "line-1.ticket").exists()
    assert work.read_text() == "years of work"
    assert stat.S_IMODE(work.stat().st_mode) == 0o600
    assert not work.with_name("nowhere").exists()


def test_ticket_files_are_used_again(crowd: Crowd) -> None:
    """However often processes wait, there are as many ticket files as ever waited together."""
    waiter = crowd.wait()
    for _ in range(20):
        assert crowd.others[1].reserve("wait=0").error == "WaitTimeoutError"
    assert len(tickets(crowd.machine)) == 2
    crowd.holder.run("reserve_gpu.release()")
    assert waiter.answer().value == "0"


# -- what is seen of it ----------------------------------------------------------------------------


def test_a_wait_is_shown_once_in_every_second() -> None:
    """However often a waiter is woken, no second is skipped, and none is shown twice."""
    log = io.StringIO()
    with Live(log) as live:
        for place, waited_s in enumerate((0.1, 0.9, 1.1, 1.9, 2.0), 2):
            live.show(Wait(Request(), place, waited_s, ()))
    assert re.findall(r"number ([0-9]) in line, for ([0-9]) s\.", log.getvalue()) == [
        ("2", "0"), ("4", "1"), ("6", "2"),
    ]  # fmt: skip


def shown(kernel: Kernel, message: str) -> list[tuple[str, dict[str, Any]]]:
    """What the cell sent to the notebook until it ended, by kind."""
    found: list[tuple[str, dict[str, Any]]] = []
    while True:
        part = kernel.client.get_iopub_msg(timeout=LIMIT_S)
        if part["parent_header"].get("msg_id") == message:
            content = part["content"]
            if content.get("execution_state") == "idle":
                return found
            if part["msg_type"] not in ("status", "execute_input"):
                found.append((part["msg_type"], content))


def test_a_notebook_shows_one_line_that_changes(one: Machine) -> None:
    """A cell that waits has one display, updated in place and empty at the end, then the output."""
    pytest.importorskip("ipykernel.kernelspec")
    with one.child() as holder, one.child() as ahead, one.kernel() as kernel:
        assert holder.reserve("note='the thesis'").value == "0"
        pid, first = kernel.pid, Waiter(one, ahead)
        cell = kernel.start("%reserve_gpu --wait")
        wait_for(lambda: line(one) == [first.pid, pid])
        holder.kill()
        assert first.answer().value == "0"
        ahead.run("reserve_gpu.release()")
        messages = shown(kernel, cell)
    *displays, last = messages
    kinds = [kind for kind, _ in displays]
    assert kinds == ["display_data", *["update_display_data"] * (len(kinds) - 1)]
    assert len({content["transient"]["display_id"] for _, content in displays}) == 1
    texts = [content["data"]["text/plain"] for _, content in displays]
    assert "number 2 in line" in texts[0]
    assert f"pid {holder.pid}" in texts[0]
    assert texts[-1] == ""
    assert last[0] == "stream"
    assert last[1]["text"].startswith("Reserving GPU0: ")


def test_interrupting_a_cell_that_waits(one: Machine) -> None:
    """Interrupting a waiting cell shows one line; the kernel holds nothing and is out of line."""
    pytest.importorskip("ipykernel.kernelspec")
    with one.child() as holder, one.kernel() as kernel:
        assert holder.reserve().value == "0"
        pid = kernel.pid
        cell = kernel.start("%reserve_gpu --wait")
        wait_for(lambda: line(one) == [pid])
        while kernel.client.get_iopub_msg(timeout=LIMIT_S)["msg_type"] != "display_data":
            pass
        kernel.manager.interrupt_kernel()
        done = kernel.finish(cell)
        assert done.error
        assert len(done.traceback) == 1
        assert len(done.traceback[0].splitlines()) == 1
        assert "Stopped waiting" in done.traceback[0]
        assert done.values[-1]["text/plain"] == ""
        assert line(one) == []
        assert (
            kernel.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])").stdout == "['']\n"
        )
        holder.run("reserve_gpu.release()")
        assert holder.reserve().value == "0"


def looks_of(machine: Machine, pid: int) -> int:
    """How often the process has looked at GPU 0 so far, if that is busy."""
    lines = machine.log.read_text().splitlines() if machine.log.exists() else []
    return lines.count(f"{pid} {READING}")


@contextmanager
def wait_in_ipython(
    machine: Machine, stdout: int, **extra: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A terminal IPython that waits; killed at the end."""
    ipython = (sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor")
    cell = ("--ext=reserve_gpu", "-c", "%reserve_gpu --wait")
    with machine.running(
        *ipython, *cell, environ=machine.environ(**extra), stdout=stdout
    ) as process:
        yield process


def test_a_log_gets_a_line_only_on_news(one: Machine) -> None:
    """What goes to no terminal is a line when the wait begins and one when things change."""
    one.write(BUSY)
    output = one.folder / "output.txt"
    with output.open("wb") as file, wait_in_ipython(one, file.fileno()) as process:
        wait_for(lambda: looks_of(one, process.pid) >= 9)  # so that seconds have been counted
        one.add("fail nvmlDeviceGetComputeRunningProcesses_v3 0 15")
        wait_for(lambda: output.read_text().count("\n") > 1)
        one.write(ONE)
        assert process.wait(LIMIT_S) == 0
    first, second, *last = output.read_text().splitlines()
    assert re.match(r"Waiting for a GPU, next in line.*GPU0: busy, pid 4321, 3\.4 GiB$", first)
    assert re.match("Waiting for a GPU, next in line.*GPU0: can't be read", second)
    assert last[0].startswith("Reserving GPU0: ")
    assert not any(sign in output.read_text() for sign in "\r\x1b")


def test_a_terminal_shows_one_line_that_is_rewritten(one: Machine) -> None:
    """In a terminal one line, never longer than a row, is rewritten, and gone at the end."""
    columns = 60
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    text = ""
    with one.child() as holder, wait_in_ipython(one, end, TERM="vt100") as process:
        assert holder.reserve("note='a very long story'").value == "0"
        os.close(end)
        while part := read(terminal):
            text += part
            if text.count("Waiting for") == 3:  # the seconds have changed
                holder.kill()
        assert process.wait(LIMIT_S) == 0
    os.close(terminal)
    waited, reserved, rest = text.partition("Reserving GPU0: ")
    assert reserved
    assert rest.count("\n") == 4
    rewritten = waited.split("\r\x1b[K")
    assert rewritten[0] == rewritten[-1] == ""
    assert len(rewritten) >= 5
    assert all(0 < len(row) < columns for row in rewritten[1:-1])
    assert all(row.startswith("Waiting for a GPU, next in line") for row in rewritten[1:-1])
    assert not re.search("[\r\n\x1b]", "".join(rewritten))


def read(terminal: int) -> str:
    """What came from the terminal, nothing at its end."""
    assert select.select([terminal], [], [], LIMIT_S)[0]
    try:
        return os.read(terminal, 65536).decode()
    except OSError:  # EIO: nobody has the other end open any more
        return ""


@pytest.mark.parametrize(
    ("options", "went_on"), [("--wait 0.2", ""), ("--wait 0.2s --optional", "went on with ''\n")]
)
def test_where_the_limit_runs_out_only_optional_goes_on(
    one: Machine, options: str, went_on: str
) -> None:
    """After the limit a script stops with the reason, and with --optional goes on without a GPU."""
    one.write(BUSY)
    visible = "import os; print(f\"went on with {os.environ['CUDA_VISIBLE_DEVICES']!r}\")"
    done = one.ipython(f"%reserve_gpu {options}", visible)
    assert bool(done.returncode) == (not went_on)
    assert done.stdout.endswith(went_on)
    assert ("went on" in done.stdout) == bool(went_on)
    assert "Waited for" in done.stdout + done.stderr
    assert "GPU0: busy" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert line(one) == []


def test_what_a_waiter_cannot_look_at_it_does_not_keep(two: Machine) -> None:
    """A waiter that fails to see who shares a GPU lets go of that GPU's own lock."""
    with two.child() as holder, two.child() as child:
        assert holder.reserve("count=2").value == "0,1"
        (two.locks / f"{UUIDS[0]}.shared").unlink(missing_ok=True)
        (two.locks / f"{UUIDS[0]}.shared").mkdir()
        waiter = Waiter(two, child, "'0'")
        holder.run("reserve_gpu.release()")
        waiter.look_again()
        wait_for(lambda: not has_locked(two.locks / f"{UUIDS[0]}.lock", waiter.pid))  # for a moment


# -- what a wait costs -----------------------------------------------------------------------------

# Looks; by the first of them Python's own caches are all but full. Each time the least of eight, as
# after a look at the locks alone a list of these is there.
EARLY, LATE, FEW = 600, 1100, 8
# Three looks at everything, then one at the locks alone, without the pauses between them: these are
# all that is changed. Garbage that only the collector would free counts: some switch that off.
WHAT_GROWS = f"""
import gc, glob
from reserve_gpu import waiting

waiting.POLL_S = waiting.EXPLAIN_EVERY_S = 0
gc.disable()
looks, early, late = 0, [], []

def count(least):
    open_now = [len(os.listdir(f"/proc/self/{{kind}}")) for kind in ("fd", "task")]
    containers = sum(map(sys.getsizeof, gc.get_objects()))
    now = [*open_now, sys.getallocatedblocks(), containers]
    least[:] = map(min, now, least or now)

def look(wait):
    global looks
    looks += 1
    waiting.QUIET_S = waiting.LOOK_S = -1 if looks % 4 else 0.003
    for path in glob.glob(deleted):
        os.unlink(path)
    for start, least in ({EARLY}, early), ({LATE}, late):
        if start <= looks < start + {FEW}:
            count(least)
    if looks == {LATE} + {FEW}:
        raise InterruptedError

def growth():
    try:
        reserve_gpu.reserve(wait=True, progress=look)
    except InterruptedError:
        return [after - before for before, after in zip(early, late)]
"""
RESERVED = "gpu\n" * 8
# What a waiter finds at each look, and which of its files somebody deletes after each.
LOOKS = {
    "reserved": (RESERVED, "none"),
    "busy": ("gpu\n compute 1 3500\n compute 2 90\n" * 2, "none"),
    "split": ("gpu\n mig on\n instance 0\n  compute 1 3500\n instance 2\n  used 900", "none"),
    "unreadable": ("gpu\n" * 4 + "fail nvmlDeviceGetComputeMode * 999", "none"),
    "tickets deleted": (RESERVED, "*.ticket"),
}


@pytest.mark.parametrize("found", LOOKS)
def test_a_wait_does_not_grow(machine: Machine, found: str) -> None:
    """After hundreds of looks more a waiter has no more files, threads and objects than before."""
    scenario, deleted = LOOKS[found]
    machine.write(scenario)
    with machine.child() as holder, machine.child() as child:
        if scenario is RESERVED:
            assert not holder.reserve("count=8").error
        child.run(f"deleted = {str(machine.locks / deleted)!r}")
        child.run(WHAT_GROWS)
        answer = child.run("growth()")
    assert not answer.error, answer.text
    files, threads, blocks, container_bytes = answer.value
    assert (files, threads) == (0, 0)
    # Python 3.10 makes one for each function, at its 1024th call; one at each look would be 375.
    assert blocks < 300
    assert container_bytes < 1000  # a list that each look adds to would be 3000
