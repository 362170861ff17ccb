"""From nothing to the variables set: as a whole process, in a running kernel, on a slow driver."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import ways
from benchmarks.report import Bar, Row, milliseconds, rows, verdict
from benchmarks.stage import Stage, crowd, in_kernel, in_turn, machine, stage

if TYPE_CHECKING:
    from collections.abc import Iterator

GPUS = 8
SITUATIONS = {"first of 8 free": 0, "first 7 of 8 busy": 7, "all 8 busy": 8}
SLOW = "".join(f"delay-first nvmlDeviceGetHandleBy{by} * 1\n" for by in ("Index_v2", "UUID"))
FASTER = {ways.NVITOP: Bar(at_least=1.5), ways.SETGPU: Bar(at_least=8)}
LOAD_LIMIT_MS = 3
ONE_CELL = "reserve_gpu, loaded in the same cell"


def process(*, quick: bool) -> Iterator[Row]:
    """The whole process, from `python` to the variables set."""
    for what, busy in SITUATIONS.items():
        with crowd(busy) as pids, stage(machine(GPUS, busy, pids)) as on:
            runs = {way: partial(_as_process, on, way, busy) for way in ways.CODE}
            bars = FASTER | {ways.FLOOR: Bar(at_most=1.5)} if not busy else {}
            yield from rows(f"whole process, {what}", in_turn(runs, 3 if quick else 15), bars)


def kernel(*, quick: bool) -> Iterator[Row]:
    """The first use in a running kernel, and what `%load_ext` takes there."""
    rounds = 3 if quick else 21
    with stage(machine(GPUS)) as on:
        loads: dict[str, list[float]] = {way: [] for way in ways.LOAD}
        runs = {way: partial(_in_kernel, on, way, loads) for way in ways.CODE}
        runs[ONE_CELL] = partial(_in_kernel, on, ONE_CELL, loads)
        times = in_turn(runs, rounds)
        for _ in range(rounds):
            with on.kernel() as running:
                loads[ways.IPYTHON].append(in_kernel(running, ways.LOAD[ways.IPYTHON])[0])
    yield from rows(
        "in a running kernel, first of 8 free", times, FASTER | {ways.FLOOR: Bar(at_most=1.25)}
    )
    for way, found in loads.items():
        load_ms = statistics.median(found)
        bar = verdict(f"at most {LOAD_LIMIT_MS} ms", is_met=load_ms <= LOAD_LIMIT_MS)
        is_ours = way == ways.OURS
        yield Row(
            "`%load_ext` in a running kernel",
            way,
            milliseconds(load_ms),
            bar=bar if is_ours else "",
        )


def start(*, quick: bool) -> Iterator[Row]:
    """The start of IPython, without the extension and with it."""
    with stage(machine(GPUS)) as on:
        command = ("-m", "IPython", "--no-banner", "-c", "pass")
        runs = {
            "without": partial(on.until_end, *command),
            "with the extension": partial(on.until_end, *command, "--ext=reserve_gpu"),
        }
        yield from rows("start of IPython, and its end", in_turn(runs, 3 if quick else 21))


def slow(*, quick: bool) -> Iterator[Row]:
    """A driver that takes 1 s for each GPU that it initialises; all ways at once, as they sleep."""
    with stage(machine(GPUS, more=SLOW)) as on, ThreadPoolExecutor() as threads:
        times: dict[str, list[float]] = {way: [] for way in ways.CODE}
        for _ in range(1 if quick else 3):
            found = threads.map(lambda way: _as_process(on, way, 0), ways.CODE)
            for way, took_ms in zip(ways.CODE, found, strict=True):
                times[way].append(took_ms)
    yield from rows("whole process, 8 free, 1 s for each GPU initialised", times)


def _as_process(on: Stage, way: str, busy: int) -> float:
    took_ms, answer = on.until_answer(ways.CODE[way] + ways.SAY)
    ways.check(way, answer, GPUS, busy)
    return took_ms


def _in_kernel(on: Stage, way: str, loads: dict[str, list[float]]) -> float:
    with on.kernel() as running:
        code = ways.CODE.get(way, "")
        if way == ways.OURS:
            loads[way].append(in_kernel(running, ways.LOAD[way])[0])
            code = ways.MAGIC
        elif way == ONE_CELL:
            code = f"{ways.LOAD[ways.OURS]}\n{ways.MAGIC}"
        took_ms, answer = in_kernel(running, code)
    ways.check(way, answer, GPUS, 0)
    return took_ms
