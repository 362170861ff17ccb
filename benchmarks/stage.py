"""Simulated machines for the benchmarks, with the stand-in driver and processes on its GPUs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tests import driver
from tests.support.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

Name = TypeVar("Name", bound="Hashable")
Measured = TypeVar("Measured")

# Without these settings, each of hundreds of kernels would warn about unencrypted TCP connections,
# and write its history into a temporary folder.
QUIET = """
c = get_config()
c.IPKernelApp.log_level = "ERROR"
c.HistoryManager.enabled = False
"""
GPU = "gpu\n  name NVIDIA A100-SXM4-80GB\n  memory 81920\n  reserved 620\n"
IN_USE_MIB = 60_000


class Stage(Machine):
    """A simulated machine whose driver keeps no log, and on which Python caches bytecode."""

    limit_s = 300

    def __init__(self, folder: Path, scenario: str) -> None:
        super().__init__(folder)
        self.write(scenario)
        profile = self.home / ".ipython" / "profile_default"
        profile.mkdir(parents=True)
        (profile / "ipython_kernel_config.py").write_text(QUIET)

    def on_driver(self, base: dict[str, str]) -> dict[str, str]:
        """Return environment variables for the stand-in driver, with bytecode caching enabled.

        An installed package has a bytecode cache. Without one, Python would compile the checkout at
        every start.
        """
        made = driver.environment(self.scenario, base=base)
        made.pop("PYTHONDONTWRITEBYTECODE", None)
        return made

    def timed(self, *arguments: str) -> tuple[float, str]:
        """Run Python with the given arguments.

        Returns:
            The run time in milliseconds, and the output on stdout.
        """
        start = time.perf_counter()
        done = self.command(sys.executable, *arguments)
        took_ms = (time.perf_counter() - start) * 1e3
        if done.returncode:
            raise RuntimeError(f"{arguments}\nfailed: {done.stderr}")
        return took_ms, done.stdout.strip()


class RealStage(Stage):
    """A machine with the installed driver and a real GPU."""

    def on_driver(self, base: dict[str, str]) -> dict[str, str]:
        """Return the environment variables, including the caller's PYTHONPATH."""
        path = filter(None, (base["PYTHONPATH"], os.environ.get("PYTHONPATH")))
        made = base | {"PYTHONPATH": os.pathsep.join(path)}
        made.pop("PYTHONDONTWRITEBYTECODE", None)
        return made


@contextmanager
def real_stage() -> Iterator[Stage]:
    """Use this machine with its driver, and a lock directory in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as name:
        yield RealStage(Path(name), "")


@contextmanager
def stage(scenario: str) -> Iterator[Stage]:
    """Create a simulated machine in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as name:
        yield Stage(Path(name), scenario)


def machine(gpus: int, busy: int = 0, pids: Sequence[int] = ()) -> str:
    """Return a scenario for the stand-in driver, in which the first GPUs are busy.

    Args:
        gpus: The number of GPUs.
        busy: The number of busy GPUs.
        pids: The processes to distribute evenly among the busy GPUs. If there are none, the memory
            of these GPUs is in use, but no process is visible.
    """
    parts = []
    for index in range(gpus):
        gpu_pids = pids[index::busy] if index < busy else ()
        lines = [f"  compute {pid} {IN_USE_MIB // len(gpu_pids)}" for pid in gpu_pids]
        if index < busy:
            lines += (
                ["  utilisation 97"] if gpu_pids else ["  utilisation 97", f"  used {IN_USE_MIB}"]
            )
        parts.append(GPU + "".join(f"{line}\n" for line in lines))
    return "".join(parts)


@contextmanager
def crowd(count: int) -> Iterator[list[int]]:
    """Start real processes for a scenario, because other tools only show real processes."""
    command = ["sleep", "900"]  # exits even if this process is killed
    sleepers = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield [sleeper.pid for sleeper in sleepers]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()


def in_turn(runs: Mapping[Name, Callable[[], Measured]], rounds: int) -> dict[Name, list[Measured]]:
    """Measure all functions once per round, in random order.

    The random order spreads the machine's other load evenly among the functions. An extra first
    round fills the caches, and its results are discarded.

    Args:
        runs: The functions, by name. Each function returns a result, such as a time.
        rounds: The number of rounds, not counting the extra one.

    Returns:
        The results of each function, by name.
    """
    results: dict[Name, list[Measured]] = {name: [] for name in runs}
    dice = random.Random(0)  # noqa: S311 - the order need not be secret
    for number in range(rounds + 1):
        for name in dice.sample(list(runs), len(runs)):
            result = runs[name]()
            if number:
                results[name].append(result)
    return results
