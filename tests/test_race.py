"""Many processes want the same few GPUs at the same moment."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests import race
from tests.machine import ROOT

if TYPE_CHECKING:
    from tests.machine import Machine

ROUNDS = 8


def test_of_64_contenders_8_win_8_different_gpus(machine: Machine) -> None:
    """Of 64 processes that reserve at once 8 get a GPU each, and the rest are told so."""
    machine.write(race.SCENARIO)
    done = machine.python(f"from tests import race; race.print_contests(64, {ROUNDS})")
    assert not done.returncode, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) == ROUNDS
    for contest in rounds:
        winners = [[pid, device] for pid, device in contest["said"] if device.isdigit()]
        losers = [answer for _, answer in contest["said"] if not answer.isdigit()]
        assert sorted(device for _, device in winners) == list("01234567")
        assert losers == 56 * ["NoFreeDeviceError"]
        assert sorted(contest["kernel"]) == sorted(winners)


def test_a_long_race_in_short() -> None:
    """Under random kill -9, counts, names and releases no GPU has two holders or a dead one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.race", "--seconds", "5"],
        cwd=ROOT, text=True, capture_output=True, timeout=100, check=False,
    )  # fmt: skip
    assert not done.returncode, f"{done.stdout}{done.stderr}"
    reservations, looks = (int(line.split()[0]) for line in done.stdout.splitlines()[:2])
    assert reservations > 100, done.stdout
    assert looks > 100, done.stdout
