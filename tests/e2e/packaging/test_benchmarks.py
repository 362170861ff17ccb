"""The benchmarks measure what they claim to compare."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.stage import machine
from tests import driver
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
