"""Races of many processes for eight GPUs, checked with the kernel's list of locks.

    python -m tests.support.race --seconds 60

Workers reserve, share, wait and release at random, and are killed at random. The referee compares
their claims with /proc/locks. A device must not have two holders, a sharer next to a holder, or a
dead holder. The exit code is 1 after a violation.
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
import warnings
from dataclasses import dataclass, field
from itertools import combinations
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import reserve_gpu
from reserve_gpu.locks.directory import default_path
from reserve_gpu.locks.holders import is_sharers
from reserve_gpu.model.errors import MutexHeldError
from reserve_gpu.reservation.session import session
from tests.support.machine import ROOT, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UUIDS = [f"GPU-{number:08x}-0000-4000-8000-000000000000" for number in range(8)]
SCENARIO = "\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS)
HOLD_S = 0.01  # the longest pause of a worker, unless its last action took longer
PAUSE_S = 0.002  # between two checks of the referee
ENOUGH = 10  # reservations and checks
PATIENCE_S = 120.0  # extra time for them on a busy machine
KILLS_PER_LOOK = 0.05
LOOKS = 3  # a violation must last, because a long list of locks is not a snapshot


@dataclass(frozen=True)
class Claim:
    """The devices that a worker claims to hold.

    Attributes:
        turn: The number of beginnings and ends of changes; an even number between changes.
        held: A bit mask of the devices that it holds alone.
        shared: A bit mask of the devices that it shares.
    """

    turn: int
    held: int
    shared: int

    @property
    def settled(self) -> bool:
        return self.turn > 0 and self.turn % 2 == 0


class Board:
    """Shared memory in which the workers write their claims."""

    def __init__(self, workers: int) -> None:
        self.turn = RawArray("q", workers)
        self.held = RawArray("q", workers)
        self.shared = RawArray("q", workers)
        self.reserved = RawArray("q", workers)
        self.refused = RawArray("q", workers)

    def claims(self) -> list[Claim]:
        return [Claim(*words) for words in zip(self.turn, self.held, self.shared, strict=True)]


class Worker:
    """A process that reserves and releases at random until it is killed."""

    def __init__(self, board: Board, number: int, dice: random.Random) -> None:
        self.board, self.number, self.dice = board, number, dice
        self.referee = os.getppid()

    def run(self) -> None:
        warnings.simplefilter("ignore")  # a sharer is warned about the other sharers
        while os.getppid() == self.referee:
            self.board.turn[self.number] += 1
            start = time.monotonic()
            self._act()
            took_s = time.monotonic() - start  # long on a busy machine
            held, shared = masks()
            self.board.held[self.number], self.board.shared[self.number] = held, shared
            self.board.turn[self.number] += 1
            time.sleep(self.dice.random() * max(HOLD_S, took_s))

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
        names = ",".join(map(str, self.dice.sample(range(len(UUIDS)), count))) if named else None
        wishes: dict[str, Any] = {"memory": "100MiB"} if self.dice.random() < 0.25 else {}
        wishes["wait"] = self.dice.choice([None, None, None, 0.02])
        try:
            held = reserve_gpu.reserve(names, count=None if named else count, **wishes)
            self.board.reserved[self.number] += held is not before
        except (
            reserve_gpu.NoFreeDeviceError,
            MutexHeldError,
        ):  # the latter if there are too many workers
            self.board.refused[self.number] += 1


@dataclass
class Referee:
    """Starts and kills workers, and compares their claims with the kernel's list of locks."""

    board: Board
    dice: random.Random
    pids: list[int] = field(default_factory=list)
    inodes: dict[str, str] = field(default_factory=dict)  # of each lock file, at the first check
    seen: set[tuple[int, int]] = field(default_factory=set)  # PID and turn of the confirmed claims
    shared: int = 0  # the number of confirmed claims of sharers
    kills: int = 0
    looks: int = 0
    violations: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Race for this time, and longer until enough has happened."""
        self.pids = [self._start(number) for number in range(len(self.board.turn))]
        end = time.monotonic() + seconds
        while time.monotonic() < end + (0 if self._is_enough() else PATIENCE_S):
            self.look()
            self._mourn()
            if self.dice.random() < KILLS_PER_LOOK:
                self._replace(self.dice.randrange(len(self.pids)))
            time.sleep(PAUSE_S)
        for pid in self.pids:
            self._kill(pid)
        if locks := kernel_locks():
            self.violations.append(f"all workers are dead, but the kernel lists {locks}")

    def _is_enough(self) -> bool:
        return self.shared > 0 and min(sum(self.board.reserved), self.looks) > ENOUGH

    def look(self) -> None:
        """Record the differences that last for several checks while the workers pause."""
        self.looks += 1
        wrong = self._wrong()
        for _ in range(LOOKS - 1):
            wrong = wrong and wrong & self._wrong()
        self.violations += sorted(wrong)
        self._compare_inodes()

    def _wrong(self) -> set[str]:
        before, locks, after = self.board.claims(), kernel_locks(), self.board.claims()
        strangers = set(locks) - set(self.pids)
        wrong = {f"{pid} holds a device, but is not a living worker" for pid in strangers}
        settled: list[tuple[int, Claim]] = []
        for pid, claim, later in zip(self.pids, before, after, strict=True):
            if claim != later or not claim.settled:
                continue
            settled.append((pid, claim))
            listed = locks.get(pid, Listed())
            if listed == (claim.held, claim.shared):
                self.seen |= {(pid, claim.turn)} if any(listed) else set()
                self.shared += bool(claim.shared)
            else:
                wrong.add(
                    f"{pid} claims {claim.held:08b} {claim.shared:08b}, the kernel lists {listed}"
                )
        for (pid, one), (other, two) in combinations(settled, 2):
            if one.held & (two.held | two.shared) or one.shared & two.held:
                wrong.add(f"{pid} and {other} hold the same device: {one}, {two}")
        return wrong

    def _compare_inodes(self) -> None:
        for inode, name in lock_files().items():
            if self.inodes.setdefault(name, inode) != inode:
                self.violations.append(f"the lock file {name} was replaced")

    def _mourn(self) -> None:
        """Record a violation if a worker has ended by itself, and replace it."""
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
        if left := kernel_locks().get(pid):
            self.violations.append(f"{pid} is dead and still holds {left}")

    def _start(self, number: int) -> int:
        self.board.turn[number] = self.board.held[number] = self.board.shared[number] = 0
        dice = random.Random(self.dice.random())  # noqa: S311 - nothing secret
        return fork(lambda: Worker(self.board, number, dice).run())


class Listed(NamedTuple):
    """Bit masks of the devices that a process holds by the kernel's list, as in a Claim."""

    held: int = 0
    shared: int = 0

    def __str__(self) -> str:
        return f"{self.held:08b} {self.shared:08b}"


def masks() -> Listed:
    """Return the devices that this process claims to hold."""
    held = session().devices
    is_shared = any(
        is_sharers(lock.name) for lock in session().holding.locks_in(default_path()).values()
    )
    mask = sum(1 << device.index for device in held)
    return Listed(0, mask) if is_shared else Listed(mask, 0)


def lock_files() -> dict[str, str]:
    """Return the names of the devices' lock files, by their IDs in /proc/locks."""
    files = {}
    for path in Path(default_path()).glob("GPU-*.lock"):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        files[f"{device}:{status.st_ino}"] = path.name
    return files


def locked_files() -> Iterator[tuple[int, str]]:
    """Yield the PID and name of each locked device file in the kernel's list."""
    files = lock_files()
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        _, kind, _, mode, pid, inode, *_ = line.replace("-> ", "waits:").split()
        if (kind, mode) == ("FLOCK", "WRITE") and inode in files:
            yield int(pid), files[inode]


def kernel_locks() -> dict[int, Listed]:
    """Return the devices of each process, by the kernel's list."""
    listed: dict[int, Listed] = {}
    for pid, name in locked_files():
        uuid, *share = name.removesuffix(".lock").split(".share")
        held, shared = listed.get(pid, Listed())
        bit = 1 << UUIDS.index(uuid)
        listed[pid] = Listed(held, shared | bit) if share else Listed(held | bit, shared)
    return listed


def fork(function: Callable[[], None]) -> int:
    """Fork a process that runs a function, and return its PID."""
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
    """Import modules that are imported on first use, once for all workers."""
    import pynvml  # noqa: F401

    reserve_gpu.current()


def contest(contenders: int) -> dict[str, object]:
    """Let processes reserve at the same moment; return their answers, and the kernel's list."""
    gate, start = os.pipe()
    answers, answer = os.pipe()
    pids = [fork(lambda: contend((gate, start), answer)) for _ in range(contenders)]
    for descriptor in (gate, start, answer):  # the gate opens when no process can write to it
        os.close(descriptor)
    with os.fdopen(answers) as lines:
        results = [next(lines).split() for _ in pids]
        locks = kernel_locks()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    kernel = [[str(p), str(d)] for p in locks for d in range(len(UUIDS)) if locks[p].held >> d & 1]
    return {"answers": results, "kernel": kernel}


def contend(gate: tuple[int, int], answer: int) -> NoReturn:
    """Reserve when the gate opens, write the result, and hold the device until killed."""
    os.close(gate[1])
    os.read(gate[0], 1)
    try:
        result = reserve_gpu.reserve().environ["CUDA_VISIBLE_DEVICES"]
    except Exception as error:
        result = type(error).__name__
    os.write(answer, f"{os.getpid()} {result}\n".encode())
    while True:
        signal.pause()


def print_contests(contenders: int, rounds: int) -> None:
    """Print a line of JSON for each round."""
    load()
    for _ in range(rounds):
        print(json.dumps(contest(contenders)), flush=True)


def race(processes: int, seconds: float, seed: int) -> int:
    """Run the race on this process's machine, and return the exit code."""
    load()
    board = Board(processes)
    referee = Referee(board, random.Random(seed))  # noqa: S311 - nothing secret
    referee.run(seconds)
    print(
        f"{sum(board.reserved)} reservations, {sum(board.refused)} refusals, {referee.kills} kills "
        f"by {processes} processes on {len(UUIDS)} devices in {seconds:g} s (seed {seed});\n"
        f"{referee.looks} checks of the kernel's list confirmed {len(referee.seen)} "
        f"reservations, {len(referee.violations)} violations;\n{referee.shared} of them shared"
    )
    for violation in referee.violations[:20]:
        print(f"VIOLATION: {violation}")
    return bool(referee.violations)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.race", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def inside(module: str, scenario: str, *options: str) -> int:
    """Run a race in a process on a machine of this scenario, and return its exit code."""
    memory = (
        "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    )  # like the default lock directory
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        machine = Machine(Path(folder))
        machine.write(scenario)
        environ = machine.environ()
        del environ["STAND_IN_LOG"]  # the log would grow by 1 MB per second
        return subprocess.run(
            [sys.executable, "-m", module, "--inside", *options],
            env=environ, cwd=ROOT, check=False,
        ).returncode  # fmt: skip


def main() -> int:
    """Run the race on a machine with eight GPUs, in a process with its driver."""
    told = arguments()
    if told.inside:
        return race(told.processes, told.seconds, told.seed)
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    options = (f"--processes={told.processes}", f"--seconds={told.seconds}", f"--seed={seed}")
    return inside("tests.support.race", SCENARIO, *options)


if __name__ == "__main__":
    sys.exit(main())
