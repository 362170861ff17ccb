"""Benchmarks of waiting: handover times, and the CPU time and memory that waiters use."""

from __future__ import annotations

import os
import pty
import random
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.stage import Stage, crowd, machine, stage
from benchmarks.table import Row, percentile
from tests.support.machine import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A prefix that runs a command in a new PID namespace, as it would run in a container. In that
# namespace, /proc/locks does not list the locks of other namespaces.
CONTAINER = (
    "unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc",
)  # fmt: skip
PLACES: dict[str, Sequence[str]] = {"on the host": (), "in a container": CONTAINER}
NO_CONTAINERS = "not measured: this user can't create a PID namespace"

HANDOVER_LIMITS_S = {"on the host": 0.3, "in a container": 1.2}
LANES = 2  # number of holder-waiter pairs that run in parallel
SAMPLES, FEW_SAMPLES = 40, 5  # number of handovers per pair, normally and with --quick
WAIT = "import time; reserve_gpu.reserve(wait=True); time.monotonic()"
RELEASE = "import time; start = time.monotonic(); reserve_gpu.release(); start"
IN_QUEUE, FEW_IN_QUEUE, HOLD_S, QUEUE_LIMIT_S = 16, 4, 0.3, 0.2
HOLD = f"""
with reserve_gpu.reserve(wait=True):
    begin = time.monotonic()
    time.sleep({HOLD_S})
    end = time.monotonic()
(begin, end)
"""

MAGIC, OTHER_WAITERS = "%reserve_gpu", 10
WATCH_S, SHORT_WATCH_S, SETTLE_S = 60, 5, 5
CPU_LIMIT_PERCENT = 1
IDLE_LIMIT_PERCENT = 0.1
TOP_WATCH_S, TOP_LIMIT_PERCENT = 20, 2

GPUS, BUSY = 8, 4  # the GPUs that are not busy are reserved
# A waiter checks the GPUs at most once per second, so 20,000 checks take at least 5.5 hours.
CHECKS, FEW_CHECKS = 20_000, 1_000
# The C library extends its heap in steps of 132 KiB, and the limit allows only one such step. A
# leak of one object per check would exceed the limit.
GROWTH_LIMIT_KIB = 256
# Code that waits without pausing between checks, and shows %reserve_gpu's display. It prints its
# memory use at two of the checks.
UNPAUSED_WAIT = """
import sys
from benchmarks.waiting import anonymous_kib
from reserve_gpu import reserve
from reserve_gpu.render.progress import Live
from reserve_gpu.allocation import policy

policy.next_check_s = lambda rows, **conditions: 0.0
anonymous_kib()  # the first reading allocates memory itself
checks, sizes_kib = 0, []

def check(waiting):
    global checks
    checks += 1
    live.show(waiting)
    if checks in ({first}, {last}):
        sizes_kib.append(anonymous_kib())
    if checks == {last}:
        raise InterruptedError

try:
    with Live({stream}) as live:
        reserve(wait=True, progress=check)
except InterruptedError:
    print(*sizes_kib)
"""


def handover(*, quick: bool) -> Iterator[Row]:
    """Measure how long a waiter takes to get a GPU.

    The clock starts when the GPU's holder releases the GPU or is killed with kill -9.
    """
    samples = FEW_SAMPLES if quick else SAMPLES
    ends = {"a release": _release, "kill -9": _kill}
    for place, prefix in PLACES.items():
        limit_s = HANDOVER_LIMITS_S[place]
        for name, end in ends.items():
            label, bar = f"handover after {name}, p95, {place}", f"at most {limit_s} s"
            if not _is_possible(prefix):
                yield Row(label, NO_CONTAINERS, bar)
                continue
            p95_s = percentile(_handovers(prefix, end, samples), 95)
            yield Row(label, f"{p95_s:.2f} s", bar, p95_s <= limit_s)


def queue(*, quick: bool) -> Iterator[Row]:
    """Measure the handover times of one GPU among many waiters that each hold it briefly."""
    count = FEW_IN_QUEUE if quick else IN_QUEUE
    with stage(machine(1)) as bench, ExitStack() as stack:
        children = [_child(bench, ()) for _ in range(count)]
        for child in children:
            stack.callback(child.kill)
            child.run("import time")
        for child in children:
            child.send(HOLD)
        spans = sorted(child.answer().value for child in children)
    gaps_s = [begin - end for (_, end), (begin, _) in pairwise(spans)]
    median_s = statistics.median(gaps_s)
    label = f"handover among {count} waiters that hold the GPU for {HOLD_S} s, median"
    yield Row(label, f"{median_s:.3f} s", f"at most {QUEUE_LIMIT_S} s", median_s <= QUEUE_LIMIT_S)


def restart(*, quick: bool) -> Iterator[Row]:
    """Count how often a restarted kernel gets its GPU back while other processes are waiting."""
    times = 2 if quick else 20
    with stage(machine(1)) as bench, ExitStack() as stack:
        kernel = stack.enter_context(bench.kernel())
        kernel.run(MAGIC)
        for _ in range(OTHER_WAITERS):
            child = _child(bench, ())
            stack.callback(child.kill)
            child.send(WAIT)
        kept = 0
        for _ in range(times):
            kernel.restart()
            kernel.load()
            kept += "CUDA_VISIBLE_DEVICES = '0'" in kernel.run(MAGIC).stdout
    label = f"a kernel restarts {times} times while {OTHER_WAITERS} processes are waiting"
    yield Row(label, f"gets its GPU back {kept} times", f"{times} times", kept == times)


def wait(*, quick: bool) -> Iterator[Row]:
    """Measure the CPU use of scripts and of a kernel while they are waiting for a GPU."""
    watch_s = SHORT_WATCH_S if quick else WATCH_S
    with _full_machine() as bench, bench.kernel() as kernel, ExitStack() as stack:
        kernel_pid = kernel.pid
        kernel.start("%reserve_gpu --wait")
        waiters = {"a waiting kernel": psutil.Process(kernel_pid)}
        for place, prefix in PLACES.items():
            if _is_possible(prefix):
                script = _child(bench, prefix)
                stack.callback(script.kill)
                script.send(WAIT)
                waiters[f"a waiting script {place}"] = _process(script)
        time.sleep(SETTLE_S)
        before_s = {name: _cpu_s(process) for name, process in waiters.items()}
        time.sleep(watch_s)
        for name, process in waiters.items():
            percent = 100 * (_cpu_s(process) - before_s[name]) / watch_s
            measured, bar = f"{percent:.2f} % of a core", f"at most {CPU_LIMIT_PERCENT} %"
            label = f"CPU use of {name} over {watch_s} s"
            yield Row(label, measured, bar, percent <= CPU_LIMIT_PERCENT)


def idle_limit(*, quick: bool) -> Iterator[Row]:
    """Measure the CPU use that `--idle` adds to an idle kernel."""
    watch_s = SHORT_WATCH_S if quick else WATCH_S
    with stage(machine(2)) as bench, bench.kernel() as plain, bench.kernel() as limited:
        plain.run("%reserve_gpu")
        limited.run("%reserve_gpu --idle 1h")
        processes = [psutil.Process(kernel.pid) for kernel in (limited, plain)]
        time.sleep(SETTLE_S)
        before_s = [_cpu_s(process) for process in processes]
        time.sleep(watch_s)
        used = [_cpu_s(p) - s for p, s in zip(processes, before_s, strict=True)]
    ours, other = (100 * seconds / watch_s for seconds in used)
    measured = f"{ours:.2f} % of a core vs. {other:.2f} %"
    bar = f"at most {IDLE_LIMIT_PERCENT} % more"
    met = ours - other <= IDLE_LIMIT_PERCENT
    label = f"CPU use of an idle kernel over {watch_s} s, with --idle 1h vs. without"
    yield Row(label, measured, bar, met)


def top(*, quick: bool) -> Iterator[Row]:
    """Measure the CPU use of a running `reserve-gpu top`."""
    watch_s = SHORT_WATCH_S if quick else TOP_WATCH_S
    with crowd(GPUS) as pids, stage(machine(GPUS, BUSY, pids)) as bench:
        terminal, end = pty.openpty()
        environ = bench.on_driver({**bench.environ(), "TERM": "xterm", "COLUMNS": "120"})
        command = [sys.executable, "-m", "reserve_gpu", "top"]
        top_process = subprocess.Popen(
            command, env=environ, stdin=end, stdout=end, cwd=bench.folder
        )
        reader = threading.Thread(target=_read_all, args=(terminal,), daemon=True)
        reader.start()
        os.close(end)
        time.sleep(SETTLE_S)
        process = psutil.Process(top_process.pid)
        before_s = _cpu_s(process)
        time.sleep(watch_s)
        percent = 100 * (_cpu_s(process) - before_s) / watch_s
        top_process.terminate()
        top_process.wait()
    label = f"CPU use of reserve-gpu top over {watch_s} s, {GPUS} GPUs, {GPUS} processes"
    measured, bar = f"{percent:.2f} % of a core", f"at most {TOP_LIMIT_PERCENT} %"
    yield Row(label, measured, bar, percent <= TOP_LIMIT_PERCENT)


def _read_all(terminal: int) -> None:
    with suppress(OSError):  # the other end of the terminal was closed
        while os.read(terminal, 1 << 16):
            pass


def memory(*, quick: bool) -> Iterator[Row]:
    """Measure memory growth in a script and a kernel that wait for a long time.

    Only the growth in the second half of the wait counts.
    """
    last = FEW_CHECKS if quick else CHECKS
    first = last // 2
    with _full_machine() as bench, bench.kernel() as kernel:
        outputs = {
            "script": bench.timed(
                "-c", UNPAUSED_WAIT.format(first=first, last=last, stream="sys.stderr")
            )[1],
            "kernel": kernel.run(UNPAUSED_WAIT.format(first=first, last=last, stream="")).stdout,
        }
    for name, output in outputs.items():
        before_kib, after_kib = map(int, output.split())
        growth_kib = after_kib - before_kib
        yield Row(
            f"memory growth of a waiting {name}, checks {first:,} to {last:,}",
            f"{growth_kib:+d} KiB",
            f"at most {GROWTH_LIMIT_KIB} KiB",
            growth_kib <= GROWTH_LIMIT_KIB,
        )


def anonymous_kib(pid: int | str = "self") -> int:
    """Return the size of a process's anonymous memory in KiB. Defaults to this process.

    Mapped files do not count, because other processes can share their pages, and because Linux can
    map more pages than the process has used.
    """
    sizes = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(size.split()[1]) for size in sizes if size.startswith("Anonymous:"))


@contextmanager
def _full_machine() -> Iterator[Stage]:
    """Create a machine without a free GPU: some GPUs are in use, and the others are reserved."""
    with stage(machine(GPUS, BUSY)) as bench, bench.child() as holder:
        holder.run(f"reserve_gpu.reserve(count={GPUS - BUSY})")
        yield bench


def _is_possible(prefix: Sequence[str]) -> bool:
    return not subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode


def _child(bench: Stage, prefix: Sequence[str]) -> Child:
    """Start a process on the host or in a container, without warnings about hidden locks."""
    return Child(bench.environ(PYTHONWARNINGS="ignore"), bench.folder, *prefix)


def _process(child: Child) -> psutil.Process:
    """Return a child's Python process. In a container, that process is a child of `unshare`."""
    process = psutil.Process(child.process.pid)
    return (process.children() or [process])[0]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _handovers(prefix: Sequence[str], end: Callable[[Child], float], samples: int) -> list[float]:
    """Measure handovers, and return the duration of each one in seconds."""
    with ThreadPoolExecutor(LANES) as threads:
        lanes = [threads.submit(_lane, prefix, end, samples, seed) for seed in range(LANES)]
        return [took_s for lane in lanes for took_s in lane.result()]


def _lane(
    prefix: Sequence[str], end: Callable[[Child], float], samples: int, seed: int
) -> list[float]:
    dice = random.Random(seed)  # noqa: S311 - the delays need not be secret
    times_s = []
    with stage(machine(1)) as bench:
        holder = _child(bench, prefix)
        holder.run("reserve_gpu.reserve()")
        for _ in range(samples):
            waiter = _child(bench, prefix)
            waiter.send(WAIT)
            time.sleep(dice.uniform(0.5, 1.5))  # a random moment between the waiter's checks
            start_s = end(holder)
            times_s.append(waiter.answer().value - start_s)
            holder.kill()
            holder = waiter
        holder.kill()
    return times_s


def _release(holder: Child) -> float:
    return float(holder.run(RELEASE).value)


def _kill(holder: Child) -> float:
    start_s = time.monotonic()
    holder.kill()
    return start_s
