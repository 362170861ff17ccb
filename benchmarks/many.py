"""Many at once: 64 kernels ask for one of 8 GPUs at the same moment."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks import ways
from benchmarks.report import Row, milliseconds, verdict
from benchmarks.stage import Stage, machine, stage
from tests.machine import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KERNELS, FEW_KERNELS, GPUS = 64, 16, 8
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
    """Until all have their answer, and how many got a GPU that another one has.

    The others run in the same kernels, after ours: their numbers are no worse for it.
    """
    count = FEW_KERNELS if quick else KERNELS
    with stage(machine(GPUS)) as on, ExitStack() as stack:
        kernels = _kernels(on, count, stack)
        for kernel in kernels:
            kernel.load()
        for way in (ways.OURS, ways.FLOOR, ways.NVITOP, ways.GPUTIL, ways.SETGPU):
            took_ms, answers = _ask(kernels, ways.MAGIC if way == ways.OURS else ways.CODE[way])
            yield _row(way, took_ms, answers)


def _row(way: str, took_ms: Sequence[float], answers: Sequence[str]) -> Row:
    what = f"{len(answers)} kernels at once for {GPUS} GPUs"
    booked = [answer for answer in answers if answer]
    doubles = len(booked) - len(set(booked))
    value = f"{milliseconds(max(took_ms))} (median {milliseconds(statistics.median(took_ms))})"
    said = f"{len(booked)} got a GPU, double bookings: {doubles}"
    if way != ways.OURS:
        return Row(what, way, value, bar=said)
    return Row(what, way, value, bar=verdict(said, is_met=doubles == 0 and len(booked) == GPUS))


def _kernels(on: Stage, count: int, stack: ExitStack) -> list[Kernel]:
    def start(_: int) -> Kernel:
        kernel = Kernel(on.environ, on.folder)
        stack.callback(kernel.close)
        return kernel

    with ThreadPoolExecutor(STARTERS) as threads:
        return list(threads.map(start, range(count)))


def _ask(kernels: Sequence[Kernel], code: str) -> tuple[list[float], list[str]]:
    """Milliseconds until each kernel had its answer, and the answers."""
    at = time.monotonic() + HEAD_START_S
    sent = [kernel.start(CELL.format(at=at, code=code)) for kernel in kernels]
    took_ms, answers = [], []
    for kernel, message in zip(kernels, sent, strict=True):
        cell = kernel.finish(message)
        if cell.error:
            raise RuntimeError(f"{code}\nfailed: {cell.traceback}")
        end, _, answer = cell.stdout.rpartition("measured ")[2].partition(" ")
        took_ms.append((float(end) - at) * 1e3)
        answers.append(answer.strip())
    return took_ms, answers
