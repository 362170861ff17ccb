"""Many processes race for parts of a few GPUs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.machine import ROOT


@pytest.mark.parametrize("rounds", [4, pytest.param(15, marks=pytest.mark.full)])
def test_racing_processes_never_reserve_more_than_the_gpus_memory(rounds: int) -> None:
    """The memory of killed processes is available at once, and no request is refused that fits."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.parts_race", f"--rounds={rounds}"],
        cwd=ROOT, text=True, capture_output=True, timeout=250, check=False,
    )  # fmt: skip
    assert not done.returncode, f"{done.stdout}{done.stderr}"
    lines = done.stdout.splitlines()
    granted, refused, kills = map(int, re.findall(r"\d+", lines[1]))
    assert granted > 10 * rounds, done.stdout
    assert refused > 2 * rounds, done.stdout
    assert kills > 4 * rounds, done.stdout
    assert int(lines[2].split()[0]) >= rounds, done.stdout  # granted after others were killed
