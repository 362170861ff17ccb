"""Races of many processes for eight GPUs, checked from outside: by the kernel's own list of locks.

    python -m tests.race --seconds 60

Workers reserve, release and get killed with -9 at random. The referee reserves nothing itself. It
looks at /proc/locks, where a device's lock file shows by its inode, and compares: does what each
worker believes to hold agree, has no device two holders, is nothing held by the dead? Ends with 1
if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import reserve_gpu
from reserve_gpu.settings import lock_directory
from tests.machine import ROOT, Machine

if TYPE_CHECKING:
    from collections.abc import Callable

UUIDS = [f"GPU-{number:08x}-0000-4000-8000-000000000000" for number in range(8)]
SCENARIO = "\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS)
HOLD_S = 0.01  # a worker leaves things as they are for up to so long
PAUSE_S = 0.002  # between two looks of the referee
KILLS_PER_LOOK = 0.05
LOOKS = 3  # the list of locks is no snapshot where it fills several pages: only what lasts counts


@dataclass(frozen=True)
class Claim:
    """What a worker says of itself.

    turn: how often it began or ended a change, so even while it changes nothing.
    held: the devices that it believes to hold, a bit for each.
    """

    turn: int
    held: int

    @property
    def settled(self) -> bool:
        return self.turn > 0 and self.turn % 2 == 0


class Board:
    """Where the workers write and the referee reads: memory that all of them share."""

    def __init__(self, workers: int) -> None:
        self.turn = RawArray("q", workers)
        self.held = RawArray("q", workers)
        self.reserved = RawArray("q", workers)
        self.refused = RawArray("q", workers)

    def claims(self) -> list[Claim]:
        return [Claim(*pair) for pair in zip(self.turn, self.held, strict=True)]


class Worker:
    """Reserves and releases at random, for ever."""

    def __init__(self, board: Board, number: int, dice: random.Random) -> None:
        self.board, self.number, self.dice = board, number, dice
        self.referee = os.getppid()

    def run(self) -> None:
        while os.getppid() == self.referee:
            self.board.turn[self.number] += 1
            self._act()
            self.board.held[self.number] = mask()
            self.board.turn[self.number] += 1
            time.sleep(self.dice.random() * HOLD_S)

    def _act(self) -> None:
        release, reserve = self.dice.choice([(True, False), (True, True), (False, True)])
        if release:
            reserve_gpu.release()
        if reserve:
            self._reserve()

    def _reserve(self) -> None:
        before = reserve_gpu.current()
        count = self.dice.choice([1, 1, 1, 2, 3])
        named = self.dice.random() < 0.25
        try:
            if named:
                held = reserve_gpu.reserve(self.dice.sample(range(len(UUIDS)), count))
            else:
                held = reserve_gpu.reserve(count=count)
            self.board.reserved[self.number] += held is not before
        except reserve_gpu.NoFreeDeviceError:
            self.board.refused[self.number] += 1


@dataclass
class Referee:
    """Starts the workers, kills some, and compares what they believe with what the kernel says."""

    board: Board
    dice: random.Random
    pids: list[int] = field(default_factory=list)
    inodes: dict[str, str] = field(default_factory=dict)  # of each device, when it was first seen
    seen: set[tuple[int, int]] = field(default_factory=set)  # pid and turn of claims that agreed
    kills: int = 0
    looks: int = 0
    violations: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        self.pids = [self._start(number) for number in range(len(self.board.turn))]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            self._mourn()
            if self.dice.random() < KILLS_PER_LOOK:
                self._replace(self.dice.randrange(len(self.pids)))
            time.sleep(PAUSE_S)
        for pid in self.pids:
            self._kill(pid)
        if locks := kernel_locks():
            self.violations.append(f"all workers are dead, but the kernel lists {locks}")

    def look(self) -> None:
        """Compare, and note what is wrong each time while the worker stands still."""
        self.looks += 1
        wrong = self._wrong()
        for _ in range(LOOKS - 1):
            wrong = wrong and wrong & self._wrong()
        self.violations += sorted(wrong)
        self._compare_inodes()

    def _wrong(self) -> set[str]:
        before, locks, after = self.board.claims(), kernel_locks(), self.board.claims()
        wrong = {f"device {d} is held by {pids}" for d, pids in locks.items() if len(pids) > 1}
        strangers = {pid for pids in locks.values() for pid in pids} - set(self.pids)
        wrong |= {f"{pid} is no living worker, but holds a device" for pid in strangers}
        for pid, claim, later in zip(self.pids, before, after, strict=True):
            if claim != later or not claim.settled:
                continue
            listed = sum(1 << device for device, pids in locks.items() if pid in pids)
            if listed == claim.held:
                self.seen |= {(pid, claim.turn)} if listed else set()
            else:
                wrong.add(f"{pid} believes {claim.held:08b}, the kernel lists {listed:08b}")
        return wrong

    def _compare_inodes(self) -> None:
        for name, inode in lock_files().items():
            if self.inodes.setdefault(name, inode) != inode:
                self.violations.append(f"the lock file of {name} is another one than before")

    def _mourn(self) -> None:
        """Nobody but the referee ends a worker."""
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            self.violations.append(f"worker {pid} ended by itself: {status}")
            self.pids[self.pids.index(pid)] = self._start(self.pids.index(pid))

    def _replace(self, number: int) -> None:
        self.kills += 1
        self._kill(self.pids[number])
        self.pids[number] = self._start(number)

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if left := [device for device, pids in kernel_locks().items() if pid in pids]:
            self.violations.append(f"{pid} is dead and still holds {left}")

    def _start(self, number: int) -> int:
        self.board.turn[number] = self.board.held[number] = 0
        dice = random.Random(self.dice.random())  # noqa: S311 - nothing secret
        return fork(lambda: Worker(self.board, number, dice).run())


def mask() -> int:
    """The devices that this process believes to hold, a bit for each."""
    held = reserve_gpu.current()
    return sum(1 << device.index for device in held.devices) if held else 0


def lock_files() -> dict[str, str]:
    """The lock file of each device, as /proc/locks names it."""
    found = {}
    for path in Path(lock_directory() or "").glob("GPU-*.lock"):
        file = path.stat()
        device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
        found[path.stem] = f"{device}:{file.st_ino}"
    return found


def kernel_locks() -> dict[int, list[int]]:
    """The pids that hold each device, by the kernel's list."""
    devices = {inode: UUIDS.index(uuid) for uuid, inode in lock_files().items()}
    found: dict[int, list[int]] = {}
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        _, kind, _, mode, pid, inode, *_ = line.replace("-> ", "waits:").split()
        if (kind, mode) == ("FLOCK", "WRITE") and inode in devices:
            found.setdefault(devices[inode], []).append(int(pid))
    return found


def fork(function: Callable[[], None]) -> int:
    """A process that runs the function; what it raises goes to standard error."""
    pid = os.fork()
    if not pid:
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc(limit=-1)
            os._exit(1)
    return pid


def load() -> None:
    """Import, once and not in every worker, what is imported when it is first needed."""
    import pynvml  # noqa: F401

    reserve_gpu.current()


def contest(contenders: int) -> dict[str, object]:
    """What comes of so many that reserve at the same moment, and what the kernel says then."""
    gate, start = os.pipe()
    answers, answer = os.pipe()
    pids = [fork(lambda: contend((gate, start), answer)) for _ in range(contenders)]
    for descriptor in (gate, start, answer):  # the gate opens when nobody has it open for writing
        os.close(descriptor)
    with os.fdopen(answers) as lines:
        said = [next(lines).split() for _ in pids]
        locks = kernel_locks()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {"said": said, "kernel": [[str(p), str(d)] for d, ps in locks.items() for p in ps]}


def contend(gate: tuple[int, int], answer: int) -> NoReturn:
    os.close(gate[1])
    os.read(gate[0], 1)
    try:
        came_of_it = reserve_gpu.reserve().environ["CUDA_VISIBLE_DEVICES"]
    except Exception as error:
        came_of_it = type(error).__name__
    os.write(answer, f"{os.getpid()} {came_of_it}\n".encode())
    while True:
        signal.pause()


def print_contests(contenders: int, rounds: int) -> None:
    """A line of JSON for each round."""
    load()
    for _ in range(rounds):
        print(json.dumps(contest(contenders)), flush=True)


def race(processes: int, seconds: float, seed: int) -> int:
    """Run the race on the machine that this process is on; returns the exit code."""
    load()
    board = Board(processes)
    referee = Referee(board, random.Random(seed))  # noqa: S311 - nothing secret
    referee.run(seconds)
    print(
        f"{sum(board.reserved)} reservations, {sum(board.refused)} refusals, {referee.kills} kills "
        f"by {processes} processes on {len(UUIDS)} devices in {seconds:g} s (seed {seed});\n"
        f"{referee.looks} looks at the kernel's list saw {len(referee.seen)} reservations that "
        f"agree, {len(referee.violations)} violations"
    )
    for violation in referee.violations[:20]:
        print(f"VIOLATION: {violation}")
    return bool(referee.violations)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.race", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Make a machine of eight GPUs and run the race on it, in a process that has its driver."""
    told = arguments()
    if told.inside:
        return race(told.processes, told.seconds, told.seed)
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # as locks are by default
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        machine = Machine(Path(folder))
        machine.write(SCENARIO)
        environ = machine.environ()
        del environ["STAND_IN_LOG"]  # it would grow by a megabyte a second
        options = [f"--processes={told.processes}", f"--seconds={told.seconds}", f"--seed={seed}"]
        return subprocess.run(
            [sys.executable, "-m", "tests.race", "--inside", *options],
            env=environ, cwd=ROOT, check=False,
        ).returncode  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
