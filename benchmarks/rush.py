"""Benchmark of a rush: 64 kernels each request one of 8 GPUs at the same moment."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks import ways
from benchmarks.stage import Stage, machine, stage
from benchmarks.table import Row, milliseconds
from tests.support.machine import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KERNELS, FEW_KERNELS, GPUS = 64, 16, 8
LIMIT_S = 3  # seconds
STARTERS = 8  # number of kernels to start at a time; each keeps a core busy for a second
HEAD_START_S = 2.0  # seconds allowed for sending the cells to all kernels before any cell runs
CELL = """
import os, time
time.sleep(max(0, {at} - time.monotonic()))
try:
    exec({code!r})
except Exception as error:
    if type(error).__name__ != "NoFreeDeviceError":
        raise
print("\\nmeasured", time.monotonic(), os.environ["CUDA_VISIBLE_DEVICES"])
"""


def rush(*, quick: bool) -> Iterator[Row]:
    """Measure the time until all kernels have an answer, and count GPUs that were assigned twice.

    The other methods run after reserve_gpu in the same kernels, which does not put these methods at
    a disadvantage.
    """
    count = FEW_KERNELS if quick else KERNELS
    with stage(machine(GPUS)) as bench, ExitStack() as stack:
        kernels = _kernels(bench, count, stack)
        for kernel in kernels:
            kernel.load()
        for way in (ways.OURS, ways.NVITOP, ways.SETGPU):
            took_s, answers = _run_at_once(
                kernels, ways.MAGIC if way == ways.OURS else ways.CODE[way]
            )
            yield _row(way, took_s, answers)


def _row(way: str, took_s: float, answers: Sequence[str]) -> Row:
    winners = [answer for answer in answers if answer]
    duplicates = len(winners) - len(set(winners))
    label = f"{len(answers)} kernels request {GPUS} GPUs at once: {way}"
    counts = f"{len(winners)} winners, {duplicates} duplicates"
    measured = f"{counts}, all answered after {milliseconds(took_s * 1e3)}"
    if way != ways.OURS:
        return Row(label, measured)
    is_met = len(winners) == GPUS and not duplicates and took_s <= LIMIT_S
    return Row(label, measured, f"{GPUS} winners, 0 duplicates, {LIMIT_S} s", is_met)


def _kernels(bench: Stage, count: int, stack: ExitStack) -> list[Kernel]:
    def start(_: int) -> Kernel:
        kernel = Kernel(bench.environ(), bench.folder)
        stack.callback(kernel.close)
        return kernel

    with ThreadPoolExecutor(STARTERS) as threads:
        return list(threads.map(start, range(count)))


def _run_at_once(kernels: Sequence[Kernel], code: str) -> tuple[float, list[str]]:
    """Run code in all kernels at the same time.

    Returns:
        The seconds until the last kernel has an answer, and all answers.
    """
    at = time.monotonic() + HEAD_START_S
    cells = [kernel.start(CELL.format(at=at, code=code)) for kernel in kernels]
    ends, answers = [], []
    for kernel, message in zip(kernels, cells, strict=True):
        cell = kernel.finish(message)
        if cell.error:
            raise RuntimeError(f"{code}\nfailed: {cell.traceback}")
        end, _, answer = cell.stdout.rpartition("measured ")[2].partition(" ")
        ends.append(float(end))
        answers.append(answer.strip())
    return max(ends) - at, answers
