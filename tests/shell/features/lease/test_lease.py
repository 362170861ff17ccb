"""Leases in the test process: when they end, and in which cells."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.lease.schedule import LONGEST_PAUSE_S
from reserve_gpu.features.lease.timer import LeaseTimer
from reserve_gpu.model.requests import Lease, ReservationTerms
from reserve_gpu.reservation.holding import Holding
from reserve_gpu.reservation.session import session
from tests.support.lease import IMPORTS, timer, wait_for_action, wait_for_notice
from tests.support.locked import locked
from tests.support.machine import LIMIT_S
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

SOON_S = 0.2
# Code of a cell that continues until its lease has ended.
OUTLAST = "from tests.support.lease import wait_for_action; wait_for_action('PUT_OFF')"
PRINT_VISIBLE = "import os; print('visible:', os.environ['CUDA_VISIBLE_DEVICES'])"


def wait_for_release() -> None:
    """Wait until this process holds no device."""
    wait_for(lambda: reserve_gpu.current() is None)


def has_thread() -> bool:
    """Return whether the session's thread is running."""
    return bool(session()._thread)


# -- the end of a lease ----------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["for_", "idle"])
def test_lease_ends_with_a_release(here: Here, option: str) -> None:
    """At the end of a lease, the GPU is free, this process sees none, and no thread remains."""
    start = time.monotonic()
    reserve_gpu.reserve(**{option: SOON_S})  # type: ignore[arg-type]
    assert has_thread()
    wait_for(lambda: not locked(here.locks))
    assert time.monotonic() - start >= SOON_S
    assert reserve_gpu.current() is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    wait_for(lambda: not has_thread())


def assert_counts_as_use(here: Here, scenario: str, *, is_use: bool) -> None:
    """Check whether a reservation with a short idle limit survives on that machine."""
    here.write("gpu")
    reserve_gpu.reserve(idle="1h")
    here.write(scenario.format(own=os.getpid()))
    reserve_gpu.reserve(idle=SOON_S)
    looked = timer()._next_look
    if is_use:  # the time of two idle limits has been checked
        wait_for(lambda: timer()._next_look > looked + 2 * SOON_S)
        assert reserve_gpu.current()
    else:
        wait_for_release()


@pytest.mark.parametrize(
    ("lines", "is_use"),
    [
        pytest.param("utilisation 40\ncompute {own} 500", True, id="own process works"),
        pytest.param("utilisation 0\ncompute {own} 500", False, id="own process is idle"),
        pytest.param("use-ended 5\ncompute {own} 500", False, id="worked before the last check"),
        pytest.param("utilisation 40\ncompute 1 500", False, id="another user's process works"),
        pytest.param("utilisation none\ncompute {own} 500", True, id="unknown"),
        pytest.param("fail nvmlInitWithFlags * 9", True, id="driver fails"),
        pytest.param(
            "utilisation 40\ncompute {own} 500\ndelay nvmlInitWithFlags * 0.3",
            True,
            id="driver responds after the end",
        ),
    ],
)
def test_only_own_use_resets_the_idle_time(here: Here, lines: str, *, is_use: bool) -> None:
    assert_counts_as_use(here, f"gpu\n{lines}", is_use=is_use)


def test_new_duration_extends_the_lease(here: Here) -> None:
    """A new request with a duration extends the lease, and one without changes nothing."""
    first = reserve_gpu.reserve(for_=1.5)
    assert reserve_gpu.reserve(for_="1h") is first
    until = first.lease.until
    assert until == pytest.approx(time.time() + 3600, abs=60)
    reserve_gpu.reserve()
    assert first.lease.until == until


def test_new_terms_are_added(here: Here) -> None:
    first = reserve_gpu.reserve(for_="1h", if_wanted=True)
    lease = first.lease
    assert lease == Lease(until=lease.until, until_boot=lease.until_boot, if_wanted=True)
    reserve_gpu.reserve(idle="2h")
    assert first.lease == lease._replace(idle_s=7200)


def test_released_part_keeps_the_end(here: Here) -> None:
    """Fewer GPUs are held until the same time, or until a new one."""
    until = reserve_gpu.reserve("0,1", for_="1h").lease.until
    assert until
    assert "GPU0 and GPU1 " in timer().display._shown
    assert reserve_gpu.reserve("1").lease.until == until
    assert timer().display._shown.startswith("GPU1 ")
    reserve_gpu.reserve("0,1")
    assert (reserve_gpu.reserve("1", for_="3h").lease.until or 0.0) > until + 7000


def test_forked_child_has_no_lease(here: Here) -> None:
    reserve_gpu.reserve(for_="1h")
    pid = os.fork()
    if not pid:
        os._exit(1 if reserve_gpu.current() or has_thread() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reserve_gpu.current()


def test_end_of_a_released_reservation_does_not_end_the_next(here: Here) -> None:
    reserve_gpu.reserve(for_=SOON_S).release()
    until = reserve_gpu.reserve(for_=3 * SOON_S).lease.until
    assert until
    wait_for_release()
    assert time.time() >= until


def test_status_data_contains_the_terms(here: Here) -> None:
    """`to_dict()` contains a lease's terms, and the time since which it is overdue."""
    now = time.time()
    with (
        here.rival("0", since=now - 60, until=now - 30),
        here.rival("1", idle_s=60, if_wanted=True),
    ):
        devices = reserve_gpu.status().to_dict()["devices"]
    names = ("until", "overdue", "idle_s", "if_wanted")
    first, second = ([device["holders"][0][name] for name in names] for device in devices)
    assert first == [now - 30, now - 30, None, False]
    assert second == [None, None, 60, True]


# -- cells -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", ["", "get_ipython().run_cell('2')\n"], ids=["cell", "nested"])
def test_running_cell_delays_the_end(here: Here, nested: str) -> None:
    """A GPU is released when the running cell ends, and the next cell shows this once."""
    shell = here.shell()
    cell = shell.run(f"%reserve_gpu --for 0.2s\n{nested}{OUTLAST}\n{PRINT_VISIBLE}")
    assert "visible: 0" in cell.all
    wait_for_release()
    assert "ended at" in shell.run("1").all
    assert "ended at" not in shell.run("1").all


def test_cell_that_loads_the_extension_delays_the_end(here: Here) -> None:
    """The end of a cell is noticed even if the extension was not loaded at its start."""
    shell = here.shell()
    shell.shell.run_line_magic("unload_ext", "reserve_gpu")
    reserve = "reserve_gpu.reserve(for_=0.2)"
    cell = shell.run(f"import reserve_gpu\n{reserve}\n{OUTLAST}\n{PRINT_VISIBLE}")
    assert "visible: 0" in cell.all
    wait_for_release()
    assert "ended at" in shell.run("1").all


def test_canceled_cell_has_ended(here: Here) -> None:
    """IPython reports no result for a canceled cell that uses await."""
    events = here.shell().shell.events
    info = SimpleNamespace(raw_cell="await forever()", store_history=True)
    events.trigger("pre_run_cell", info)
    reserve_gpu.reserve(for_=SOON_S)
    wait_for_action("PUT_OFF")
    assert reserve_gpu.current()
    events.trigger("post_run_cell", None)
    wait_for_release()


def test_kept_reservation_is_reported_once(here: Here) -> None:
    shell = here.shell()
    shell.run(f"%reserve_gpu --for {SOON_S}s --if-wanted")
    wait_for(lambda: "You keep" in timer().display._shown)  # the warning comes before
    wait_for_notice()
    assert timer().display._shown in shell.run("1").all
    assert timer().display._shown not in shell.run("1").all


@pytest.mark.full
def test_cell_shows_no_warning_of_an_idle_limit(here: Here) -> None:
    """A cell resets the idle time, so the warning no longer applies."""
    shell = here.shell()
    shell.run("%reserve_gpu --idle 4s")
    wait_for_action("WARN")
    cell = shell.run("1")
    assert reserve_gpu.current()
    assert "ends at" not in cell.all


def test_cell_resets_the_idle_time(here: Here) -> None:
    shell = here.shell()
    shell.run("%reserve_gpu --idle 1h")
    wait_for(lambda: timer()._idle_s() > 0.1)
    began = time.monotonic()
    shell.run("1")
    assert timer()._idle_s() <= time.monotonic() - began
    shell.run(f"%reserve_gpu --idle {SOON_S}s")
    wait_for_release()
    assert f"after {SOON_S} s" in shell.run("1").all


def test_code_of_a_front_end_does_not_reset_the_idle_time(here: Here) -> None:
    """Code that a front end runs by itself is not stored in IPython's history."""
    shell = here.shell()
    shell.run("%reserve_gpu --idle 0.5s")
    start = time.monotonic()
    while reserve_gpu.current() and time.monotonic() - start < LIMIT_S:
        shell.shell.run_cell("1", store_history=False)
        time.sleep(0.05)
    assert reserve_gpu.current() is None


@pytest.mark.parametrize("options", ["--idle 1h", "--for 0.2s"])
def test_lease_is_checked_once_a_minute_while_a_cell_runs(here: Here, options: str) -> None:
    code = OUTLAST if "0.2s" in options else "0"
    cell = here.shell().run(
        f"%reserve_gpu {options}\n{code}\n{IMPORTS}print('pause', session().run(timer().step))"
    )
    pause_s = float(cell.all.rpartition("pause")[2])
    assert pause_s == pytest.approx(LONGEST_PAUSE_S)


PAST, EXTENDED = Lease(until=1.0), Lease(until=1e11)


@pytest.mark.parametrize(
    ("cell", "lease", "now", "expected"),
    [
        pytest.param("", PAST, PAST, True, id="unchanged"),
        pytest.param("", PAST, EXTENDED, False, id="extended"),
        pytest.param("running", PAST, PAST, False, id="running cell"),
        pytest.param(
            "running", PAST._replace(is_strict=True), PAST._replace(is_strict=True), True, id="rule"
        ),
        pytest.param("", PAST, None, True, id="released by before_end()"),
        pytest.param("later", PAST, None, False, id="released, later cell"),
    ],
)
def test_process_ends_unless_extended_or_busy(
    here: Here, cell: str, lease: Lease, now: Lease | None, *, expected: bool
) -> None:
    shell = here.shell()
    owner: Any = SimpleNamespace(held=now and Holding((), {}, ReservationTerms(lease=now)))
    is_to_end = LeaseTimer(owner).is_to_end(Holding((), {}, ReservationTerms(lease=lease)))
    answers: list[bool] = []
    if cell == "later":
        shell.run("1")
    shell.shell.user_ns["check"] = lambda: answers.append(is_to_end())
    shell.run("check()") if cell == "running" else answers.append(is_to_end())
    assert answers == [expected]
