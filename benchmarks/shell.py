"""Benchmarks of the time that the extension adds to shell startup."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.stage import Stage, in_turn, machine, stage
from benchmarks.table import Row, milliseconds, slower

if TYPE_CHECKING:
    from collections.abc import Iterator

GPUS = 8
IPYTHON = ("-m", "IPython", "--no-banner")
LOAD_LIMIT_MS = 20  # milliseconds
HEAVY = ("pynvml", "rich")  # modules that are only needed for a reservation or a status
LOAD = f"""
import sys, time
modules_before = set(sys.modules)
start = time.perf_counter()
get_ipython().run_line_magic("load_ext", "reserve_gpu")
took_ms = (time.perf_counter() - start) * 1e3
print("measured", took_ms, *set({HEAVY}).intersection(sys.modules) - modules_before)
"""


def load(*, quick: bool) -> Iterator[Row]:
    """Measure `%load_ext` in a running shell, and list the heavy modules that it imports."""
    times: list[float] = []
    heavy: set[str] = set()
    with stage(machine(GPUS)) as bench:
        for _ in range(3 if quick else 21):
            took_ms, *modules = bench.timed(*IPYTHON, "-c", LOAD)[1].split("measured ")[1].split()
            times.append(float(took_ms))
            heavy |= set(modules)
    label, load_ms = "`%load_ext` in a running shell", statistics.median(times)
    yield Row(label, milliseconds(load_ms), f"at most {LOAD_LIMIT_MS} ms", load_ms <= LOAD_LIMIT_MS)
    bar = f"none of {', '.join(HEAVY)}"
    yield Row(
        "heavy modules imported by `%load_ext`", ", ".join(sorted(heavy)) or "none", bar, not heavy
    )


def start(*, quick: bool) -> Iterator[Row]:
    """Measure the startup and exit of IPython with and without the extension."""
    with stage(machine(GPUS)) as bench:
        yield start_on(bench, quick=quick)


def start_on(bench: Stage, *, quick: bool) -> Row:
    """Measure the startup and exit of IPython on a machine."""
    runs = {
        "without": partial(_start, bench),
        "with": partial(_start, bench, "--ext=reserve_gpu"),
    }
    times = in_turn(runs, 3 if quick else 31)
    label = "IPython startup with the extension, vs. without"
    return slower(label, times["with"], times["without"], 1.03)


def _start(bench: Stage, *options: str) -> float:
    return bench.timed(*IPYTHON, *options, "-c", "pass")[0]
