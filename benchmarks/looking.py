"""The status of a machine, and how the cost of looking grows with devices and processes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks import ways
from benchmarks.report import Bar, Row, Times, rows, side_by_side
from benchmarks.stage import Stage, crowd, in_turn, machine, stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GPUS, BUSY, PROCESSES = 8, 4, 8
DEVICES, CROWDS = (1, 8, 64), (0, 10, 1000)
COMMANDS = {
    ways.OURS: ("-c", "import reserve_gpu; print(reserve_gpu.status())"),
    "gpustat": ("-m", "gpustat"),
    "nvitop -1": ("-m", "nvitop", "-1"),
}
FASTER = {"gpustat": Bar(at_least=1), "nvitop -1": Bar(at_least=1)}


def status(*, quick: bool) -> Iterator[Row]:
    """The status of 8 GPUs, 4 of them busy, as a whole process."""
    with crowd(PROCESSES) as pids, stage(machine(GPUS, BUSY, pids)) as on:
        times = in_turn(_looks(on), 3 if quick else 15)
    yield from rows(f"status of {GPUS} GPUs, {PROCESSES} processes", times, FASTER)


def growth(*, quick: bool) -> Iterator[Row]:
    """How cost grows: the status of all, and the reservation of the last GPU, the one idle."""
    rounds = 1 if quick else 5
    with crowd(max(CROWDS)) as everybody:
        for gpus in DEVICES:
            crowds = [everybody[:count] for count in CROWDS]
            what = f"{gpus} GPUs" if gpus > 1 else "1 GPU"
            found = [_look(gpus, pids, rounds) for pids in crowds]
            yield from side_by_side(f"status of {what}; {_list(CROWDS)} processes", found)
            # One GPU alone can't have processes and be free.
            found = [
                _reserve_last(gpus, pids, rounds) for pids in crowds[: 1 if gpus == 1 else None]
            ]
            counts = _list(CROWDS[: len(found)])
            yield from side_by_side(f"the last of {what} is free; {counts} processes", found)


def _list(numbers: Sequence[int]) -> str:
    return " / ".join(f"{number:,}" for number in numbers)


def _look(gpus: int, pids: Sequence[int], rounds: int) -> Times:
    with stage(machine(gpus, gpus if pids else 0, pids)) as on:
        looks = _looks(on)
        del looks["gpustat"]  # it sleeps 0.1 s for each GPU, whatever there is
        return in_turn(looks, rounds)


def _looks(on: Stage) -> dict[str, Callable[[], float]]:
    return {way: partial(on.until_end, *command) for way, command in COMMANDS.items()}


def _reserve_last(gpus: int, pids: Sequence[int], rounds: int) -> Times:
    with stage(machine(gpus, gpus - 1, pids)) as on:
        runs = {way: partial(_reserve, on, way, gpus) for way in (ways.FLOOR, ways.OURS)}
        return in_turn(runs, rounds)


def _reserve(on: Stage, way: str, gpus: int) -> float:
    took_ms, answer = on.until_answer(ways.CODE[way] + ways.SAY)
    ways.check(way, answer, gpus, gpus - 1)
    return took_ms
