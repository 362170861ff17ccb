"""The administrator's file: what it says to whom, what is wrong in it, and what becomes of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.support.processes import US
from tests.support.reserving import got

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine


def test_an_idle_time_is_none_of_a_command(machine: Machine) -> None:
    """A rule's idle time is not said of a command, of which nobody knows what it does."""
    machine.rules.write_text('[limits]\nidle = "2h"\ntime = "24h"\n')
    show = "import reserve_gpu, json; print(reserve_gpu.status())"
    done = machine.command(*US, "run", "--", sys.executable, "-c", show)
    assert ", until " in done.stdout
    assert "2 h idle" not in done.stdout.partition("Rules for")[0]


def test_who_has_a_drained_gpu_keeps_it_beside_another(here: Here) -> None:
    """Who has it may have one more, and keeps it; nobody else gets it."""
    assert got() == "0"
    here.rules.write_text("[devices]\ndrain = [0]\n")
    assert got(count=2) == "0,1"
