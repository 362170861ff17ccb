"""Waiting: how soon a GPU that comes free is the waiter's, and what the wait costs meanwhile."""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from benchmarks import ways
from benchmarks.memory import own_kib
from benchmarks.report import Row, percentile, verdict
from benchmarks.stage import Stage, machine, stage
from tests.machine import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LANES = 2  # pairs of holder and waiter at the same time, of each kind
SAMPLES, FEW_SAMPLES = 60, 5  # of each lane
HANDOVER_LIMIT_S = 0.3
WAIT = "import time; reserve_gpu.reserve(wait=True); time.monotonic()"
RELEASE = "import time; start = time.monotonic(); reserve_gpu.release(); start"

SCRIPTS = {  # and what to start them with
    "a script that waits": (),
    "a script in a container that waits": (  # the kernel's list of locks shows it but its own
        "unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc",
    ),
}  # fmt: skip
WATCH_S, SHORT_WATCH_S, SETTLE_S = 60, 5, 5
CPU_LIMIT_PERCENT = 1
GROWTH_LIMIT_KIB = 128  # what the first minute fills


def handover(*, quick: bool) -> Iterator[Row]:
    """From the release by the holder, or its kill -9, to the waiter having the GPU."""
    kinds = {"a release": _releases, "kill -9": _kills}
    samples = FEW_SAMPLES if quick else SAMPLES
    with ThreadPoolExecutor(LANES * len(kinds)) as threads:
        jobs = {
            kind: [threads.submit(_lane, measure, samples, seed) for seed in range(LANES)]
            for kind, measure in kinds.items()
        }
        for kind, lanes in jobs.items():
            found = [took_s for lane in lanes for took_s in lane.result()]
            p50, p95 = statistics.median(found), percentile(found, 95)
            bar = verdict(
                f"p95 {p95:.2f} of at most {HANDOVER_LIMIT_S} s", is_met=p95 <= HANDOVER_LIMIT_S
            )
            yield Row(f"hand-over after {kind}", ways.OURS, f"{p50 * 1e3:.0f} ms", bar=bar)


def wait(*, quick: bool) -> Iterator[Row]:
    """What waiting for one of 8 reserved GPUs costs a script and a kernel, and an idle kernel."""
    watch_s = SHORT_WATCH_S if quick else WATCH_S
    with stage(machine(8)) as on, on.child() as holder, on.kernel() as idle, ExitStack() as stack:
        holder.run("reserve_gpu.reserve(count=8)")
        pids = {"a kernel that is idle": idle.pid}
        for name, prefix in SCRIPTS.items():
            if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0:
                script = Child(on.environ, on.folder, *prefix)
                stack.callback(script.kill)
                script.send(WAIT)
                pids[name] = _pid(script)
        waiting = stack.enter_context(on.kernel())
        pids["a kernel that waits"] = waiting.pid
        waiting.load()
        waiting.start("%reserve_gpu --wait")
        watched = {name: Watched(pid) for name, pid in pids.items()}
        time.sleep(SETTLE_S)
        for one in watched.values():
            one.begin()
        time.sleep(watch_s)
        for name, one in watched.items():
            yield one.row(name, watch_s, is_ours="wait" in name)


def _pid(child: Child) -> int:
    """Its pid out here; in a container it has another one."""
    process = psutil.Process(child.process.pid)
    return int((process.children() or [process])[0].pid)


class Watched:
    """The CPU time and the own memory of a process, looked at from outside."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def begin(self) -> None:
        """Count from now on."""
        self._cpu_s, self._kib = self._look()

    def row(self, what: str, watch_s: float, *, is_ours: bool) -> Row:
        """What was used in the seconds since then."""
        cpu_s, kib = self._look()
        percent, growth_kib = 100 * (cpu_s - self._cpu_s) / watch_s, kib - self._kib
        row = Row(
            f"{what}, {watch_s} s", ways.OURS, f"{percent:.2f} % of a core, {growth_kib:+d} KiB"
        )
        if not is_ours:
            return replace(row, way="none")
        is_met = percent <= CPU_LIMIT_PERCENT and growth_kib <= GROWTH_LIMIT_KIB
        bar = f"at most {CPU_LIMIT_PERCENT} %, no growth of memory"
        return replace(row, bar=verdict(bar, is_met=is_met))

    def _look(self) -> tuple[float, int]:
        times = self._process.cpu_times()
        return times.user + times.system, own_kib(self._process.pid)


def _lane(
    measure: Callable[[Stage, int, random.Random], list[float]], samples: int, seed: int
) -> list[float]:
    with stage(machine(1)) as on:
        return measure(on, samples, random.Random(seed))  # noqa: S311 - a moment, no secret


def _some_time(dice: random.Random) -> None:
    """Long enough for the waiter to be in line, and at no fixed point of its looks."""
    time.sleep(dice.uniform(0.4, 0.7))


def _releases(on: Stage, samples: int, dice: random.Random) -> list[float]:
    found = []
    holder, waiter = Child(on.environ, on.folder), Child(on.environ, on.folder)
    holder.run("reserve_gpu.reserve()")
    for _ in range(samples):
        waiter.send(WAIT)
        _some_time(dice)
        start = holder.run(RELEASE).value
        found.append(waiter.answer().value - start)
        holder, waiter = waiter, holder
    holder.kill()
    waiter.kill()
    return found


def _kills(on: Stage, samples: int, dice: random.Random) -> list[float]:
    found = []
    holder = Child(on.environ, on.folder)
    holder.run("reserve_gpu.reserve()")
    for _ in range(samples):
        waiter = Child(on.environ, on.folder)
        waiter.send(WAIT)
        _some_time(dice)
        start = time.monotonic()
        holder.kill()
        found.append(waiter.answer().value - start)
        holder = waiter
    holder.kill()
    return found
