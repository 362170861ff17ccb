"""Waiting: how soon a GPU that comes free is the waiter's, and what the wait costs meanwhile."""

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
from tests.machine import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# In a PID namespace of its own, as in a container, the kernel's list of locks shows none of others.
CONTAINER = (
    "unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc",
)  # fmt: skip
PLACES: dict[str, Sequence[str]] = {"here": (), "in a container": CONTAINER}
NO_CONTAINERS = "not measured: this user may not make containers"

HANDOVER_LIMITS_S = {"here": 0.3, "in a container": 1.2}
LANES = 2  # pairs of holder and waiter at the same time, of each kind
SAMPLES, FEW_SAMPLES = 40, 5  # of each lane
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

MAGIC, BESIDE = "%reserve_gpu", 10
WATCH_S, SHORT_WATCH_S, SETTLE_S = 60, 5, 5
CPU_LIMIT_PERCENT = 1
PROMISE_LIMIT_PERCENT = 0.1
TOP_WATCH_S, TOP_LIMIT_PERCENT = 20, 2

GPUS, BUSY = 8, 4  # the others are reserved
LOOKS, FEW_LOOKS = 20_000, 1_000  # a waiter looks at most once a second: that is 5.5 hours
# Two steps in which the C library takes memory; an object left behind by each look would be more.
GROWTH_LIMIT_KIB = 256
# A wait without its pauses, shown as %reserve_gpu shows it; says its memory at two of its looks.
HURRY = """
import sys
from benchmarks.waiting import own_kib
from reserve_gpu import reserve
from reserve_gpu.render.progress import Live
from reserve_gpu.allocation import policy

policy.next_look_s = lambda rows, **conditions: 0.0
own_kib()  # what the first reading needs itself
looks, sizes_kib = 0, []

def look(waiting):
    global looks
    looks += 1
    live.show(waiting)
    if looks in ({first}, {last}):
        sizes_kib.append(own_kib())
    if looks == {last}:
        raise InterruptedError

try:
    with Live({stream}) as live:
        reserve(wait=True, progress=look)
except InterruptedError:
    print(*sizes_kib)
"""


def handover(*, quick: bool) -> Iterator[Row]:
    """Measure from the holder's release, or its kill -9, to the waiter having the GPU."""
    samples = FEW_SAMPLES if quick else SAMPLES
    ends = {"a release": _release, "kill -9": _kill}
    for place, prefix in PLACES.items():
        limit_s = HANDOVER_LIMITS_S[place]
        for name, end in ends.items():
            what, bar = f"hand-over after {name}, p95, {place}", f"at most {limit_s} s"
            if not _is_possible(prefix):
                yield Row(what, NO_CONTAINERS, bar)
                continue
            p95_s = percentile(_handovers(prefix, end, samples), 95)
            yield Row(what, f"{p95_s:.2f} s", bar, p95_s <= limit_s)


def queue(*, quick: bool) -> Iterator[Row]:
    """Measure each hand-over where many wait for one GPU, and hold it for a moment each."""
    count = FEW_IN_QUEUE if quick else IN_QUEUE
    with stage(machine(1)) as on, ExitStack() as stack:
        children = [_child(on, ()) for _ in range(count)]
        for child in children:
            stack.callback(child.kill)
            child.run("import time")
        for child in children:
            child.send(HOLD)
        spans = sorted(child.answer().value for child in children)
    gaps_s = [begin - end for (_, end), (begin, _) in pairwise(spans)]
    median_s = statistics.median(gaps_s)
    what = f"hand-over among {count} that wait and hold it for {HOLD_S} s, median"
    yield Row(what, f"{median_s:.3f} s", f"at most {QUEUE_LIMIT_S} s", median_s <= QUEUE_LIMIT_S)


def restart(*, quick: bool) -> Iterator[Row]:
    """Count how often a kernel that restarts beside others who wait has its GPU again."""
    times = 2 if quick else 20
    with stage(machine(1)) as on, ExitStack() as stack:
        kernel = stack.enter_context(on.kernel())
        kernel.run(MAGIC)
        for _ in range(BESIDE):
            child = _child(on, ())
            stack.callback(child.kill)
            child.send(WAIT)
        kept = 0
        for _ in range(times):
            kernel.restart()
            kernel.load()
            kept += "CUDA_VISIBLE_DEVICES = '0'" in kernel.run(MAGIC).stdout
    what = f"a kernel restarts {times} times beside {BESIDE} who wait"
    yield Row(what, f"has its GPU again {kept} times", f"{times} times", kept == times)


def wait(*, quick: bool) -> Iterator[Row]:
    """Return what waiting costs scripts and a kernel."""
    watch_s = SHORT_WATCH_S if quick else WATCH_S
    with _full_machine() as on, on.kernel() as kernel, ExitStack() as stack:
        kernel_pid = kernel.pid
        kernel.start("%reserve_gpu --wait")
        waiters = {"a kernel that waits": psutil.Process(kernel_pid)}
        for place, prefix in PLACES.items():
            if _is_possible(prefix):
                script = _child(on, prefix)
                stack.callback(script.kill)
                script.send(WAIT)
                waiters[f"a script that waits {place}"] = _process(script)
        time.sleep(SETTLE_S)
        before_s = {name: _cpu_s(process) for name, process in waiters.items()}
        time.sleep(watch_s)
        for name, process in waiters.items():
            percent = 100 * (_cpu_s(process) - before_s[name]) / watch_s
            measured, bar = f"{percent:.2f} % of a core", f"at most {CPU_LIMIT_PERCENT} %"
            yield Row(f"{name}, {watch_s} s", measured, bar, percent <= CPU_LIMIT_PERCENT)


def terms(*, quick: bool) -> Iterator[Row]:
    """Measure what `--idle` costs a kernel that does nothing."""
    watch_s = SHORT_WATCH_S if quick else WATCH_S
    with stage(machine(2)) as on, on.kernel() as plain, on.kernel() as promising:
        plain.run("%reserve_gpu")
        promising.run("%reserve_gpu --idle 1h")
        processes = [psutil.Process(kernel.pid) for kernel in (promising, plain)]
        time.sleep(SETTLE_S)
        before_s = [_cpu_s(process) for process in processes]
        time.sleep(watch_s)
        used = [_cpu_s(p) - s for p, s in zip(processes, before_s, strict=True)]
    ours, other = (100 * seconds / watch_s for seconds in used)
    measured = f"{ours:.2f} % of a core against {other:.2f} %"
    bar = f"at most {PROMISE_LIMIT_PERCENT} % more"
    met = ours - other <= PROMISE_LIMIT_PERCENT
    yield Row(
        f"a kernel that idles, with --idle 1h against without, {watch_s} s", measured, bar, met
    )


def top(*, quick: bool) -> Iterator[Row]:
    """Return what `reserve-gpu top` costs while somebody has it open."""
    watch_s = SHORT_WATCH_S if quick else TOP_WATCH_S
    with crowd(GPUS) as pids, stage(machine(GPUS, BUSY, pids)) as on:
        terminal, end = pty.openpty()
        environ = on.on_driver({**on.environ(), "TERM": "xterm", "COLUMNS": "120"})
        command = [sys.executable, "-m", "reserve_gpu", "top"]
        shown = subprocess.Popen(command, env=environ, stdin=end, stdout=end, cwd=on.folder)
        reader = threading.Thread(target=_read_all, args=(terminal,), daemon=True)
        reader.start()
        os.close(end)
        time.sleep(SETTLE_S)
        process = psutil.Process(shown.pid)
        before_s = _cpu_s(process)
        time.sleep(watch_s)
        percent = 100 * (_cpu_s(process) - before_s) / watch_s
        shown.terminate()
        shown.wait()
    what = f"reserve-gpu top, {GPUS} GPUs, {GPUS} processes, {watch_s} s"
    measured, bar = f"{percent:.2f} % of a core", f"at most {TOP_LIMIT_PERCENT} %"
    yield Row(what, measured, bar, percent <= TOP_LIMIT_PERCENT)


def _read_all(terminal: int) -> None:
    with suppress(OSError):  # the other end is closed
        while os.read(terminal, 1 << 16):
            pass


def memory(*, quick: bool) -> Iterator[Row]:
    """Measure how much a script and a kernel grow in the second half of a very long wait."""
    last = FEW_LOOKS if quick else LOOKS
    first = last // 2
    with _full_machine() as on, on.kernel() as kernel:
        outputs = {
            "script": on.timed("-c", HURRY.format(first=first, last=last, stream="sys.stderr"))[1],
            "kernel": kernel.run(HURRY.format(first=first, last=last, stream="")).stdout,
        }
    for name, output in outputs.items():
        before_kib, after_kib = map(int, output.split())
        growth_kib = after_kib - before_kib
        yield Row(
            f"a {name} that waits, looks {first:,} to {last:,}",
            f"{growth_kib:+d} KiB",
            f"no growth, at most {GROWTH_LIMIT_KIB} KiB",
            growth_kib <= GROWTH_LIMIT_KIB,
        )


def own_kib() -> int:
    """Return the memory that is this process's own, page by page, without mapped files.

    Of such a file others may map the same part, or the kernel some more of it than was asked for.
    """
    sizes = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(size.split()[1]) for size in sizes if size.startswith("Anonymous:"))


@contextmanager
def _full_machine() -> Iterator[Stage]:
    """Make a machine with nothing free: some GPUs are in use, the others reserved."""
    with stage(machine(GPUS, BUSY)) as on, on.child() as holder:
        holder.run(f"reserve_gpu.reserve(count={GPUS - BUSY})")
        yield on


def _is_possible(prefix: Sequence[str]) -> bool:
    return not subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode


def _child(on: Stage, prefix: Sequence[str]) -> Child:
    """Return a process in its place; it warns in a container that others may not see its locks."""
    return Child(on.environ(PYTHONWARNINGS="ignore"), on.folder, *prefix)


def _process(child: Child) -> psutil.Process:
    """Return the process by its pid out here; in a container it has another one."""
    process = psutil.Process(child.process.pid)
    return (process.children() or [process])[0]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _handovers(prefix: Sequence[str], end: Callable[[Child], float], samples: int) -> list[float]:
    """Return the seconds that each hand-over took."""
    with ThreadPoolExecutor(LANES) as threads:
        lanes = [threads.submit(_lane, prefix, end, samples, seed) for seed in range(LANES)]
        return [took_s for lane in lanes for took_s in lane.result()]


def _lane(
    prefix: Sequence[str], end: Callable[[Child], float], samples: int, seed: int
) -> list[float]:
    dice = random.Random(seed)  # noqa: S311 - a moment, no secret
    times_s = []
    with stage(machine(1)) as on:
        holder = _child(on, prefix)
        holder.run("reserve_gpu.reserve()")
        for _ in range(samples):
            waiter = _child(on, prefix)
            waiter.send(WAIT)
            time.sleep(dice.uniform(0.5, 1.5))  # in the queue, at no fixed point of its looks
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
