"""Many at once: 64 kernels ask for one of 8 GPUs at the same moment."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks import ways
from benchmarks.stage import Stage, machine, stage
from benchmarks.table import Row, milliseconds
from tests.machine import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KERNELS, FEW_KERNELS, GPUS = 64, 16, 8
LIMIT_S = 3
STARTERS = 8  # kernels that start at the same time: each wants a core for a second
HEAD_START_S = 2.0  # until then all cells are sent
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
    """Return the seconds until all have an answer, how many got a GPU, and how many a double.

    The others run in the same kernels, after ours: their numbers are no worse for it.
    """
    count = FEW_KERNELS if quick else KERNELS
    with stage(machine(GPUS)) as on, ExitStack() as stack:
        kernels = _kernels(on, count, stack)
        for kernel in kernels:
            kernel.load()
        for way in (ways.OURS, ways.NVITOP, ways.SETGPU):
            took_s, answers = _ask(kernels, ways.MAGIC if way == ways.OURS else ways.CODE[way])
            yield _row(way, took_s, answers)


def _row(way: str, took_s: float, answers: Sequence[str]) -> Row:
    winners = [answer for answer in answers if answer]
    doubles = len(winners) - len(set(winners))
    what = f"{len(answers)} kernels at once for {GPUS} GPUs: {way}"
    counts = f"{len(winners)} winners, {doubles} doubles"
    measured = f"{counts}, all answered after {milliseconds(took_s * 1e3)}"
    if way != ways.OURS:
        return Row(what, measured)
    is_met = len(winners) == GPUS and not doubles and took_s <= LIMIT_S
    return Row(what, measured, f"{GPUS} winners, 0 doubles, {LIMIT_S} s", is_met)


def _kernels(on: Stage, count: int, stack: ExitStack) -> list[Kernel]:
    def start(_: int) -> Kernel:
        kernel = Kernel(on.environ(), on.folder)
        stack.callback(kernel.close)
        return kernel

    with ThreadPoolExecutor(STARTERS) as threads:
        return list(threads.map(start, range(count)))


def _ask(kernels: Sequence[Kernel], code: str) -> tuple[float, list[str]]:
    """Return the seconds until the last kernel had its answer, and the answers."""
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
