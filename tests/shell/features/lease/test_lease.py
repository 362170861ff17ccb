"""Leases in real processes: by the clock, by idleness, where somebody waits; with CUDA or not.

When something is due is a table (test_schedule.py). Here is what happens then, and who is told.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.features.lease.schedule import LONGEST_PAUSE_S
from reserve_gpu.features.lease.timer import LeaseTimer
from reserve_gpu.model.requests import Lease, ReservationTerms
from reserve_gpu.reservation.holding import Holding
from reserve_gpu.reservation.session import session
from reserve_gpu.system.jupyter_kernel import cells
from tests.support.locked import locked
from tests.support.machine import LIMIT_S
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from reserve_gpu.features.lease.lease_line import LeaseLine
    from tests.support.here import Here

from tests.support.lease import IMPORTS, timer, wait_for_action

SOON_S = 0.2  # a time that is over soon
OVER = (
    "import time; from tests.support.lease import timer, wait_for_action\n"
    "wait_for_action('PUT_OFF')"
)


def lease_line() -> LeaseLine:
    """Return what shows how the lease of this process stands."""
    return timer().display


def wait_for_notice() -> None:
    """Wait until the next cell would have to tell something."""
    wait_for(lambda: lease_line()._is_notice)


def threads() -> list[int]:
    """Return the session's thread, if it lives."""
    return [thread for thread in [session()._thread] if thread]


def of_device(here: Here, descriptor: Path) -> bool:
    """Tell whether that is an open lock of a device."""
    with suppress(FileNotFoundError):  # that of the look itself
        return str(descriptor.readlink()).startswith(f"{here.locks}/GPU-")
    return False


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
        "import reserve_gpu; from tests.support.lease import wait_for_notice\n"
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
