"""From nothing to the variables set, or to the status of the machine, as a whole process."""

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
    """Return the first reservation on a machine that is idle."""
    with stage(machine(GPUS)) as on:
        runs = {way: partial(choose, on, way, GPUS, 0) for way in ways.CODE}
        # setGPU's way sleeps for a second, after which a processor is slow for a while.
        slow = {way: runs[way] for way in (ways.OURS, ways.SETGPU)}
        fast = {way: run for way, run in runs.items() if way != ways.SETGPU}
        times = in_turn(fast, 3 if quick else 61)
        slow_times = in_turn(slow, 3 if quick else 7)
    ours = times[ways.OURS]
    what = "first reservation, whole process, against"
    yield slower(f"{what} {ways.FLOOR}", ours, times[ways.FLOOR], 1.5)
    yield faster(f"{what} {ways.NVITOP}", ours, times[ways.NVITOP], 1.5)
    yield faster(f"{what} {ways.SETGPU}", slow_times[ways.OURS], slow_times[ways.SETGPU], 8)
    what = "first reservation of a part, whole process, against a whole GPU"
    yield slower(what, times[ways.PART], ours, 1.15)


def last(*, quick: bool) -> Iterator[Row]:
    """Measure where the last of many GPUs is the first free one; the others are in use."""
    busy = MANY_GPUS - 1
    with crowd(busy) as everybody:
        for users, pids in {"a process on each other": everybody, "no process seen": []}.items():
            with stage(machine(MANY_GPUS, busy, pids)) as on:
                both = (ways.OURS, ways.FLOOR)
                runs = {way: partial(choose, on, way, MANY_GPUS, busy) for way in both}
                times = in_turn(runs, 3 if quick else 61)
            what = f"first free of {MANY_GPUS} GPUs is the last, {users}, against {ways.FLOOR}"
            yield slower(what, times[ways.OURS], times[ways.FLOOR], 2)


def nothing(*, quick: bool) -> Iterator[Row]:
    """Measure the refusal where nothing is free: who has what is found out, and what to do."""
    for gpus in (GPUS, MANY_GPUS):
        with crowd(gpus) as pids, stage(machine(gpus, gpus, pids)) as on:
            both = (ways.OURS, ways.FLOOR)
            runs = {way: partial(choose, on, way, gpus, gpus) for way in both}
            times = in_turn(runs, 3 if quick else 61)
        what = f"nothing free of {gpus} GPUs, against {ways.FLOOR}"
        yield slower(what, times[ways.OURS], times[ways.FLOOR], 2)


def status(*, quick: bool) -> Iterator[Row]:
    """Return the status of a machine of which one half is busy, with two processes on each GPU."""
    for gpus in (GPUS, MANY_GPUS):
        with crowd(gpus) as pids, stage(machine(gpus, gpus // 2, pids)) as on:
            runs = {name: partial(_look, on, *command) for name, command in STATUS.items()}
            times = in_turn(runs, 3 if quick else 15)
        what = f"status of {gpus} GPUs, {gpus} processes, against nvitop -1"
        yield slower(what, times[ways.OURS], times["nvitop -1"], 1)


def choose(on: Stage, way: str, gpus: int, busy: int) -> float:
    """Return the milliseconds that a way to a GPU takes. Raises RuntimeError for a wrong choice."""
    took_ms, answer = on.timed("-c", ways.CODE[way] + ways.SAY)
    ways.check(way, answer, gpus, busy)
    return took_ms


def _look(on: Stage, *command: str) -> float:
    return on.timed(*command)[0]
