"""Benchmarks of whole processes that choose a GPU or show the machine's status."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks import ways
from benchmarks.stage import Stage, crowd, in_turn, machine, stage
from benchmarks.table import Row, faster, slower

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GPUS, MANY_GPUS = 8, 64
# The maximum ratios of our time to that of the compared program, by the number of GPUs.
NOTHING_LIMITS = {GPUS: 1.7, MANY_GPUS: 1.8}
STATUS_LIMITS = {GPUS: 0.6, MANY_GPUS: 0.55}
STATUS = {
    ways.OURS: ("-m", "reserve_gpu", "status"),
    "nvitop -1": ("-m", "nvitop", "-1"),
}


def first(*, quick: bool) -> Iterator[Row]:
    """Measure how long the first reservation takes on an idle machine."""
    with stage(machine(GPUS)) as bench:
        yield from first_on(bench, GPUS, quick=quick)


def first_on(bench: Stage, gpus: int, *, quick: bool) -> Iterator[Row]:
    """Measure how long the first reservation takes on a machine with this number of idle GPUs."""
    runs = {way: partial(choose, bench, way, gpus, 0) for way in ways.CODE}
    # setGPU's method sleeps for a second, and a CPU core is slow for a while after a sleep. So the
    # fast methods are measured separately.
    slow = {way: runs[way] for way in (ways.OURS, ways.SETGPU)}
    fast = {way: run for way, run in runs.items() if way != ways.SETGPU}
    times = in_turn(fast, 3 if quick else 61)
    ours, floor = times[ways.OURS], times[ways.FLOOR]
    label = "first reservation, whole process, vs."
    yield slower(f"{label} {ways.FLOOR}", ours, floor, 1.5)
    yield faster(f"{label} {ways.NVITOP}", ours, times[ways.NVITOP], 1.5)
    part_label = f"first reservation of a part, whole process, vs. {ways.FLOOR}"
    yield slower(part_label, times[ways.PART], floor, 1.6)
    times = in_turn(slow, 3 if quick else 7)
    yield faster(f"{label} {ways.SETGPU}", times[ways.OURS], times[ways.SETGPU], 8)


def last(*, quick: bool) -> Iterator[Row]:
    """Measure how long the first reservation takes when only the last of many GPUs is free."""
    busy = MANY_GPUS - 1
    with crowd(busy) as all_pids:
        cases = {"one process on each other GPU": all_pids, "no visible processes": []}
        for case, pids in cases.items():
            with stage(machine(MANY_GPUS, busy, pids)) as bench:
                both = (ways.OURS, ways.FLOOR)
                runs = {way: partial(choose, bench, way, MANY_GPUS, busy) for way in both}
                times = in_turn(runs, 3 if quick else 61)
            label = f"only the last of {MANY_GPUS} GPUs is free, {case}, vs. {ways.FLOOR}"
            yield slower(label, times[ways.OURS], times[ways.FLOOR], 1.45)


def nothing(*, quick: bool) -> Iterator[Row]:
    """Measure how long it takes to refuse a reservation when no GPU is free."""
    for gpus, at_most in NOTHING_LIMITS.items():
        with crowd(gpus) as pids, stage(machine(gpus, gpus, pids)) as bench:
            yield from nothing_on(bench, gpus, at_most, [ways.NVITOP], quick=quick)


def nothing_on(
    bench: Stage, gpus: int, at_most: float, others: Sequence[str] = (), *, quick: bool
) -> Iterator[Row]:
    """Measure how long it takes to refuse a reservation on a machine whose GPUs are all busy.

    To report the refusal, reserve_gpu has to find the holder of each GPU. The bare code reads all
    GPUs, because none of them is idle.

    Args:
        bench: The machine.
        gpus: The number of GPUs.
        at_most: The maximum ratio of the time to that of the bare code.
        others: The other methods to measure for comparison.
        quick: Whether to run only a few rounds.
    """
    runs = {
        way: partial(choose, bench, way, gpus, gpus) for way in (ways.OURS, ways.FLOOR, *others)
    }
    times = in_turn(runs, 3 if quick else 61)
    label = f"none of {gpus} GPUs is free, vs." if gpus > 1 else "the only GPU is busy, vs."
    ours = times[ways.OURS]
    yield slower(f"{label} {ways.FLOOR} reading all GPUs", ours, times[ways.FLOOR], at_most)
    for other in others:
        yield faster(f"{label} {other}", ours, times[other])


def status(*, quick: bool) -> Iterator[Row]:
    """Measure `reserve-gpu status` when half of the GPUs are busy.

    Two processes are using each busy GPU.
    """
    for gpus, at_most in STATUS_LIMITS.items():
        with crowd(gpus) as pids, stage(machine(gpus, gpus // 2, pids)) as bench:
            yield status_on(bench, f"{gpus} GPUs, {gpus} processes", at_most, quick=quick)


def status_on(bench: Stage, items: str, at_most: float, *, quick: bool) -> Row:
    """Measure `reserve-gpu status` on a machine.

    Args:
        bench: The machine.
        items: The GPUs and processes on the machine, in words.
        at_most: The maximum ratio of the time to that of `nvitop -1`.
        quick: Whether to run only a few rounds.
    """
    runs = {name: partial(_run, bench, *command) for name, command in STATUS.items()}
    times = in_turn(runs, 3 if quick else 15)
    label = f"status of {items}, vs. nvitop -1"
    return slower(label, times[ways.OURS], times["nvitop -1"], at_most)


def choose(bench: Stage, way: str, gpus: int, busy: int) -> float:
    """Choose a GPU by one of the methods, and check the choice.

    Returns:
        The run time in milliseconds.

    Raises:
        RuntimeError: The method chose the wrong GPU.
    """
    took_ms, answer = bench.timed("-c", ways.CODE[way] + ways.PRINT_CHOICE)
    ways.check(way, answer, gpus, busy)
    return took_ms


def _run(bench: Stage, *command: str) -> float:
    return bench.timed(*command)[0]
