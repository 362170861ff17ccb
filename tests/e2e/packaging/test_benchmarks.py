"""The benchmarks measure what they claim to compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks import growth, table, ways
from benchmarks.choosing import GPUS, choose
from benchmarks.stage import crowd, machine, stage
from tests import driver
from tests.support.locked import needs_root
from tests.support.machine import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.needs("benchmarks")]


def run_benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks`."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("busy", [0, GPUS - 1, GPUS])
@pytest.mark.parametrize("way", ways.CODE)
def test_each_way_chooses(way: str, busy: int) -> None:
    """Each way chooses an idle GPU, if there is one."""
    with crowd(busy) as pids, stage(machine(GPUS, busy, pids)) as on:
        assert choose(on, way, GPUS, busy) > 0


def test_wrong_choice() -> None:
    """A way that chooses a busy GPU, or none although one is free, ends the benchmark."""
    for answer in ("0", ""):
        with pytest.raises(RuntimeError, match="chose"):
            ways.check(ways.OURS, answer, GPUS, busy=7)


def test_bars() -> None:
    """A median that equals its limit meets it."""
    assert "| met |" in str(table.slower("it", [3, 1, 9], [2, 2, 2], 1.5))
    assert "| **missed** |" in str(table.faster("it", [1000], [1490], 1.5))
    without_limit = table.faster("it", [1], [2])
    assert str(without_limit) == "| it | 2.00 times faster (1.0 ms vs. 2.0 ms) |  |  |"
    assert str(table.Row("it", "a fact")) == "| it | a fact |  |  |"


@pytest.mark.parametrize(
    ("sizes", "times_ms", "is_linear"),
    [
        ((1, 8, 64), (10, 17, 73), True),
        ((0, 100, 1_000), (10, 20, 110), True),
        ((0, 100, 1_000), (10, 20, 1_010), False),
        ((0, 100, 1_000), (10, 9, 14), True),
    ],
    ids=["linear", "linear from zero", "quadratic", "noise"],
)
def test_linear_growth(
    sizes: tuple[int, ...], times_ms: tuple[float, ...], *, is_linear: bool
) -> None:
    """A cost is linear if many items cost no more per item than a few, apart from noise."""
    assert table.is_linear(sizes, times_ms) == is_linear


def test_growth_row() -> None:
    """A linear cost misses its limit if the items add more time than allowed."""
    measured = table.Growth("it", "files", (0, 10, 1_000), (100, 101, 200), (50, 51, 150), 99)
    assert str(measured) == (
        "| it | 0 / 10 / 1,000 files | 100.0 ms / 101.0 ms / 200.0 ms "
        "| 50.0 ms / 51.0 ms / 150.0 ms | linear, adds at most 99 ms | **missed** |"
    )
    assert measured._replace(limit_ms=100).is_met
    missing = table.Growth("it", "waiters", note="not measured")
    assert str(missing) == "| it | waiters | not measured |  | linear |  |"


@needs_root
def test_simulated_waiters() -> None:
    """The simulated waiters are in the queue, in order, for the requested GPU."""
    code = growth.WAIT.format(wants=growth.UUIDS[:1])
    with stage(machine(2)) as bench, growth.forked(bench, 66, code):
        done = bench.command(sys.executable, "-m", "reserve_gpu", "status", "--json")
    status = json.loads(done.stdout[done.stdout.index("{") :])
    assert [row["next_in_line"] for row in status["devices"]] == [1, None]
    users = [waiter["user"] for waiter in status["waiting"]]
    assert users == ["uid 60000"] * 64 + ["uid 60001"] * 2


def test_table() -> None:
    """Each group adds its rows to one Markdown table."""
    done = run_benchmarks("--quick", "load", "status", "memory")
    assert done.returncode == 0, done.stderr
    here, empty, head, rule, *rows = done.stdout.splitlines()
    assert "Python" in here
    assert not empty
    assert {line.count("|") for line in (head, rule, *rows)} == {5}
    assert len(rows) == 2 + 2 + 2
    verdicts = {row.split("|")[4].strip() for row in rows if "not measured" not in row}
    assert verdicts <= {"met", "**missed**"}


def test_growth() -> None:
    """The tables of growth and of the other groups have different headers."""
    done = run_benchmarks("--quick", "growth", "load")
    assert done.returncode == 0, done.stderr
    _, _, growing, others = (table.splitlines() for table in done.stdout.split("\n\n"))
    assert "how cost grows" in growing[0]
    assert len({line.count("|") for line in growing}) == 1
    assert "benchmark" in others[0]


def test_real_gpu(tmp_path: Path) -> None:
    """The benchmarks for a real GPU print all their rows on the stand-in driver."""
    (tmp_path / "contexts").mkdir()
    scenario = tmp_path / "scenario.txt"
    scenario.write_text(f"contexts contexts\n{machine(1)}")
    code = "from benchmarks.real import real\nfor row in real(quick=True): print(row)"
    environ = driver.environment(scenario, base=dict(os.environ))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4 + 1 + 1 + 1


def test_real_gpu_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option --real is rejected on the stand-in driver."""
    monkeypatch.setenv("STAND_IN_SCENARIO", "scenario.txt")
    done = run_benchmarks("--real")
    assert done.returncode == 2
    assert "this is the stand-in driver" in done.stderr


def test_unknown_group() -> None:
    """An unknown group is an error that names the known ones."""
    done = run_benchmarks("speed")
    assert done.returncode == 2
    assert "no such group: speed; choose from load, start" in done.stderr
