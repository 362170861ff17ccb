"""Rounds in which many processes race for parts of a few GPUs, checked from outside.

    python -m tests.support.parts_race --rounds 200

In each round, all processes request a part of a random size at once, and some are killed meanwhile.
Then some of the winners are killed, and all refused processes try again. The referee compares the
answers with the kernel's lock list and with the sizes in the lock files. The exit code is 1 if a
GPU's parts exceed its memory, a killed process's part is still there, a request is refused that
would fit, or a refusal reports too little available memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import reserve_gpu
from tests.support.race import LOOKS, fork, inside, load, locked_files

if TYPE_CHECKING:
    from collections.abc import Sequence

RESERVED_MIB = 500
TOTALS_MIB = (80_000, 40_000, 24_000, 16_000)
ROOMS_MIB = [total - RESERVED_MIB for total in TOTALS_MIB]
UUIDS = [f"GPU-{number:08x}-0000-4000-8000-000000000000" for number in range(len(TOTALS_MIB))]
SCENARIO = "\n".join(
    f"gpu\n uuid {uuid}\n memory {total}\n reserved {RESERVED_MIB}"
    for uuid, total in zip(UUIDS, TOTALS_MIB, strict=True)
)
KILLED_DURING = 2  # processes in each race
KILLED_AFTERWARDS = 4
KILL_WITHIN_S = 0.1


class Answer(NamedTuple):
    """The outcome of a request: the GPU, or None and the most available memory in MiB."""

    gpu: int | None
    room: float = 0.0


class Worker:
    """A process that makes the requests that the referee sends."""

    def __init__(self, others: Sequence[Worker]) -> None:
        self.end, end = socket.socketpair()
        self.pid = fork(lambda: work(end, [self.end, *(other.end for other in others)]))
        end.close()
        self._lines = self.end.makefile("r")
        self.mib, self.answer = 0, Answer(None)

    def ask(self, mib: int) -> None:
        """Send a request; `hear` waits for the answer."""
        self.mib, self.answer = mib, Answer(None)
        self.end.sendall(b"%d\n" % mib)

    def hear(self) -> bool:
        """Return whether an answer came; a killed process gives none."""
        line = self._lines.readline()
        if line:
            self.answer = Answer(*json.loads(line))
        return bool(line)

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Close the connection to the process."""
        self._lines.close()
        self.end.close()


def work(end: socket.socket, others: Sequence[socket.socket]) -> None:
    """Request as many MiB as each line says; 0 releases the part."""
    warnings.simplefilter("ignore")
    for other in others:
        other.close()
    with end, end.makefile("r") as lines:
        for line in lines:
            mib = int(line)
            answer = ask(mib) if mib else reserve_gpu.release() and None
            end.sendall(f"{json.dumps(answer or Answer(None))}\n".encode())


def ask(mib: int) -> Answer:
    """Request a part, and return the outcome."""
    try:
        reservation = reserve_gpu.reserve(memory=f"{mib}MiB")
    except reserve_gpu.NoFreeDeviceError as error:
        return Answer(None, max(row.promisable_mib or 0.0 for row in error.rows))
    assert reservation.environ["CUDA_DEVICE_MEMORY"] == str(mib)
    return Answer(reservation.devices[0].index)


@dataclass
class Referee:
    """Lets the workers race, kills some, and compares their answers with the locks."""

    dice: random.Random
    workers: list[Worker] = field(default_factory=list)
    granted: int = 0
    refused: int = 0
    retried: int = 0  # granted after a refusal, because others were killed
    kills: int = 0
    violations: list[str] = field(default_factory=list)

    def run(self, processes: int, rounds: int) -> None:
        self._fill(processes)
        for number in range(rounds):
            before = len(self.violations)
            self._round()
            self.violations[before:] = [f"{number}: {text}" for text in self.violations[before:]]
            for worker in self.workers:
                worker.ask(0)
            for worker in self.workers:
                worker.hear()
            self._check("after the round", [])
            self._fill(processes)
        for worker in self.workers:
            worker.kill()
            worker.close()

    def _round(self) -> None:
        doomed = self.dice.sample(self.workers, KILLED_DURING)
        self._race(self.workers, doomed)
        self._check("after the first race", self.workers)
        winners = [worker for worker in self.workers if worker.answer.gpu is not None]
        losers = [worker for worker in self.workers if worker.answer.gpu is None]
        for worker in self.dice.sample(winners, min(KILLED_AFTERWARDS, len(winners))):
            self._kill(worker)
        self._check("after some were killed", self.workers)
        self._race(losers, [])
        self._check("after the second race", self.workers)
        self._check_refusals(losers)
        self.retried += sum(worker.answer.gpu is not None for worker in losers)

    def _race(self, workers: Sequence[Worker], doomed: Sequence[Worker]) -> None:
        for worker in workers:
            worker.ask(self._size())
        for worker in doomed:
            time.sleep(self.dice.random() * KILL_WITHIN_S / len(doomed))
            self._kill(worker)
        for worker in workers:
            if worker not in doomed and not worker.hear():
                self.violations.append(f"{worker.pid} ended by itself")
        self.granted += sum(worker.answer.gpu is not None for worker in workers)
        self.refused += sum(worker.answer.gpu is None for worker in workers)

    def _size(self) -> int:
        """Return a size: mostly a small one, sometimes a large one."""
        most = self.dice.choice([2_000, 5_000, 20_000, 60_000])
        return int(self.dice.uniform(1_000, most))

    def _kill(self, worker: Worker) -> None:
        self.kills += 1
        worker.kill()
        worker.close()
        self.workers.remove(worker)

    def _fill(self, processes: int) -> None:
        while len(self.workers) < processes:
            self.workers.append(Worker(self.workers))

    def _check(self, when: str, workers: Sequence[Worker]) -> None:
        """Compare the granted parts with the kernel's list, the files and the GPUs' memory."""
        said = {w.pid: (w.answer.gpu, w.mib) for w in workers if w.answer.gpu is not None}
        there = promises()
        if said != there:
            self.violations.append(f"{when} {said} was granted, but {there} is locked")
        for gpu, room in enumerate(ROOMS_MIB):
            if (sum_mib := sum(mib for at, mib in there.values() if at == gpu)) > room:
                self.violations.append(f"{when} {sum_mib} of {room} MiB of GPU{gpu} are promised")

    def _check_refusals(self, losers: Sequence[Worker]) -> None:
        """Check that each refused request was for more than the available memory."""
        there = promises().values()
        left = [
            room - sum(mib for at, mib in there if at == gpu) for gpu, room in enumerate(ROOMS_MIB)
        ]
        for worker in losers:
            if worker.answer.gpu is not None:
                continue
            # A refusal does not report the memory of GPUs that are too small in any case.
            fitting = [left[gpu] for gpu, room in enumerate(ROOMS_MIB) if room >= worker.mib]
            if worker.mib <= max(left) or worker.answer.room < max(fitting):
                self.violations.append(f"{worker.mib} refused, {worker.answer}, {left} MiB left")


def promises() -> dict[int, tuple[int, float]]:
    """Return the GPU, and the size in its locked file, by the PID in the kernel's lock list.

    One reading of the list can miss a lock while other processes unlock files. The workers make no
    requests now, so every lock that was seen once is held.
    """
    found = {}
    folder = Path(os.environ["RESERVE_GPU_LOCK_DIR"])
    for pid, name in chain(*(locked_files() for _ in range(LOOKS))):
        with suppress(ValueError):
            record = json.loads((folder / name).read_bytes())
            found[pid] = (UUIDS.index(name.partition(".")[0]), record["part_mib"])
    return found


def race(processes: int, rounds: int, seed: int) -> int:
    """Run the rounds on the machine that this process is on; returns the exit code."""
    load()
    referee = Referee(random.Random(seed))  # noqa: S311 - nothing secret
    start = time.monotonic()
    referee.run(processes, rounds)
    print(
        f"{rounds} rounds of {processes} processes for {len(UUIDS)} GPUs (seed {seed}) in "
        f"{time.monotonic() - start:.0f} s:\n{referee.granted} parts granted, {referee.refused} "
        f"refused, {referee.kills} kills;\n{referee.retried} had after others were killed, "
        f"{len(referee.violations)} violations"
    )
    for violation in referee.violations[:20]:
        print(f"VIOLATION: {violation}")
    return bool(referee.violations)


def main() -> int:
    """Make a machine of four GPUs and run the race on it, in a process that has its driver."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.parts_race", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.inside:
        return race(told.processes, told.rounds, told.seed)
    options = [f"--{name}={getattr(told, name)}" for name in ("rounds", "processes", "seed")]
    return inside("tests.support.parts_race", SCENARIO, *options)


if __name__ == "__main__":
    sys.exit(main())
