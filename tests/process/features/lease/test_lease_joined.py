"""Until when a second process has what a first one of the same user has reserved."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from reserve_gpu.render.notices import LEASE_EXPIRED
from tests.support.joining import JOIN, SESSION, guest, guest_of, join
from tests.support.locked import held
from tests.support.machine import LIMIT_S
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

LINE = (
    "from reserve_gpu.features.lease.lease_notices import Action\n"
    f"{SESSION}s = session(); t = s.features['LeaseTimer']\n"
    "s.run(t._show, s.held, Action.WARN, 0.0)\n"
    "t.display._shown"
)
UNTIL = "reserve_gpu.current().lease.until"


def test_the_work_of_a_guest_is_no_idleness(here: Here) -> None:
    """A reservation that ends by idleness goes on as long as a guest uses the GPU."""
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


def test_joining_gives_no_time(here: Here) -> None:
    """A rule's time counts from the first holder, whoever joins whom, and a guest ends with it."""
    here.rules.write_text('[limits]\ntime = "8s"\n')
    with here.child() as one, here.child() as two:
        one.reserve("'0'")
        until = one.run(UNTIL).value
        assert two.run(JOIN.format("")).error is None
        assert two.run(UNTIL).value == until
        assert two.reserve("for_=7").error == "RequestError"
        assert "To keep" not in two.run(LINE).value
        one.run("reserve_gpu.release()")
        assert one.run(JOIN.format("")).error is None
        two.run("reserve_gpu.release()")
        assert one.run(UNTIL).value == until
        wait_for(lambda: held(here) == [])
        assert time.time() < until + LIMIT_S / 2
        assert one.visible() == ""


def test_nothing_is_reserved_anew_after_its_time(here: Here) -> None:
    """A guest that is left, and runs CUDA past a rule's time, gets nothing that has ended."""
    with here.child() as holder, guest_of(here, holder) as other:
        other.run("import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)")
        here.rules.write_text('[limits]\ntime = "1s"\n')
        over = time.time() + 1
        holder.kill()
        wait_for(lambda: time.time() > over)
        answer = other.reserve()
        assert answer.error == "RequestError"
        assert 'time = "1s"' in answer.text
        assert "Release it" in answer.text


def test_nothing_to_join_once_the_time_is_over(here: Here) -> None:
    """Nobody joins what is held past its end."""
    with here.child() as holder, here.child() as other:
        holder.reserve("'0', for_=0.5")
        holder.run("import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)")
        wait_for(lambda: holder.run(f"{SESSION}session().held.overdue").value)
        answer = other.run(JOIN.format(""))
        assert answer.text == LEASE_EXPIRED
        assert other.visible() is None


def test_a_guest_lasts_as_long_as_its_holder(here: Here) -> None:
    """A guest has the holder's end, and follows it where the holder prolongs it."""
    with here.child() as holder, here.child() as other:
        holder.reserve("'0', for_=10")
        assert other.run(JOIN.format("")).error is None
        assert other.run(UNTIL).value == holder.run(UNTIL).value
        holder.reserve("'0', for_=3600")
        until = holder.run(UNTIL).value
        wait_for(lambda: other.run(UNTIL).value == until)


def test_a_rule_ends_a_guest_too(here: Here) -> None:
    """A rule that ends who uses CUDA past its time ends a joined process and command too."""
    here.rules.write_text('[limits]\ntime = "10s"\nafter_cuda = "end"\n')
    with here.child() as holder, here.child() as other:
        holder.reserve("'0'")
        assert other.run(JOIN.format("")).error is None
        other.run("import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)")
        done = join(here, "0", "--", "sleep", "600")
        assert done.returncode == -signal.SIGTERM
        assert "The command gets SIGTERM at" in done.stderr
        other.process.wait(LIMIT_S)
