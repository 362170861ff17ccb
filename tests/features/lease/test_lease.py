"""Leases in real processes: by the clock, by idleness, where somebody waits; with CUDA or not.

When something is due is a table (test_schedule.py). Here is what happens then, and who is told.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.features.lease.schedule import LONGEST_PAUSE_S
from reserve_gpu.features.lease.timer import LeaseTimer, waiters_for
from reserve_gpu.model.requests import Lease, ReservationTerms
from reserve_gpu.reservation.holding import Holding
from reserve_gpu.reservation.session import session
from reserve_gpu.system.jupyter_kernel import cells
from reserve_gpu.system.shutdown import ProcessEnd
from tests.here import feature
from tests.locked import locked
from tests.machine import LIMIT_S
from tests.processes import US, queue, wait_for
from tests.unread import full_pipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reserve_gpu.features.lease.lease_line import LeaseLine
    from tests.here import Here
    from tests.machine import Kernel, Machine

START_CUDA = "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); cuda.cuInit(0)"
USE_GPU = f"{START_CUDA}; cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)"
# It is over once CUDA has started, on however busy a machine.
OVER_WITH_CUDA = f"reserve_gpu.reserve(for_='1h')\n{USE_GPU}\nreserve_gpu.reserve(for_=0.5)"
END_WITH_CUDA = f"reserve_gpu.reserve(for_='1h', end_kernel=True)\n{OVER_WITH_CUDA}"
IMPORTS = """
import threading, time
from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.reservation.session import session
def timer():
    return session().features["LeaseTimer"]
"""
# In a process of its own: wait for the timer, and then for what its thread is in the midst of.
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
SOON_S = 0.2  # a time that is over soon
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
OVER = (
    "import time; from tests.features.lease.test_lease import timer, wait_for_action\n"
    "wait_for_action('PUT_OFF')"
)


def timer() -> LeaseTimer:
    """Return what follows the lease of this process."""
    return feature(LeaseTimer)


def wait_for_action(name: str) -> None:
    """Wait until the timer of this process's lease has done that."""
    wait_for(lambda: timer()._action is Action[name])


def looks(here: Here) -> int:
    """Return how often somebody has looked at the use of a GPU."""
    return sum("ProcessUtilization" in call for call in here.calls())


def lease_line() -> LeaseLine:
    """Return what shows how the lease of this process stands."""
    return timer().display


def wait_for_notice() -> None:
    """Wait until the next cell would have to tell something."""
    wait_for(lambda: lease_line()._is_notice)


def threads() -> list[int]:
    """Return the session's thread, if it lives."""
    return [thread for thread in [session()._thread] if thread]


def is_free(machine: Machine, number: int = 0) -> bool:
    """Tell whether nobody has reserved the GPU."""
    return not any(name.startswith(uuid(machine, number)) for name in locked(machine.locks))


def uuid(machine: Machine, number: int = 0) -> str:
    """Return the UUID of a GPU, as the driver has it."""
    done = machine.python(
        f"import reserve_gpu; print(reserve_gpu.status().rows[{number}].device.uuid)"
    )
    return done.stdout.strip()


def of_device(here: Here, descriptor: Path) -> bool:
    """Tell whether that is an open lock of a device."""
    with suppress(FileNotFoundError):  # that of the look itself
        return str(descriptor.readlink()).startswith(f"{here.locks}/GPU-")
    return False


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


@pytest.fixture
def busy(machine: Machine) -> Machine:
    """Make a machine on which CUDA shows in NVML."""
    (machine.folder / "contexts").mkdir()
    machine.write(f"contexts {machine.folder / 'contexts'}\n{machine.scenario.read_text()}")
    return machine


@contextmanager
def notebook(machine: Machine, line: str = "", *more: str) -> Iterator[Kernel]:
    """Make a kernel that has run these lines, the first one of %reserve_gpu."""
    with machine.kernel() as kernel:
        for code in (f"%reserve_gpu {line}", *more):
            cell = kernel.run(code)
            assert not cell.error, cell.all
        yield kernel


# -- in this process ------------------------------------------------------------------------------


def test_a_moment_lets_go(here: Here) -> None:
    """At the end the GPU is free and this process sees none; no thread is left."""
    until = reserve_gpu.reserve(for_=SOON_S).lease.until
    assert until
    assert threads()
    wait_for(lambda: not locked(here.locks))
    assert time.time() >= until
    assert reserve_gpu.current() is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    wait_for(lambda: not threads())


def test_idleness_lets_go(here: Here) -> None:
    """What nobody uses is released after that time, and not before."""
    start = time.monotonic()
    reserve_gpu.reserve(idle=SOON_S)
    wait_for(lambda: reserve_gpu.current() is None)
    assert time.monotonic() - start >= SOON_S
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("lines", "is_kept"),
    [
        ("utilisation 40\ncompute {own} 500", True),
        ("utilisation 0\ncompute {own} 500", False),  # a notebook that thinks
        ("use-ended 5\ncompute {own} 500", False),  # it worked before the last look
        ("utilisation 40\ncompute 1 500", False),  # another's
        ("utilisation none\ncompute {own} 500", True),  # that can't be known
        ("utilisation none", False),  # nobody is on it
        ("fail nvmlDeviceGetProcessUtilization 0 999\nutilisation 40\ncompute {own} 500", True),
        ("fail nvmlDeviceGetProcessUtilization 0 999\nutilisation 0\ncompute {own} 500", False),
        ("fail nvmlInitWithFlags * 9", True),  # nothing can be read
        ("delay nvmlInitWithFlags * 0.3\nutilisation 40\ncompute {own} 500", True),  # past the end
    ],
)
def test_what_is_used_is_not_idle(here: Here, lines: str, *, is_kept: bool) -> None:
    """Only what this process uses keeps its reservation; to be on a GPU is not to use it."""
    here.write("gpu")
    reserve_gpu.reserve(idle="1h")
    words = ("fail", "delay")
    fault = [line for line in lines.splitlines() if line.startswith(words)]
    rest = [line for line in lines.splitlines() if not line.startswith(words)]
    here.write("\n".join(["gpu", *rest, *fault]).format(own=os.getpid()))
    reserve_gpu.reserve(idle=SOON_S)
    looked = timer()._next_look
    if is_kept:  # as many looks later as there are in two such times
        wait_for(lambda: timer()._next_look > looked + 2 * SOON_S)
        assert reserve_gpu.current()
    else:
        wait_for(lambda: reserve_gpu.current() is None)


@pytest.mark.parametrize(
    "samples", ["epoch", "boot", "monotonic", "offset", "strange", "rubbish", "none"]
)
def test_a_reservation_at_work_ends_by_no_samples(here: Here, samples: str) -> None:
    """Whatever the clock and quality of the driver's samples, only an idle reservation ends."""
    here.write("gpu")
    reserve_gpu.reserve(idle="1h")
    at_work = f"gpu\nutilisation 40\nsamples {samples}\ncompute {os.getpid()} 500"
    here.write(at_work)
    reserve_gpu.reserve(idle=SOON_S)
    looked = timer()._next_look
    wait_for(lambda: timer()._next_look > looked + 2 * SOON_S)
    assert reserve_gpu.current()
    here.write(at_work.replace("utilisation 40", "utilisation 0"))
    wait_for(lambda: reserve_gpu.current() is None)


def test_a_failed_reading_does_not_count_as_idle(here: Here) -> None:
    """If the driver's samples change while they are read, the GPU does not count as idle."""
    here.write("gpu")
    reserve_gpu.reserve(idle="1h")
    # INSUFFICIENT_SIZE at each call
    here.write(f"gpu\ncompute {os.getpid()} 500\nfail nvmlDeviceGetProcessUtilization 0 7")
    reserve_gpu.reserve(idle=SOON_S)
    looked = timer()._next_look
    wait_for(lambda: timer()._next_look > looked + 2 * SOON_S)
    assert reserve_gpu.current()


def test_a_child_that_works_keeps_it(here: Here) -> None:
    """A process that was started from here uses the GPU for its starter."""
    here.write("gpu")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            reserve_gpu.reserve(idle="1h")
            here.write(f"gpu\nutilisation 40\ncompute {child.pid} 500")
            reserve_gpu.reserve(idle=SOON_S)
            looked = timer()._next_look
            wait_for(lambda: timer()._next_look > looked + 2 * SOON_S)
            assert reserve_gpu.current()
        finally:
            child.kill()
    here.write("gpu")
    wait_for(lambda: reserve_gpu.current() is None)


def test_it_is_prolonged(here: Here) -> None:
    """Asked again with a time it lasts until then; a bare request changes nothing."""
    first = reserve_gpu.reserve(for_=1.5)
    again = reserve_gpu.reserve(for_="1h")
    assert again is first
    until = first.lease.until
    assert until is not None
    assert until > time.time() + 3000
    reserve_gpu.reserve()
    assert first.lease.until == until
    wait_for(lambda: len(threads()) == 1)


def test_terms_are_added_to(here: Here) -> None:
    """What is said later counts, and what is not said stays."""
    first = reserve_gpu.reserve(for_="1h", if_wanted=True)
    lease = first.lease
    reserve_gpu.reserve(idle="2h")
    assert first.lease == lease._replace(idle_s=7200)
    assert lease == Lease(until=lease.until, until_boot=lease.until_boot, if_wanted=True)


def test_a_larger_part_ends_as_before(here: Here) -> None:
    """Whoever grows holds what they hold for as long as they said."""
    here.write("gpu\n memory 8000")
    first = reserve_gpu.reserve(memory="2GiB", for_="1h")
    until = first.lease.until
    assert reserve_gpu.reserve(memory="3GiB").lease.until == until
    assert reserve_gpu.status().rows[0].holders[0].lease.until == until
    assert reserve_gpu.reserve(memory="1GiB").lease.until == until
    assert reserve_gpu.status().rows[0].holders[0].lease.until == until


def test_a_rule_gives_no_more_time_to_who_grows(here: Here) -> None:
    """A part that grows ends when it was to end, also where a rule gives new ones a time."""
    here.write("gpu\n memory 8000")
    here.rules.write_text('[limits]\ntime = "2h"\n')
    first = reserve_gpu.reserve(memory="2GiB")
    until = first.lease.until
    assert until
    assert reserve_gpu.reserve(memory="3GiB").lease.until == until


def test_less_ends_as_before(here: Here) -> None:
    """What is left of a reservation ends when all of it was to end."""
    until = reserve_gpu.reserve("0,1", for_="1h").lease.until
    assert "GPU0 and GPU1 are yours until" in lease_line()._shown
    assert reserve_gpu.reserve("1").lease.until == until
    assert "GPU1 is yours until" in lease_line()._shown


def test_less_for_longer(here: Here) -> None:
    """Who keeps a part of what they have, and says until when, has that until then."""
    until = reserve_gpu.reserve("0,1", for_="1h").lease.until
    assert until
    assert (reserve_gpu.reserve("1", for_="3h").lease.until or 0.0) > until + 7000


def test_an_idle_promise_costs_no_thread_that_stays(here: Here) -> None:
    """A hundred reservations, one after the other, leave no thread behind."""
    for _ in range(100):
        reserve_gpu.reserve(idle="1h").release()
    wait_for(lambda: not threads())
    assert not cells().listeners


def test_no_thread_without_an_end(here: Here) -> None:
    """Who promises nothing gets no thread."""
    reserve_gpu.reserve()
    wait_for(lambda: not threads())


@pytest.mark.full
def test_if_wanted(here: Here) -> None:
    """It stays after its end while nobody waits, and goes to the first who does."""
    here.write("gpu")
    first = reserve_gpu.reserve(for_=SOON_S, if_wanted=True)
    wait_for_action("STAY")
    assert reserve_gpu.current() is first
    with here.child() as child:
        assert child.reserve("wait=60").value == "0"
    assert reserve_gpu.current() is None


@pytest.mark.process
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


@pytest.mark.process
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


def test_a_logging_handler_may_raise(here: Here) -> None:
    """Where the handler of somebody's log raises, this reservation ends, and so does the next."""

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(record)

    handler = Raising()
    logger = logging.getLogger("reserve_gpu")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            reserve_gpu.reserve(for_=SOON_S)
            wait_for(lambda: reserve_gpu.current() is None)
            wait_for(lambda: not threads())
            assert not locked(here.locks)
    finally:
        logger.removeHandler(handler)


def test_a_fork_has_nothing_that_ends(here: Here) -> None:
    """A child has no reservation to release, and its parent's end is its parent's."""
    reserve_gpu.reserve(for_="1h")
    pid = os.fork()
    if not pid:
        code = 0 if reserve_gpu.current() is None and not threads() else 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reserve_gpu.current()


def test_what_is_given_back_does_not_end(here: Here) -> None:
    """After a release the end comes to nothing: another reservation is not touched."""
    reserve_gpu.reserve(for_=SOON_S).release()
    until = reserve_gpu.reserve(for_=3 * SOON_S).lease.until
    assert until
    wait_for(lambda: reserve_gpu.current() is None)
    assert time.time() >= until


@pytest.mark.parametrize("what", ["not_callable", "no_limit"])
def test_before_end_mistakes(what: str) -> None:
    """What can't be called, or waited for, is refused."""
    function, limit = (7, "5m") if what == "not_callable" else (print, "soon")
    with pytest.raises(reserve_gpu.RequestError):
        reserve_gpu.before_end(function, limit=limit)  # type: ignore[type-var]


# -- cells ----------------------------------------------------------------------------------------


def test_a_running_cell_is_let_alone(here: Here) -> None:
    """Nothing ends in the midst of a cell, and all that is due right after it."""
    shell = here.shell()
    cell = shell.run(
        f"%reserve_gpu --for 0.2s\n{OVER}; import os; "
        "print('then', os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    assert "then 0" in cell.all
    wait_for(lambda: reserve_gpu.current() is None)
    assert "ended at" in shell.run("1").all
    assert "ended at" not in shell.run("1").all


def test_a_cell_within_a_cell_is_a_part_of_it(here: Here) -> None:
    """The end of what a cell runs as a cell is not its own."""
    shell = here.shell()
    cell = shell.run(
        f"%reserve_gpu --for 0.2s\nimport time, os; get_ipython().run_cell('2'); {OVER}; "
        "print('then', os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    assert "then 0" in cell.all
    wait_for(lambda: reserve_gpu.current() is None)


@pytest.mark.full
def test_near_idleness_is_told_by_no_cell(here: Here) -> None:
    """A cell is use, so it has nothing to tell of an end that it has put off."""
    shell = here.shell()
    shell.run("%reserve_gpu --idle 4s")
    wait_for_action("WARN")
    cell = shell.run("1")
    assert reserve_gpu.current()
    assert "ends at" not in cell.all


def test_kept_as_nobody_waits_is_told_once(here: Here) -> None:
    """That it is over and lasts until somebody waits is said by one cell."""
    shell = here.shell()
    shell.run(f"%reserve_gpu --for {SOON_S}s --if-wanted")
    wait_for(lambda: "You keep GPU0 until another process waits" in lease_line()._shown)
    wait_for_notice()
    assert "You keep GPU0 until another process waits" in shell.run("1").all
    assert "You keep GPU0 until another process waits" not in shell.run("1").all


def test_a_cell_is_no_idleness(here: Here) -> None:
    """Each cell begins the time anew, and at its end nothing has used the GPU for that time."""
    shell = here.shell()
    shell.run("%reserve_gpu --idle 1h")
    wait_for(lambda: timer()._idle_s() > 0.1)
    began = time.monotonic()
    shell.run("1")
    assert timer()._idle_s() <= time.monotonic() - began
    shell.run(f"%reserve_gpu --idle {SOON_S}s")
    wait_for(lambda: reserve_gpu.current() is None)
    assert f"ended after {SOON_S} s without use" in shell.run("1").all


PAST, PROLONGED = Lease(until=1.0), Lease(until=1e11)


@pytest.mark.parametrize(
    ("cell", "lease", "now", "expected"),
    [
        ("", PAST, PAST, True),
        ("", PAST, PROLONGED, False),
        ("running", PAST, PAST, False),
        ("running", PAST._replace(is_strict=True), PAST._replace(is_strict=True), True),
        ("", PAST, None, True),
        ("later", PAST, None, False),
        ("running", PAST, None, False),
    ],
)
def test_whether_the_process_is_to_end_still(
    here: Here, cell: str, lease: Lease, now: Lease | None, *, expected: bool
) -> None:
    """It is not once somebody has prolonged it, nor while a cell runs unless a rule says so.

    What before_end() has released ends the process only if no cell has come since.
    """
    shell = here.shell()
    owner: Any = SimpleNamespace(held=now and Holding((), {}, ReservationTerms(lease=now)))
    is_to_end = LeaseTimer(owner).is_to_end(Holding((), {}, ReservationTerms(lease=lease)))
    answers: list[bool] = []
    if cell == "later":
        shell.run("1")
    shell.shell.user_ns["ask"] = lambda: answers.append(is_to_end())
    shell.run("ask()") if cell == "running" else answers.append(is_to_end())
    assert answers == [expected]


@pytest.mark.parametrize("wish", ["--idle 1h", "--for 1h", "--for 0.2s", "--for 0.2s --if-wanted"])
def test_a_cell_that_runs_costs_nothing(here: Here, wish: str) -> None:
    """While a cell runs the next look is a minute away, before the end and after it."""
    code = OVER if "0.2s" in wish else "0"
    cell = here.shell().run(
        f"%reserve_gpu {wish}\n{code}\n{IMPORTS}print('pause', session().run(timer().step))"
    )
    pause_s = float(cell.all.rpartition("pause")[2])
    assert pause_s == pytest.approx(LONGEST_PAUSE_S)


def test_unseen_code_is_no_use(here: Here) -> None:
    """What a front end runs by itself, without a place in the history, keeps nothing."""
    shell = here.shell()
    shell.run("%reserve_gpu --idle 0.5s")
    start = time.monotonic()
    while reserve_gpu.current() and time.monotonic() - start < LIMIT_S:
        shell.shell.run_cell("1", store_history=False)
        time.sleep(0.05)
    assert reserve_gpu.current() is None


def test_prolonged_at_the_last_moment(here: Here) -> None:
    """A cell that runs at the end can still ask for more time."""
    shell = here.shell()
    shell.run(f"%reserve_gpu --for 0.3s\n{OVER}\n%reserve_gpu --for 1h")
    assert timer()._action is None or timer()._action is Action.LASTS
    assert (reserve_gpu.reserve().lease.until or 0.0) > time.time() + 3000


@pytest.mark.full
def test_warned_in_the_next_cell(here: Here) -> None:
    """Shortly before the end the next cell says so, once, and how to keep it."""
    shell = here.shell()
    shell.run("%reserve_gpu --for 4s")
    told: list[str] = []

    def is_told() -> bool:
        told.append(shell.run("1").all)
        return "GPU0 ends at" in told[-1]

    wait_for(is_told)
    assert "To keep GPU0:\n%reserve_gpu --for 2h\n" in told[-1]
    assert "ends at" not in shell.run("1").all


@pytest.mark.full
def test_what_a_block_held_is_no_news(here: Here) -> None:
    """Of the end of what was released meanwhile no cell tells."""
    shell = here.shell()
    cell = shell.run(
        "import reserve_gpu; from tests.features.lease.test_lease import wait_for_notice\n"
        "with reserve_gpu.reserve(for_=4): wait_for_notice()"
    )
    assert not cell.error
    told = shell.run("1").all
    assert "ends at" not in told
    assert "released" not in told


def test_what_no_cell_has_reserved_ends(here: Here) -> None:
    """What a button's function reserves, between two cells, does not wait for the end of one."""
    here.shell()
    reserve_gpu.reserve(for_=SOON_S)
    wait_for(lambda: reserve_gpu.current() is None)


def test_a_cell_that_loads_the_extension_is_let_alone(here: Here) -> None:
    """A cell whose begin was not seen runs as well, and its end is seen."""
    shell = here.shell()
    shell.shell.run_line_magic("unload_ext", "reserve_gpu")
    cell = shell.run(
        f"%load_ext reserve_gpu\n%reserve_gpu --for 0.2s\nimport os; {OVER}\n"
        "print('then', os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    assert "then 0" in cell.all
    wait_for(lambda: reserve_gpu.current() is None)


def test_a_cell_without_a_result_has_ended(here: Here) -> None:
    """A kernel tells of no result where a cell that awaits something was cancelled."""
    events = here.shell().shell.events
    info = SimpleNamespace(raw_cell="await forever()", store_history=True)
    events.trigger("pre_run_cell", info)
    reserve_gpu.reserve(for_=SOON_S)
    wait_for_action("PUT_OFF")
    assert reserve_gpu.current()
    events.trigger("post_run_cell", None)
    wait_for(lambda: reserve_gpu.current() is None)


def test_what_is_locked_anew_ends(here: Here) -> None:
    """A reservation whose lock other code had closed still has a thread that waits for its end."""
    shell = here.shell()
    reserve_gpu.reserve(for_="1h")
    for file in [file for file in Path("/proc/self/fd").iterdir() if of_device(here, file)]:
        os.close(int(file.name))
    cells().listeners[0]()
    wait_for(lambda: not threads())  # there is nothing to wait for
    assert "locked again" in shell.run("1").all
    assert threads()


def test_python_in_a_shell_loads_the_extension(here: Here) -> None:
    """reserve() with an end gets to know of cells where the extension was not loaded."""
    shell = here.shell()
    shell.shell.run_line_magic("unload_ext", "reserve_gpu")
    shell.run(f"import reserve_gpu; reserve_gpu.reserve(for_=0.2); {OVER}")
    wait_for(lambda: reserve_gpu.current() is None)
    assert "ended at" in shell.run("1").all


# -- processes ------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_script_is_told_in_its_log(machine: Machine) -> None:
    """A program without cells reads it on stderr, as a warning of the log."""
    done = machine.python(
        f"import reserve_gpu\n{IMPORTS}\nreserve_gpu.reserve(for_='0.3s')\n"
        "while reserve_gpu.current(): time.sleep(0.01)\nprint(session().run(int))"
    )
    assert done.stdout == "0\n"
    assert "The reservation of GPU0 ended at" in done.stderr


@pytest.mark.process
def test_an_overdue_script_is_told_in_its_log(busy: Machine) -> None:
    """A program that goes on past the end, with CUDA, reads that it is overdue, once."""
    wait = WAIT_FOR_ACTION.format("MARK_OVERDUE")
    done = busy.python(f"import reserve_gpu\n{IMPORTS}\n{OVER_WITH_CUDA}\n{wait}")
    assert done.stderr.count("GPU0 has been overdue since") == 1


@pytest.mark.promise
@pytest.mark.process
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


@pytest.mark.process
def test_cuda_that_does_not_start_keeps_nothing(busy: Machine) -> None:
    """Where the library is loaded, and nobody starts it, the GPU is released a little later."""
    with busy.child() as child:
        child.run("import ctypes; cuda = ctypes.CDLL('libcuda.so.1')")
        child.run("reserve_gpu.reserve(for_=0.2)")
        wait_for(lambda: child.run("os.environ['CUDA_VISIBLE_DEVICES']").value == "")
        assert locked(busy.locks)
        wait_for(lambda: not locked(busy.locks))
        assert child.run("cuda.cuInit(0)").value == NO_DEVICE


@pytest.mark.process
def test_a_wait_for_more_keeps_nothing_past_its_end(machine: Machine) -> None:
    """Who waits for a second GPU releases the first one in time."""
    with machine.child() as child, machine.child() as other:
        assert other.reserve("1").value == "1"
        child.run("reserve_gpu.reserve('0', for_=0.5)")
        child.send("reserve_gpu.reserve(count=2, wait=60)")
        wait_for(lambda: queue(machine))
        wait_for(lambda: is_free(machine))
        child.kill()


@pytest.mark.process
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


@pytest.mark.process
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
@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
@pytest.mark.full
def test_a_stopped_process_is_overdue(machine: Machine) -> None:
    """Who is stopped (SIGSTOP) past the end is overdue for all; it ends as soon as it goes on."""
    with machine.child() as child:
        child.run("import time; reserve_gpu.reserve(for_=4)")  # it is stopped before that is over
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: "overdue since" in machine.command(*US, "status").stdout, 0.2)
        os.kill(child.pid, signal.SIGCONT)
        wait_for(lambda: not locked(machine.locks))


@pytest.mark.process
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
@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
@pytest.mark.full
def test_before_end_may_prolong(busy: Machine) -> None:
    """A function that asks for more time gets it: the process goes on."""
    done = busy.python(
        f"import reserve_gpu\n{IMPORTS}\n"
        "is_asked = []\n"
        "@reserve_gpu.before_end\n"
        "def ask(): reserve_gpu.reserve(for_='1h'); is_asked.append(True)\n"
        f"{END_WITH_CUDA}\n"
        "while not is_asked: time.sleep(0.01)\n"
        f"{WAIT_FOR_ENDS.format(0)}\n"
        "print(reserve_gpu.current().devices[0].label)"
    )
    assert (done.returncode, done.stdout) == (0, "GPU0\n"), done


@pytest.mark.process
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


def test_all_that_is_called_before_has_one_time() -> None:
    """However many functions there are, all of them together have no more than the longest time."""
    end, problems, is_over = ProcessEnd(longest_s=0.1), list[str](), threading.Event()
    for _ in range(3):
        end.call_before(lambda: is_over.wait(LIMIT_S), LIMIT_S)
    end.begin(lambda: False, problems.append, is_over.set)
    assert is_over.wait(LIMIT_S)
    assert [problem.endswith("did not finish within 0 s.") for problem in problems] == [
        False,
        True,
        True,
    ]


@pytest.mark.process
def test_released_before_the_end(busy: Machine) -> None:
    """A function of before_end() that releases does not keep the process from its end."""
    with busy.child() as child:
        child.run("reserve_gpu.before_end(lambda: reserve_gpu.release())")
        child.run(END_WITH_CUDA)
        assert child.process.wait(LIMIT_S) == -signal.SIGTERM


@pytest.mark.process
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


@pytest.mark.process
def test_a_refused_order_prolongs_nothing(busy: Machine) -> None:
    """What is refused once CUDA has started changes no terms."""
    with busy.child() as child:
        child.run(f"first = reserve_gpu.reserve('0,1', for_='1h'); {USE_GPU}")
        until = child.run("first.lease.until").value
        assert child.run("reserve_gpu.reserve('1,0', for_='3h')").error == "TooLateError"
        assert child.run("first.lease.until").value == until


@pytest.mark.process
@pytest.mark.full
def test_one_that_ignores_the_end_is_killed(busy: Machine) -> None:
    """A program that does not end by SIGTERM is killed a little later."""
    done = busy.python(
        "import reserve_gpu, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"{END_WITH_CUDA}\n"
        "time.sleep(60)"
    )
    assert done.returncode == -signal.SIGKILL


# -- kernels --------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.full
def test_the_display_is_replaced(machine: Machine) -> None:
    """In a notebook the output of the cell that reserved changes at the warnings and the end."""
    with notebook(machine, "--for 4s") as kernel:
        texts = updates(kernel, "The reservation of GPU0 ended at")
        assert any("GPU0 ends at" in text for text in texts)
        assert visible(kernel) == ""


@pytest.mark.process
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


@pytest.mark.process
def test_each_cell_that_has_reserved_tells_the_end(machine: Machine) -> None:
    """What prolongs a reservation, or asks for it again, shows the same line; one replaces all."""
    with machine.kernel() as kernel:
        lines = ("--for 1h", "--for 2h", "", "--release")
        shown = [display(kernel, f"%reserve_gpu {line}") for line in lines]
    assert len({known for known, _ in shown}) == 1
    assert all("GPU0 is yours until" in text for _, text in shown[:-1])
    assert shown[-1][1] == "This reservation was released."


@pytest.mark.ipython
@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
def test_a_release_is_shown(machine: Machine) -> None:
    """The cell that has reserved says no more until when that was."""
    with notebook(machine, "--for 1h") as kernel:
        assert "was released" in kernel.run("%reserve_gpu --release").all


@pytest.mark.process
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
@pytest.mark.process
def test_end_of_a_kernel(busy: Machine) -> None:
    """With --end-kernel it ends as a kernel does, after what it wanted called, and all is free."""
    save = "import atexit, reserve_gpu; atexit.register(lambda: open('at exit', 'w'))\n"
    save += "reserve_gpu.before_end(lambda: open('saved', 'w'))"
    with notebook(busy, f"--idle 1s --end-kernel\n{save}\n{USE_GPU}") as kernel:
        wait_for(lambda: not kernel.manager.is_alive(), 0.1)
        assert (busy.folder / "saved").exists()
        assert (busy.folder / "at exit").exists()
        assert not locked(busy.locks)


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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
