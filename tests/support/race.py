"""Races of many processes for eight GPUs, checked from outside: by the kernel's own list of locks.

    python -m tests.support.race --seconds 60

Workers reserve, share, wait, release and get killed with -9 at random. The referee reserves nothing
itself. It looks at /proc/locks, where a device's lock files show by their inodes, and compares:
does what each worker believes to hold agree, has no device two holders, or a sharer beside a
holder, is nothing held by the dead? Ends with 1 if not.
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
HOLD_S = 0.01  # a worker leaves things as they are for up to so long
PAUSE_S = 0.002  # between two looks of the referee
PATIENCE_S = 60.0  # for a first claim of a sharer to be seen
KILLS_PER_LOOK = 0.05
LOOKS = 3  # the list of locks is no snapshot where it fills several pages: only what lasts counts


@dataclass(frozen=True)
class Claim:
    """What a worker says of itself.

    turn: how often it began or ended a change, so even while it changes nothing.
    held, shared: the devices that it believes to hold for itself, or with others, a bit for each.
    """

    turn: int
    held: int
    shared: int

    @property
    def settled(self) -> bool:
        return self.turn > 0 and self.turn % 2 == 0


class Board:
    """Where the workers write and the referee reads: memory that all of them share."""

    def __init__(self, workers: int) -> None:
        self.turn = RawArray("q", workers)
        self.held = RawArray("q", workers)
        self.shared = RawArray("q", workers)
        self.reserved = RawArray("q", workers)
        self.refused = RawArray("q", workers)

    def claims(self) -> list[Claim]:
        return [Claim(*words) for words in zip(self.turn, self.held, self.shared, strict=True)]


class Worker:
    """Reserves and releases at random, for ever."""

    def __init__(self, board: Board, number: int, dice: random.Random) -> None:
        self.board, self.number, self.dice = board, number, dice
        self.referee = os.getppid()

    def run(self) -> None:
        warnings.simplefilter("ignore")  # who shares is told with whom
        while os.getppid() == self.referee:
            self.board.turn[self.number] += 1
            self._act()
            held, shared = masks()
            self.board.held[self.number], self.board.shared[self.number] = held, shared
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
        names = ",".join(map(str, self.dice.sample(range(len(UUIDS)), count))) if named else None
        wishes: dict[str, Any] = {"memory": "100MiB"} if self.dice.random() < 0.25 else {}
        wishes["wait"] = self.dice.choice([None, None, None, 0.02])
        try:
            held = reserve_gpu.reserve(names, count=None if named else count, **wishes)
            self.board.reserved[self.number] += held is not before
        except (reserve_gpu.NoFreeDeviceError, MutexHeldError):  # where there are too many of us
            self.board.refused[self.number] += 1


@dataclass
class Referee:
    """Starts the workers, kills some, and compares what they believe with what the kernel says."""

    board: Board
    dice: random.Random
    pids: list[int] = field(default_factory=list)
    inodes: dict[str, str] = field(default_factory=dict)  # of each device, when it was first seen
    seen: set[tuple[int, int]] = field(default_factory=set)  # pid and turn of claims that agreed
    shared: int = 0  # how many of the claims that agreed were of sharers
    kills: int = 0
    looks: int = 0
    violations: list[str] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Race for that time; for longer where a busy machine has let nobody share as yet."""
        self.pids = [self._start(number) for number in range(len(self.board.turn))]
        end = time.monotonic() + seconds
        while time.monotonic() < end + (0 if self.shared else PATIENCE_S):
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
        strangers = set(locks) - set(self.pids)
        wrong = {f"{pid} is no living worker, but holds a device" for pid in strangers}
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
                wrong.add(f"{pid} believes {claim.held:08b} {claim.shared:08b}, listed is {listed}")
        for (pid, one), (other, two) in combinations(settled, 2):
            if one.held & (two.held | two.shared) or one.shared & two.held:
                wrong.add(f"{pid} and {other} both have a device: {one}, {two}")
        return wrong

    def _compare_inodes(self) -> None:
        for inode, name in lock_files().items():
            if self.inodes.setdefault(name, inode) != inode:
                self.violations.append(f"the lock file {name} is another one than before")

    def _mourn(self) -> None:
        """Check that nobody but the referee has ended a worker."""
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
    """The devices that a process holds by the kernel's list, a bit for each; as in a Claim."""

    held: int = 0
    shared: int = 0

    def __str__(self) -> str:
        return f"{self.held:08b} {self.shared:08b}"


def masks() -> Listed:
    """Return the devices that this process believes to hold."""
    held = session().devices
    is_shared = any(
        is_sharers(lock.name) for lock in session().holding.locks_in(default_path()).values()
    )
    mask = sum(1 << device.index for device in held)
    return Listed(0, mask) if is_shared else Listed(mask, 0)


def lock_files() -> dict[str, str]:
    """Return the lock files of devices, by what /proc/locks calls them."""
    files = {}
    for path in Path(default_path()).glob("GPU-*.lock"):
        status = path.stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        files[f"{device}:{status.st_ino}"] = path.name
    return files


def locked_files() -> Iterator[tuple[int, str]]:
    """Return the locked device files and their pids by the kernel's list, which may miss one."""
    files = lock_files()
    for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
        _, kind, _, mode, pid, inode, *_ = line.replace("-> ", "waits:").split()
        if (kind, mode) == ("FLOCK", "WRITE") and inode in files:
            yield int(pid), files[inode]


def kernel_locks() -> dict[int, Listed]:
    """Return what each process holds, by the kernel's list."""
    listed: dict[int, Listed] = {}
    for pid, name in locked_files():
        uuid, *share = name.removesuffix(".lock").split(".share")
        held, shared = listed.get(pid, Listed())
        bit = 1 << UUIDS.index(uuid)
        listed[pid] = Listed(held, shared | bit) if share else Listed(held | bit, shared)
    return listed


def fork(function: Callable[[], None]) -> int:
    """Return a process that runs the function; what it raises goes to standard error."""
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
    """Let so many reserve at the same moment; return what came of it, and the kernel's word."""
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
    kernel = [[str(p), str(d)] for p in locks for d in range(len(UUIDS)) if locks[p].held >> d & 1]
    return {"said": said, "kernel": kernel}


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
    """Return a line of JSON for each round."""
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
        f"agree, {len(referee.violations)} violations;\n{referee.shared} shared ones among them"
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
    """Run a race on a machine of that scenario, in a process that has its driver; its exit code."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # as locks are by default
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        machine = Machine(Path(folder))
        machine.write(scenario)
        environ = machine.environ()
        del environ["STAND_IN_LOG"]  # it would grow by a megabyte a second
        return subprocess.run(
            [sys.executable, "-m", module, "--inside", *options],
            env=environ, cwd=ROOT, check=False,
        ).returncode  # fmt: skip


def main() -> int:
    """Make a machine of eight GPUs and run the race on it, in a process that has its driver."""
    told = arguments()
    if told.inside:
        return race(told.processes, told.seconds, told.seed)
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    options = (f"--processes={told.processes}", f"--seconds={told.seconds}", f"--seed={seed}")
    return inside("tests.support.race", SCENARIO, *options)


if __name__ == "__main__":
    sys.exit(main())
