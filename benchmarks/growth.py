"""Benchmarks of how costs grow with the number of GPUs, waiters, files, parts, and holders."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.stage import Stage, crowd, in_turn, machine, stage
from benchmarks.table import Growth, Row, milliseconds
from benchmarks.waiting import anonymous_kib
from reserve_gpu.locks.holders import MOST_OF_ONE_USER
from tests.support.here import default_uuid
from tests.support.machine import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

GPUS, MANY_GPUS = 8, 64
UUIDS = [default_uuid("GPU", index) for index in range(GPUS)]
LIMIT_ADDED_MS = 200.0  # maximum time that files and waiters of other users can add
SIZES = (1, 8, 64)
# The measured process becomes the 64th holder. One user can't have more parts of a GPU.
HOLDERS, FEW_HOLDERS = (1, 8, 63), (1, 2, 8)
WAITERS, FEW_WAITERS = (0, 100, 1_000), (0, 10, 64)
FILES, FEW_FILES = (0, 1_000, 100_000), (0, 100, 1_000)
FILE_NAMES = {
    "files with unknown names": "cache-{uid}-{number}",
    "files named like parts of a GPU": f"{UUIDS[0]}.share-{{uid}}-{{number}}.lock",
}
REFUSAL = f"refusal, not all {GPUS} GPUs are free"
FIRST_UID = 60_000  # of the simulated users
OTHER_UID = 65_534

RESERVE = """
import os, time, reserve_gpu
start = time.process_time()
try:
    reserve_gpu.reserve({arguments})
except reserve_gpu.NoFreeDeviceError:
    pass
print((time.process_time() - start) * 1e3, os.environ["CUDA_VISIBLE_DEVICES"])
"""
STATUS = ("-m", "reserve_gpu", "status")

# Starts processes that hold locks, one after the other. They end when this process's standard input
# is closed.
FORK = """
import os, signal, sys
import reserve_gpu
from reserve_gpu.locks.directory import OWN_MODE, LockDirectory
from reserve_gpu.locks.lock import describe_this_process
from reserve_gpu.model.holders import Record
from reserve_gpu.model.requests import TicketAhead, WaitRequest

def hold(number):
{code}

pids = []
try:
    for number in range({count}):
        ready, end = os.pipe()
        pid = os.fork()
        if not pid:
            pids.clear()  # only the parent ends the processes
            hold(number)
            os.write(end, b"1")
            signal.pause()
        pids.append(pid)
        os.close(end)
        if not os.read(ready, 1):
            sys.exit("a process could not get its lock")
        os.close(ready)
    print("ready", flush=True)
    sys.stdin.read()
finally:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
"""
HOLD = "    reserve_gpu.reserve({arguments})"
# Each real waiter first reads the records of all waiters ahead of it, which would take too long for
# 1,000 waiters. This code writes the same records directly.
WAIT = f"""
    def name(place):
        user, other = divmod(place, {MOST_OF_ONE_USER})
        return "queue-%d-%d.lock" % ({FIRST_UID} + user, other)

    directory = LockDirectory().__enter__()
    os.setuid({FIRST_UID} + number // {MOST_OF_ONE_USER})
    lock = directory.acquire(name(number), OWN_MODE)
    ahead = "\\n".join(str(TicketAhead(name(place), 10**12 + place)) for place in range(number))
    lock.write(Record(
        describe_this_process(),
        asks=WaitRequest("one GPU", wants=frozenset({{wants!r}}), tickets_ahead=ahead),
    ))
    lock.stamp(10**12 + number)
"""

CELLS = 50  # number of cells to run for each measurement
TIMED_MAGIC = """
import time
start = time.process_time()
get_ipython().run_line_magic("reserve_gpu", "")
print("measured", (time.process_time() - start) * 1e3)
"""
CPU_TIME = "import time; print(time.process_time() * 1e3)"
LOAD_LIMIT_KIB, HOLD_LIMIT_KIB = 1024, 8 * 1024


class Times(NamedTuple):
    """The times of one process, in milliseconds.

    Attributes:
        whole_ms: The run time of the process.
        cpu_ms: The CPU time of the measured call. Of a command, that of the whole process.
    """

    whole_ms: float
    cpu_ms: float


def growth(*, quick: bool) -> Iterator[Row | Growth]:
    """Measure how costs grow, and what a reservation costs in a running kernel."""
    yield from _kernel_time(quick=quick)
    yield from _kernel_memory(quick=quick)
    yield from _gpus(quick=quick)
    yield from _waiters(quick=quick)
    yield from _files(quick=quick)
    yield from _parts(quick=quick)
    yield from _holders(quick=quick)


def _gpus(*, quick: bool) -> Iterator[Growth]:
    with crowd(max(SIZES)) as pids, ExitStack() as stack:
        runs = {}
        for size in SIZES:
            idle = stack.enter_context(stage(machine(size)))
            busy = stack.enter_context(stage(machine(size, size, pids[:size])))
            runs["first reservation", size] = partial(_reserve, idle, "", "0")
            runs["refusal, none is free", size] = partial(_reserve, busy, "", "")
        times = in_turn(runs, 1 if quick else 11)
    yield from _rows(times, "GPUs")


def _waiters(*, quick: bool) -> Iterator[Growth]:
    """Measure requests while processes of several users are waiting.

    The first GPU is busy, no waiter wants the second one, and all waiters want any of the others.
    """
    if os.geteuid():
        note = "not measured: only root can start processes of several users"
        yield Growth("reservation", "waiters", note=note)
        return
    times: dict[tuple[str, int], list[Times]] = {}
    for size in FEW_WAITERS if quick else WAITERS:
        with stage(machine(GPUS, 1)) as bench, forked(bench, size, WAIT.format(wants=UUIDS[2:])):
            runs = {
                ("reservation", size): partial(_reserve, bench, "", "1"),
                (REFUSAL, size): partial(_reserve, bench, f"count={GPUS}", ""),
                ("status", size): partial(_status, bench),
            }
            times |= in_turn(runs, 1 if quick else 5)
    yield from _rows(times, "waiters", LIMIT_ADDED_MS)


def _files(*, quick: bool) -> Iterator[Growth]:
    """Measure a lock directory with files of another user, if this user can create such files."""
    for items, pattern in FILE_NAMES.items():
        with ExitStack() as stack:
            runs = {}
            for size in FEW_FILES if quick else FILES:
                bench = stack.enter_context(stage(machine(GPUS, 1)))
                _create_files(bench.locks, pattern, size)
                runs["first reservation", size] = partial(_reserve, bench, "", "1")
                runs[REFUSAL, size] = partial(_reserve, bench, f"count={GPUS}", "")
                runs["status", size] = partial(_status, bench)
            times = in_turn(runs, 1 if quick else 3)
        yield from _rows(times, items, LIMIT_ADDED_MS)


def _parts(*, quick: bool) -> Iterator[Growth]:
    times: dict[tuple[str, int], list[Times]] = {}
    for size in FEW_HOLDERS if quick else HOLDERS:
        with stage(machine(1)) as bench:
            runs = {
                ("reservation of one more part", size): partial(
                    _reserve, bench, "memory='1GB'", "0"
                ),
                ("refusal, the whole GPU is not free", size): partial(_reserve, bench, "", ""),
                ("status", size): partial(_status, bench),
            }
            with forked(bench, size, HOLD.format(arguments="memory='1GB'")):
                times |= in_turn(runs, 1 if quick else 5)
    yield from _rows(times, "parts of one GPU")


def _holders(*, quick: bool) -> Iterator[Growth]:
    times: dict[tuple[str, int], list[Times]] = {}
    for size in FEW_HOLDERS if quick else HOLDERS:
        with stage(machine(MANY_GPUS)) as bench:
            runs = {
                ("reservation of one more GPU", size): partial(_reserve, bench, "", str(size)),
                (f"refusal, not all {MANY_GPUS} GPUs are free", size): partial(
                    _reserve, bench, f"count={MANY_GPUS}", ""
                ),
                ("status", size): partial(_status, bench),
            }
            with forked(bench, size, HOLD.format(arguments="str(number)")):
                times |= in_turn(runs, 1 if quick else 5)
    yield from _rows(times, f"of {MANY_GPUS} GPUs reserved by one user")


def _rows(
    times: Mapping[tuple[str, int], Sequence[Times]], items: str, limit_ms: float | None = None
) -> Iterator[Growth]:
    """Yield a row for each task.

    Args:
        times: The times, by task and number of items.
        items: The kind of items.
        limit_ms: The maximum time in milliseconds that the items can add, or None.
    """
    for task in dict.fromkeys(task for task, _ in times):
        results = {size: results for (other, size), results in times.items() if other == task}
        whole_ms, cpu_ms = (
            [statistics.median(each[field] for each in result) for result in results.values()]
            for field in range(2)
        )
        yield Growth(task, items, tuple(results), whole_ms, cpu_ms, limit_ms)


def _reserve(bench: Stage, arguments: str, expected: str) -> Times:
    """Measure a reservation, and check its result.

    Args:
        bench: The machine.
        arguments: The arguments of `reserve_gpu.reserve`.
        expected: The value of CUDA_VISIBLE_DEVICES, which is empty after a refusal.

    Raises:
        RuntimeError: The result is wrong.
    """
    whole_ms, output = bench.timed("-c", RESERVE.format(arguments=arguments))
    cpu_ms, _, visible = output.partition(" ")
    if visible != expected:
        raise RuntimeError(f"reserve({arguments}) chose {visible!r}, not {expected!r}")
    return Times(whole_ms, float(cpu_ms))


def _status(bench: Stage) -> Times:
    before_s = _children_cpu_s()
    whole_ms, _ = bench.timed(*STATUS)
    return Times(whole_ms, (_children_cpu_s() - before_s) * 1e3)


def _children_cpu_s() -> float:
    """Return the CPU time of all ended child processes, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def forked(bench: Stage, count: int, code: str) -> Iterator[None]:
    """Start processes that run code once and then hold their locks until the block ends.

    Forked processes start quickly, because they have already imported the package.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", FORK.format(code=code, count=count)],
        env=bench.environ(), cwd=bench.folder, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:  # closes standard input, and waits for the end of the process
        if not process.stdout or process.stdout.readline() != "ready\n":
            raise RuntimeError("the processes could not be started")
        yield


def _create_files(folder: Path, pattern: str, count: int) -> None:
    """Create files that belong to another user, if this process is allowed to do that."""
    folder.mkdir()
    folder.chmod(0o1777)
    uid = os.geteuid()
    for number in range(count):
        name = pattern.format(uid=uid, number=number)
        descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        if not uid:
            os.fchown(descriptor, OTHER_UID, -1)
        os.close(descriptor)


def _kernel_time(*, quick: bool) -> Iterator[Row]:
    """Measure the CPU time of `%reserve_gpu`, and of cells that don't use it."""
    first_ms, second_ms = [], []
    with stage(machine(GPUS)) as bench, ExitStack() as stack:
        plain = Kernel(bench.environ(), bench.folder)
        stack.callback(plain.close)
        for _ in range(1 if quick else 3):
            with bench.kernel() as kernel:
                first_ms.append(_timed_magic(kernel))
                second_ms.append(_timed_magic(kernel))
        holder = stack.enter_context(bench.kernel())
        holder.run("%reserve_gpu")
        runs = {kernel: partial(_cell_ms, kernel) for kernel in (holder, plain)}
        cells_ms = in_turn(runs, 1 if quick else 5)
    for label, times_ms in (("first", first_ms), ("second", second_ms)):
        yield Row(
            f"CPU time of the {label} `%reserve_gpu` in a kernel",
            milliseconds(statistics.median(times_ms)),
        )
    holding, without = (statistics.median(cells_ms[kernel]) for kernel in (holder, plain))
    measured = f"{holding:.2f} ms vs. {without:.2f} ms"
    yield Row("CPU time of the cell `1+1` in a kernel with a GPU, vs. without extension", measured)


def _timed_magic(kernel: Kernel) -> float:
    return float(kernel.run(TIMED_MAGIC).stdout.rpartition("measured ")[2])


def _cell_ms(kernel: Kernel) -> float:
    """Return the CPU time of a kernel for one cell, in milliseconds."""
    before_ms = float(kernel.run(CPU_TIME).stdout)
    for _ in range(CELLS):
        kernel.run("1+1")
    return (float(kernel.run(CPU_TIME).stdout) - before_ms) / CELLS


def _kernel_memory(*, quick: bool) -> Iterator[Row]:
    """Measure how much memory the extension and a reservation add to a kernel."""
    loaded_kib, holding_kib = [], []
    with stage(machine(GPUS)) as bench:
        for _ in range(1 if quick else 3):
            kernel = Kernel(bench.environ(), bench.folder)
            try:
                pid = kernel.pid
                before_kib = anonymous_kib(pid)
                kernel.load()
                loaded_kib.append(anonymous_kib(pid) - before_kib)
                kernel.run("%reserve_gpu")
                holding_kib.append(anonymous_kib(pid) - before_kib)
            finally:
                kernel.close()
    for event, sizes_kib, limit_kib in (
        ("`%load_ext`", loaded_kib, LOAD_LIMIT_KIB),
        ("`%load_ext` and a reservation", holding_kib, HOLD_LIMIT_KIB),
    ):
        growth_kib = statistics.median(sizes_kib)
        yield Row(
            f"memory growth of a kernel, {event}",
            f"{growth_kib / 1024:.1f} MiB",
            f"at most {limit_kib / 1024:g} MiB",
            growth_kib <= limit_kib,
        )
