"""Leases of joined processes, which share the reservation of another process of the same user."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from reserve_gpu.render.notices import LEASE_EXPIRED
from tests.support.joining import JOIN, SESSION, guest, join
from tests.support.locked import held
from tests.support.machine import LIMIT_S
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

# Code for child processes.
WARNING = (
    "from reserve_gpu.features.lease.lease_notices import Action\n"
    f"{SESSION}s = session(); t = s.features['LeaseTimer']\n"
    "s.run(t._show, s.held, Action.WARN, 0.0)\n"
    "t.display._shown"
)
UNTIL = "reserve_gpu.current().lease.until"
START_CUDA = "import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)"


def test_use_by_a_joined_process_resets_the_idle_time(here: Here) -> None:
    with here.child() as holder:
        holder.reserve("'1', idle=3600")
        with guest(here) as other:
            here.add(f"compute {other.pid} 900\nutilisation 95")
            is_used = (
                "from reserve_gpu.model.clocks import Instant\n"
                "from reserve_gpu.reservation import activity\n"
                f"{SESSION}activity.is_used(session().held, Instant(0.0, 0.0))"
            )
            assert holder.run(is_used).value is True
            here.use("two")
            here.add("utilisation 95")
            assert holder.run(is_used).value is False


def test_joining_does_not_extend_the_rules_time(here: Here) -> None:
    """A rule's time counts from the first holder, even if processes join each other in turn."""
    here.rules.write_text('[limits]\ntime = "8s"\n')
    with here.child() as one, here.child() as two:
        one.reserve("'0'")
        until = one.run(UNTIL).value
        assert two.run(JOIN.format("")).error is None
        assert two.run(UNTIL).value == until
        assert two.reserve("for_=7").error == "RequestError"
        assert "%reserve_gpu" not in two.run(WARNING).value
        one.run("reserve_gpu.release()")
        assert one.run(JOIN.format("")).error is None
        two.run("reserve_gpu.release()")
        assert one.run(UNTIL).value == until
        wait_for(lambda: held(here) == [])
        assert time.time() < until + LIMIT_S / 2
        assert one.visible() == ""


def test_overdue_reservation_can_not_be_joined(here: Here) -> None:
    with here.child() as holder, here.child() as other:
        holder.reserve("'0', for_=0.5")
        holder.run(START_CUDA)
        wait_for(lambda: holder.run(f"{SESSION}session().held.overdue").value)
        assert other.run(JOIN.format("")).text == LEASE_EXPIRED
        assert other.visible() is None


def test_joined_process_follows_the_holders_end(here: Here) -> None:
    with here.child() as holder, here.child() as other:
        holder.reserve("'0', for_=10")
        assert other.run(JOIN.format("")).error is None
        assert other.run(UNTIL).value == holder.run(UNTIL).value
        holder.reserve("'0', for_=3600")
        until = holder.run(UNTIL).value
        wait_for(lambda: other.run(UNTIL).value == until)


def test_rule_ends_joined_processes_after_cuda(here: Here) -> None:
    """`after_cuda = "end"` ends a joined process and a joined command."""
    here.rules.write_text('[limits]\ntime = "10s"\nafter_cuda = "end"\n')
    with here.child() as holder, here.child() as other:
        holder.reserve("'0'")
        assert other.run(JOIN.format("")).error is None
        other.run(START_CUDA)
        done = join(here, "0", "--", "sleep", "600")
        assert done.returncode == -signal.SIGTERM
        assert "SIGTERM" in done.stderr
        other.process.wait(LIMIT_S)
