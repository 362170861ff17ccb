"""Benchmark of a report that reads and totals one year of a lab's history."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.table import Row
from reserve_gpu.commands.report import totals
from reserve_gpu.log import log_reader
from reserve_gpu.system import settings
from tests.support.histories import DAY_S, PEOPLE, Histories, write_year, year

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 1.0  # seconds


def history(*, quick: bool) -> Iterator[Row]:
    """Measure how long a report takes in this process.

    The history files are already in the page cache.
    """
    now = time.time()
    with tempfile.TemporaryDirectory() as folder:
        histories = Histories(Path(folder) / "history")
        lines = write_year(histories, year(now))
        os.environ[settings.HISTORY] = str(histories.folder)
        try:
            times_s = [_timed(now, lines) for _ in range(3 if quick else 15)]
        finally:
            del os.environ[settings.HISTORY]
        size = histories.size()
    measured_s = statistics.median(times_s[1:])
    label = f"one-year report for {PEOPLE} people, {lines:,} lines in {size / 1e6:.0f} MB"
    yield Row(label, f"{measured_s:.2f} s", f"at most {LIMIT_S:g} s", measured_s <= LIMIT_S)


def _timed(now: float, lines: int) -> float:
    """Return the run time of a report in seconds.

    Raises:
        RuntimeError: The report's total is implausible.
    """
    start = time.perf_counter()
    summary = totals.summed(log_reader.since(now - 366 * DAY_S, now, set()))
    took_s = time.perf_counter() - start
    total = totals.together(summary.days.values())
    if not lines / 8 < total.reserved < lines:
        raise RuntimeError(f"implausible sum of {lines} lines: {total}")
    return took_s
