"""The administrator's rules for a command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.support.processes import US

if TYPE_CHECKING:
    from tests.support.machine import Machine


def test_the_idle_time_of_a_rule_does_not_apply_to_a_command(machine: Machine) -> None:
    """It is unknown when a command uses its GPU; the rule's time does apply."""
    machine.rules.write_text('[limits]\nidle = "2h"\ntime = "24h"\n')
    show = (
        "import reserve_gpu\n(row, _) = reserve_gpu.status().rows\nlease = row.holders[0].lease\n"
        "print(lease.has_end, lease.idle_s)"
    )
    done = machine.command(*US, "run", "--", sys.executable, "-c", show)
    assert done.stdout.splitlines()[-1:] == ["True None"], done
