"""How soon the driver shows a change, and the cost of a reservation."""

from __future__ import annotations

import random
import re
import statistics
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from benchmarks.ways import CODE, FLOOR, NVITOP, OURS, PRINT_CHOICE
from tests.support.hardware.machine import COMPUTE, CUDA, milliseconds, seconds, until
from tests.support.hardware.report import check

if TYPE_CHECKING:
    from tests.support.hardware.machine import Hardware
    from tests.support.hardware.report import Findings

ROUNDS = 3
KILLED_S = 30.0  # limit for everything that a killed process leaves behind
LISTED_S = 1.0  # limit for a context to appear


def spread(values: list[float | None]) -> str:
    """Return the median and the extremes of the values that were measured."""
    there = sorted(value for value in values if value is not None)
    if not there:
        return "never"
    never = f", never {len(values) - len(there)} times" if len(there) < len(values) else ""
    low, middle, high = there[0], statistics.median(there), there[-1]
    return f"{milliseconds(middle)} ({low * 1000:.0f} to {milliseconds(high)}){never}"


@check(
    {
        "listed": f"a process is listed within {LISTED_S:.0f} s of its CUDA context",
    },
    facts={"took": "from the call that creates a context until the process is listed"},
)
def test_a_context_appears(hardware: Hardware, found: Findings) -> None:
    """NVML lists a process as soon as it has a CUDA context."""
    since_call: list[float | None] = []
    since_return: list[float | None] = []
    for _ in range(ROUNDS):
        with hardware.child(**hardware.visible()) as child:
            child.run(f"{CUDA}start()")
            hardware.read("0")  # the reading process has started
            child.send("context()")
            look = f"moments({{'listed': lambda: {child.pid} in sizes()}}, 5)['listed']"
            at = hardware.read(look)
            begin, end = child.answer().value
        since_call.append(at and at - begin)
        since_return.append(at and at - end)
    found.fact("took", spread(since_call))
    is_kept = all(value is not None and value <= LISTED_S for value in since_return)
    found.promise("listed", is_kept, f"after the context exists: {spread(since_return)}")


WATCH = """
conditions = {{
    'lock free': lambda: is_unlocked({lock!r}),
    'process gone': lambda: is_gone({pid}),
    'not listed': lambda: {pid} not in sizes(),
    'memory free': lambda: used() <= {idle} + 16,
}}
start = time.monotonic()
os.kill({pid}, 9)
{{name: at and at - start for name, at in moments(conditions, {limit_s}).items()}}
"""


@check(
    {
        "soon": f"{KILLED_S:.0f} s after kill -9 with {{size}}, lock, process and memory are gone",
    },
    facts={"took": "after kill -9 with {size}"},
    limit_s=100,
)
@pytest.mark.parametrize("size", ["a bare context", "1 GiB", "60 % of the memory"])
def test_after_kill(hardware: Hardware, found: Findings, size: str) -> None:
    """The lock and the memory of a killed process are released soon."""
    sizes = {"a bare context": 1, "1 GiB": 1024, "60 % of the memory": hardware.large_mib}
    rounds: list[dict[str, float | None]] = []
    while len(rounds) < ROUNDS and None not in (rounds[-1].values() if rounds else ()):
        rounds.append(after_kill(hardware, sizes[size]))
    found.fact("took", "; ".join(f"{n} {spread([r[n] for r in rounds])}" for n in rounds[0]))
    never = [name for name, at in rounds[-1].items() if at is None]
    found.promise("soon", not never, ", ".join(f"{name}: not yet" for name in never))


def after_kill(hardware: Hardware, mib: int) -> dict[str, float | None]:
    """Kill a holder that computes; returns the seconds until each of its traces is gone."""
    until(lambda: not hardware.pids())
    idle = hardware.read("used()")
    with hardware.child() as child:
        assert child.reserve().error is None
        assert child.run(f"{COMPUTE}\ntake({mib}); work()").error is None
        lock = str(hardware.locks / f"{hardware.uuid}.lock")
        found: dict[str, float | None] = hardware.read(
            WATCH.format(lock=lock, pid=child.pid, idle=idle, limit_s=KILLED_S)
        )
    return found


@check(
    {
        "again": f"reserve() gets the GPU within {KILLED_S:.0f} s of the end of its killed holder",
    },
    facts={"attempts": "attempts of reserve() right after the end of a killed holder, and seconds"},
    limit_s=130,
)
def test_reserve_after_kill(hardware: Hardware, found: Findings) -> None:
    """Once its parent knows that the holder has ended, the GPU can be reserved."""
    attempts = []
    with hardware.child() as other:
        for _ in range(ROUNDS):
            with hardware.child() as holder:
                assert holder.reserve().error is None
                assert holder.run(f"{COMPUTE}\ntake(2048); work()").error is None
                assert other.reserve().error == "NoFreeDeviceError"
                holder.process.kill()
                holder.process.wait(20)
                start, count = time.monotonic(), 1
                while other.reserve().error and time.monotonic() - start < KILLED_S:
                    count += 1
                took_s = time.monotonic() - start
                attempts.append(f"{count} in {seconds(took_s)}")
                other.run("reserve_gpu.release()")
                if took_s >= KILLED_S:
                    break
    found.fact("attempts", "; ".join(attempts))
    found.promise("again", took_s < KILLED_S, attempts[-1])


MOST_ROUNDS, COST_S = 10, 40


@check(
    facts={
        "cost": "a process that reserves the GPU, with the driver initialized",
        "nvitop": "the same process with nvitop's select_devices",
    },
    limit_s=90,
)
def test_cost(hardware: Hardware, found: Findings) -> None:
    """The time of a reservation is compared with that of the same queries without it."""
    hardware.read("0")  # keeps the driver initialized
    ways = {"pynvml": CODE[FLOOR], "reserve()": CODE[OURS]}
    if find_spec("nvitop"):
        ways["nvitop"] = CODE[NVITOP].replace("40GiB", "1GiB")  # GPUs of any size
    end, dice = time.monotonic() + COST_S, random.Random(0)  # noqa: S311
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(2 if hardware.is_stand_in else MOST_ROUNDS):
        for way in dice.sample(list(ways), len(ways)):
            took = process_time(hardware, ways[way])
            if number:  # the first round fills the disk cache
                times[way].append(took)
        if time.monotonic() > end:
            break
    reserving = times["reserve()"]
    times_bare = ratio(reserving, times["pynvml"])
    middle = milliseconds(statistics.median(reserving))
    found.fact("cost", f"{middle}, {times_bare:.2f} times bare pynvml, {len(reserving)} rounds")
    if "nvitop" not in times:
        pytest.skip("nvitop is not installed")
    middle = milliseconds(statistics.median(times["nvitop"]))
    found.fact("nvitop", f"{middle}, {ratio(times['nvitop'], reserving):.2f} times reserve()")


def ratio(times: list[float], others: list[float]) -> float:
    """Return the median of the rounds' ratios, which load on the machine hardly changes."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def process_time(hardware: Hardware, code: str) -> float:
    """Return the seconds that a whole process takes to choose a GPU."""
    start = time.monotonic()
    done = hardware.command(sys.executable, "-c", code + PRINT_CHOICE)
    took = time.monotonic() - start
    assert re.search(r"^\d", done.stdout, re.MULTILINE), done.stderr[-500:]
    return took
