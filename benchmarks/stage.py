"""Where it is measured: machines of the stand-in driver, processes and kernels on them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests import driver
from tests.machine import Child, Kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ROOT = Path(__file__).parent.parent
LIMIT_S = 120
# An installed package is compiled; without this, a checkout might be compiled anew at every start.
UNUSUAL = ("PYTHONDONTWRITEBYTECODE",)
OURS = ("CUDA_", "RESERVE_GPU_", "JUPYTER", "JPY_")
# Hundreds of kernels would each say that they talk over TCP without encryption, and write a history
# into a folder that is about to go.
QUIET = """
c = get_config()
c.IPKernelApp.log_level = "ERROR"
c.HistoryManager.enabled = False
"""
GPU = "gpu\n  name NVIDIA A100-SXM4-80GB\n  memory 81920\n  reserved 620\n"
IN_USE_MIB = 60_000
TIMED = """
import time
_start = time.perf_counter()
{code}
_ms = (time.perf_counter() - _start) * 1e3
import os
print("\\nmeasured", _ms, os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


class Stage:
    """A machine in a folder of its own, with a lock directory that nobody else uses."""

    def __init__(self, folder: Path, scenario: str) -> None:
        self.folder = folder
        self.scenario = folder / "scenario.txt"
        self.scenario.write_text(scenario)
        profile = folder / "ipython" / "profile_default"
        profile.mkdir(parents=True)
        (profile / "ipython_kernel_config.py").write_text(QUIET)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in UNUSUAL and not name.startswith(OURS)
        }
        programs = nvidia_smi().parent
        extra = {
            "HOME": str(folder),
            "IPYTHONDIR": str(folder / "ipython"),
            "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": str(ROOT),
            "RESERVE_GPU_LOCK_DIR": str(folder / "locks"),
            "TERM": "dumb",
        }
        self.environ = driver.environment(self.scenario, base=kept | extra)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start Python with arguments; its standard input and output are pipes."""
        return subprocess.Popen(
            [sys.executable, *arguments], env=self.environ, cwd=self.folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def until_answer(self, code: str) -> tuple[float, str]:
        """Milliseconds from the start of a Python process to what the last line of code prints."""
        start = time.perf_counter()
        with self.start("-c", code) as process:
            answer = process.stdout.readline().strip() if process.stdout else ""
            took_ms = (time.perf_counter() - start) * 1e3
            _, said = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            raise RuntimeError(f"{code}\nfailed: {said}")
        return took_ms, answer

    def until_end(self, *arguments: str) -> float:
        """Milliseconds that a whole run of Python takes."""
        start = time.perf_counter()
        with self.start(*arguments) as process:
            _, said = process.communicate(timeout=LIMIT_S)
        took_ms = (time.perf_counter() - start) * 1e3
        if process.returncode:
            raise RuntimeError(f"{arguments}\nfailed: {said}")
        return took_ms

    @contextmanager
    def child(self) -> Iterator[Child]:
        """A process that runs what it is told, killed at the end."""
        child = Child(self.environ, self.folder)
        try:
            yield child
        finally:
            child.kill()

    @contextmanager
    def kernel(self) -> Iterator[Kernel]:
        """A real kernel, ready to run cells."""
        kernel = Kernel(self.environ, self.folder)
        try:
            yield kernel
        finally:
            kernel.close()


@contextmanager
def stage(scenario: str) -> Iterator[Stage]:
    """A machine in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="benchmark-", ignore_cleanup_errors=True) as name:
        yield Stage(Path(name), scenario)


def in_kernel(kernel: Kernel, code: str) -> tuple[float, str]:
    """Milliseconds that code takes in a kernel, and what CUDA_VISIBLE_DEVICES is after it."""
    cell = kernel.run(TIMED.format(code=code))
    if cell.error:
        raise RuntimeError(f"{code}\nfailed: {cell.traceback}")
    _, took_ms, answer = cell.stdout.rsplit("\n", 2)[-2].split(" ", 2)
    return float(took_ms), answer


def machine(gpus: int, busy: int = 0, pids: Sequence[int] = (), more: str = "") -> str:
    """The scenario of a machine whose first GPUs are busy.

    busy: how many. pids: the processes on these, in turn; without any, their memory is in use all
    the same. more: lines at the end.
    """
    parts = []
    for index in range(gpus):
        there = pids[index::busy] if index < busy else ()
        each_mib = IN_USE_MIB // max(len(there), 1)
        lines = [f"  compute {pid} {each_mib}" for pid in there]
        if index < busy:
            lines += ["  utilisation 97"] if there else ["  utilisation 97", f"  used {IN_USE_MIB}"]
        parts.append(GPU + "".join(f"{line}\n" for line in lines))
    return "".join(parts) + more


@contextmanager
def crowd(count: int) -> Iterator[list[int]]:
    """Living processes for a scenario to name; only those that live are shown by other tools."""
    command = ["sleep", "900"]  # ends by itself if this process should be killed
    sleepers = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield [sleeper.pid for sleeper in sleepers]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure all ways once a round, each time in another order.

    So whatever else the machine does meets all alike. A round before the first fills the caches.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    dice = random.Random(0)  # noqa: S311 - an order, no secret
    for number in range(rounds + 1):
        for name in dice.sample(list(ways), len(ways)):
            value = ways[name]()
            if number:
                found[name].append(value)
    return found


def nvidia_smi() -> Path:
    """The stand-in nvidia-smi, compiled if need be, in a folder of its own."""
    source = Path(__file__).with_name("nvidia_smi.c")
    folder = driver.build().parent / "bin"
    program = folder / "nvidia-smi"
    folder.mkdir(exist_ok=True)
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        draft = folder / f"draft-{os.getpid()}"
        subprocess.run([*driver.compiler(), "-O2", "-o", draft, source, "-ldl"], check=True)
        draft.rename(program)
    return program
