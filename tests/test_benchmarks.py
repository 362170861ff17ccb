"""What the benchmarks compare does what it is compared for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import table, ways
from benchmarks.choosing import GPUS, choose
from benchmarks.stage import crowd, machine, stage
from tests.machine import ROOT

pytestmark = [pytest.mark.needs("benchmarks"), pytest.mark.full]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("busy", [0, GPUS - 1, GPUS])
@pytest.mark.parametrize("way", ways.CODE)
def test_each_way_chooses(way: str, busy: int) -> None:
    """Each way chooses an idle GPU; none, for setGPU's way and a part any, where there is none."""
    with crowd(busy) as pids, stage(machine(GPUS, busy, pids)) as on:
        assert choose(on, way, GPUS, busy) > 0


def test_a_wrong_choice_is_noticed() -> None:
    """A way that chooses a busy GPU, or none although one is free, ends the benchmark."""
    for answer in ("0", ""):
        with pytest.raises(RuntimeError, match="chose"):
            ways.check(ways.OURS, answer, GPUS, busy=7)


def test_bars() -> None:
    """A bar is met by the median, and up to the bar itself."""
    assert str(table.slower("it", [3, 1, 9], [2, 2, 2], 1.5)) == (
        "| it | 1.50 times (3.0 ms vs. 2.0 ms) | at most 1.5 times | met |"
    )
    assert str(table.faster("it", [1000], [1490], 1.5)) == (
        "| it | 1.49 times faster (1.00 s vs. 1.49 s) | at least 1.5 times | **missed** |"
    )
    assert str(table.Row("it", "a fact")) == "| it | a fact |  |  |"


def test_prints_one_table() -> None:
    """Each group adds its rows to one table in Markdown, with the bars that are met or missed."""
    done = run("--quick", "load", "status", "memory")
    assert done.returncode == 0, done.stderr
    here, empty, head, rule, *rows = done.stdout.splitlines()
    assert "Python" in here
    assert not empty
    assert {line.count("|") for line in (head, rule, *rows)} == {5}
    assert len(rows) == 2 + 2 + 2
    verdicts = {row.split("|")[4].strip() for row in rows if "not measured" not in row}
    assert verdicts <= {"met", "**missed**"}


def test_unknown_group() -> None:
    """A group that is none is a mistake that names those there are."""
    done = run("speed")
    assert done.returncode == 2
    assert "no such group: speed; choose from load, start" in done.stderr
