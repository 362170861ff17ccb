"""What the extension costs the start of a shell."""

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
LOAD_LIMIT_MS = 20
HEAVY = ("pynvml", "rich")  # no module that only a reservation or a status needs
LOAD = f"""
import sys, time
modules_before = set(sys.modules)
start = time.perf_counter()
get_ipython().run_line_magic("load_ext", "reserve_gpu")
took_ms = (time.perf_counter() - start) * 1e3
print("measured", took_ms, *set({HEAVY}).intersection(sys.modules) - modules_before)
"""


def load(*, quick: bool) -> Iterator[Row]:
    """Measure `%load_ext` in a running shell, and name the modules that it must not load."""
    times: list[float] = []
    heavy: set[str] = set()
    with stage(machine(GPUS)) as on:
        for _ in range(3 if quick else 21):
            took_ms, *modules = on.timed(*IPYTHON, "-c", LOAD)[1].split("measured ")[1].split()
            times.append(float(took_ms))
            heavy |= set(modules)
    what, load_ms = "`%load_ext` in a running shell", statistics.median(times)
    yield Row(what, milliseconds(load_ms), f"at most {LOAD_LIMIT_MS} ms", load_ms <= LOAD_LIMIT_MS)
    bar = f"none of {', '.join(HEAVY)}"
    yield Row(f"{what} imports", ", ".join(sorted(heavy)) or "none", bar, not heavy)


def start(*, quick: bool) -> Iterator[Row]:
    """Return the start of IPython, and its end, without the extension and with it."""
    with stage(machine(GPUS)) as on:
        runs = {
            "without": partial(_start, on),
            "with": partial(_start, on, "--ext=reserve_gpu"),
        }
        times = in_turn(runs, 3 if quick else 31)
    what = "start of IPython with the extension, against without"
    yield slower(what, times["with"], times["without"], 1.05)


def _start(on: Stage, *options: str) -> float:
    return on.timed(*IPYTHON, *options, "-c", "pass")[0]
