"""Where it is measured: machines of the stand-in driver, and processes on them."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests import driver
from tests.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Hundreds of kernels would each say that they talk over TCP without encryption, and write a history
# into a folder that is about to go.
QUIET = """
c = get_config()
c.IPKernelApp.log_level = "ERROR"
c.HistoryManager.enabled = False
"""
GPU = "gpu\n  name NVIDIA A100-SXM4-80GB\n  memory 81920\n  reserved 620\n"
IN_USE_MIB = 60_000


class Stage(Machine):
    """A machine whose driver keeps no log, with Python as people use it."""

    limit_s = 300

    def __init__(self, folder: Path, scenario: str) -> None:
        super().__init__(folder)
        self.write(scenario)
        profile = self.home / ".ipython" / "profile_default"
        profile.mkdir(parents=True)
        (profile / "ipython_kernel_config.py").write_text(QUIET)

    def on_driver(self, base: dict[str, str]) -> dict[str, str]:
        """Return the environment with the machine's driver in it.

        An installed package is compiled; a checkout would be compiled anew at every start if Python
        were not allowed to keep what it has compiled.
        """
        made = driver.environment(self.scenario, base=base)
        made.pop("PYTHONDONTWRITEBYTECODE", None)
        return made

    def timed(self, *arguments: str) -> tuple[float, str]:
        """Return the milliseconds that a whole run of Python takes, and what it prints."""
        start = time.perf_counter()
        done = self.command(sys.executable, *arguments)
        took_ms = (time.perf_counter() - start) * 1e3
        if done.returncode:
            raise RuntimeError(f"{arguments}\nfailed: {done.stderr}")
        return took_ms, done.stdout.strip()


@contextmanager
def stage(scenario: str) -> Iterator[Stage]:
    """Make a machine in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as name:
        yield Stage(Path(name), scenario)


def machine(gpus: int, busy: int = 0, pids: Sequence[int] = ()) -> str:
    """Return the scenario of a machine whose first GPUs are busy.

    busy: how many. pids: the processes on these, in turn; without any, their memory is in use all
    the same.
    """
    parts = []
    for index in range(gpus):
        there = pids[index::busy] if index < busy else ()
        lines = [f"  compute {pid} {IN_USE_MIB // len(there)}" for pid in there]
        if index < busy:
            lines += ["  utilisation 97"] if there else ["  utilisation 97", f"  used {IN_USE_MIB}"]
        parts.append(GPU + "".join(f"{line}\n" for line in lines))
    return "".join(parts)


@contextmanager
def crowd(count: int) -> Iterator[list[int]]:
    """Start processes for a scenario to name; other tools show only those that live."""
    command = ["sleep", "900"]  # ends by itself if this process should be killed
    sleepers = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield [sleeper.pid for sleeper in sleepers]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()


def in_turn(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure all once a round, each time in another order.

    So whatever else the machine does meets all alike. A round before the first fills the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    dice = random.Random(0)  # noqa: S311 - an order, no secret
    for number in range(rounds + 1):
        for name in dice.sample(list(runs), len(runs)):
            value = runs[name]()
            if number:
                times[name].append(value)
    return times
