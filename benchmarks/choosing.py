"""Benchmarks of whole processes that choose a GPU or show the machine's status."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks import ways
from benchmarks.stage import Stage, crowd, in_turn, machine, stage
from benchmarks.table import Row, faster, slower

if TYPE_CHECKING:
    from collections.abc import Iterator

GPUS, MANY_GPUS = 8, 64
STATUS = {
    ways.OURS: ("-m", "reserve_gpu", "status"),
    "nvitop -1": ("-m", "nvitop", "-1"),
}


def first(*, quick: bool) -> Iterator[Row]:
    """Measure how long the first reservation takes on an idle machine."""
    with stage(machine(GPUS)) as bench:
        runs = {way: partial(choose, bench, way, GPUS, 0) for way in ways.CODE}
        # setGPU's method sleeps for a second, and a CPU core is slow for a while after a sleep. So
        # the fast methods are measured separately.
        slow = {way: runs[way] for way in (ways.OURS, ways.SETGPU)}
        fast = {way: run for way, run in runs.items() if way != ways.SETGPU}
        times = in_turn(fast, 3 if quick else 61)
        slow_times = in_turn(slow, 3 if quick else 7)
    ours = times[ways.OURS]
    label = "first reservation, whole process, vs."
    yield slower(f"{label} {ways.FLOOR}", ours, times[ways.FLOOR], 1.5)
    yield faster(f"{label} {ways.NVITOP}", ours, times[ways.NVITOP], 1.5)
    yield faster(f"{label} {ways.SETGPU}", slow_times[ways.OURS], slow_times[ways.SETGPU], 8)
    label = "first reservation of a part, whole process, vs. a whole GPU"
    yield slower(label, times[ways.PART], ours, 1.15)


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
            yield slower(label, times[ways.OURS], times[ways.FLOOR], 2)


def nothing(*, quick: bool) -> Iterator[Row]:
    """Measure how long it takes to refuse a reservation when no GPU is free.

    To report the refusal, reserve_gpu has to find the holder of each GPU.
    """
    for gpus in (GPUS, MANY_GPUS):
        with crowd(gpus) as pids, stage(machine(gpus, gpus, pids)) as bench:
            both = (ways.OURS, ways.FLOOR)
            runs = {way: partial(choose, bench, way, gpus, gpus) for way in both}
            times = in_turn(runs, 3 if quick else 61)
        label = f"none of {gpus} GPUs is free, vs. {ways.FLOOR}"
        yield slower(label, times[ways.OURS], times[ways.FLOOR], 2)


def status(*, quick: bool) -> Iterator[Row]:
    """Measure `reserve-gpu status` when half of the GPUs are busy.

    Two processes are using each busy GPU.
    """
    for gpus in (GPUS, MANY_GPUS):
        with crowd(gpus) as pids, stage(machine(gpus, gpus // 2, pids)) as bench:
            runs = {name: partial(_run, bench, *command) for name, command in STATUS.items()}
            times = in_turn(runs, 3 if quick else 15)
        label = f"status of {gpus} GPUs, {gpus} processes, vs. nvitop -1"
        yield slower(label, times[ways.OURS], times["nvitop -1"], 1)


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
