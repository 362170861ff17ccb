"""What the benchmarks compare does what it is compared for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import ways
from benchmarks.choosing import GPUS, SITUATIONS
from benchmarks.stage import ROOT, crowd, machine, stage

pytestmark = pytest.mark.needs("benchmarks")


@pytest.mark.parametrize("busy", SITUATIONS.values())
@pytest.mark.parametrize("way", ways.CODE)
def test_each_way_chooses(way: str, busy: int) -> None:
    """Each way chooses an idle GPU; none, or for setGPU's way any, where there is none."""
    with crowd(busy) as pids, stage(machine(GPUS, busy, pids)) as on:
        took_ms, answer = on.until_answer(ways.CODE[way] + ways.SAY)
    assert took_ms > 0
    ways.check(way, answer, GPUS, busy)


def test_a_wrong_choice_is_noticed() -> None:
    """A way that chooses a busy GPU, or none although one is free, ends the benchmark."""
    for answer in ("0", ""):
        with pytest.raises(RuntimeError, match="chose"):
            ways.check(ways.OURS, answer, GPUS, busy=7)


def test_prints_one_table() -> None:
    """Each group adds its rows to one table in Markdown, with the bars that are met or missed."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "status", "handover", "memory"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    head, rule, *rows = done.stdout.splitlines()
    assert {line.count("|") for line in (head, rule, *rows)} == {7}
    assert [row.split("|")[2].strip() for row in rows] == [
        ways.OURS, "gpustat", "nvitop -1", ways.OURS, ways.OURS, ways.OURS, ways.OURS,
    ]  # fmt: skip
    assert all("met" in row or "**missed**" in row for row in rows[1:])


def test_unknown_group() -> None:
    """A group that is none is a mistake that names those there are."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "speed"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no such group: speed; there are process, kernel" in done.stderr
