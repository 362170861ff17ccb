"""A restart of a kernel keeps its GPU, and nothing else does."""

from __future__ import annotations

import os
import random
import select
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.support.processes import queue, wait_for
from tests.support.waiters import LONG_S, Waiter

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.restart import LEAVE, file_of, heirs, take_over

pytestmark = [pytest.mark.process]

RESTARTS = int(os.environ.get("RESTARTS", "10"))
MOMENTS = int(os.environ.get("MOMENTS", "7"))


# -- again and again -------------------------------------------------------------------------------


@pytest.mark.full
def test_restarts_beside_ten_waiters(here: Here) -> None:
    """However often a kernel restarts, its GPU is its own again, and nobody who waits gets it."""
    here.write("gpu\n")
    with ExitStack() as stack:
        kernel = stack.enter_context(here.kernel())
        assert not kernel.run("%reserve_gpu").error
        children = [stack.enter_context(here.child()) for _ in range(10)]
        waiters = [Waiter(here, child, limit_s=600) for child in children]
        for _ in range(RESTARTS):
            kernel.restart()
            kernel.run("%load_ext reserve_gpu")
            assert "CUDA_VISIBLE_DEVICES = '0'" in kernel.run("%reserve_gpu").stdout
            assert len(queue(here)) == len(waiters)
        kernel.client.shutdown()
        winner = first_answered(waiters)
        assert winner.answer().value == "0"


@pytest.mark.full
@pytest.mark.parametrize("victim", ["kernel", "heir", "both"])
def test_kill_at_any_moment_of_a_restart(here: Here, victim: str) -> None:
    """Whenever kernel, heir or both are killed, the GPU is held by one process, or by none."""
    here.write("gpu\n")
    dice = random.Random(victim)  # noqa: S311 - moments, no secret
    for _ in range(MOMENTS):
        with file_of(here) as file, here.child() as first, here.child() as second:
            first.reserve()
            delay_s = dice.uniform(0, 0.1)
            first.send(
                LEAVE.format(
                    call=f"restart_handover.leave_to_lock_keeper, session(), {str(file)!r}, 60"
                )
            )
            time.sleep(delay_s)  # a random moment
            if victim != "heir":
                first.kill()
            if victim != "kernel":
                for process in heirs(file):
                    with suppress(psutil.NoSuchProcess):  # it ends by itself meanwhile
                        process.kill()
                        process.wait(LONG_S)  # until then it has its locks
            first.kill()
            visible, _ = take_over(second, file)
            assert visible in (None, "0")
            # An heir may be starting still: then the GPU is kept.
            reserved = second.reserve()
            if reserved.value != "0":
                wait_for(partial(heirs, file))  # one look can miss it: its program forks, and ends


def first_answered(waiters: list[Waiter]) -> Waiter:
    """Return the waiter that is answered first."""
    streams: dict[Any, Waiter] = {waiter.child.process.stdout: waiter for waiter in waiters}
    ready, _, _ = select.select(list(streams), [], [], LONG_S)
    return streams[ready[0]]
