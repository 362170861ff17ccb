"""Benchmarks on a machine with one real GPU, which must be idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import choosing, shell
from benchmarks.stage import real_stage
from tests.support.hardware.machine import COMPUTE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.table import Row


def real(*, quick: bool) -> Iterator[Row]:
    """Measure what depends on the driver: reservations, refusals, status, and startup.

    Raises:
        RuntimeError: The process that makes the GPU busy could not use CUDA.
    """
    with real_stage() as bench:
        yield from choosing.first_on(bench, 1, quick=quick)
        with bench.child() as user:
            if error := user.run(COMPUTE).text:
                raise RuntimeError(error)
            # nvitop.select would choose this GPU, because the process uses little memory.
            limit = choosing.NOTHING_LIMITS[choosing.GPUS]
            yield from choosing.nothing_on(bench, 1, limit, quick=quick)
            limit = choosing.STATUS_LIMITS[choosing.GPUS]
            yield choosing.status_on(bench, "1 GPU, 1 process", limit, quick=quick)
        yield shell.start_on(bench, quick=quick)
