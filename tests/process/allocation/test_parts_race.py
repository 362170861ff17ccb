"""Many processes want parts of the same few GPUs at the same moment."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.machine import ROOT


@pytest.mark.parametrize("rounds", [4, pytest.param(15, marks=pytest.mark.full)])
def test_rounds(rounds: int) -> None:
    """Of 32 who race none is refused who fits, no more is promised than there is, or by the dead.

    What those were promised who are killed with -9 is there for others at once.
    """
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
    assert int(lines[2].split()[0]) >= rounds, done.stdout  # had after others were killed
