"""Benchmark: query the status of several hosts, compared with only the slowest one."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.table import Row
from tests.support.hosts import KEYGEN, SSH, SSHD, Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = "reserve-gpu"
NAMES = ("lab1", "lab2", "lab3")
GPUS, LIMIT_S = 8, 0.3
LABEL = f"status of {len(NAMES)} hosts, time beyond that of the slowest host alone"


def hosts(*, quick: bool) -> Iterator[Row]:
    """Measure how long the status of several hosts takes.

    The hosts are real SSH servers on the loopback interface, and the SSH connections are already
    open.
    """
    bar = f"at most {LIMIT_S} s"
    if not (SSH and SSHD and KEYGEN):
        yield Row(LABEL, "not measured: OpenSSH server not found", bar)
        return
    if not Path(sys.executable).with_name(COMMAND).exists():
        yield Row(LABEL, "not measured: the package is not installed", bar)
        return
    extra_s = []
    with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder), *NAMES, gpus=GPUS) as lab:
        for _ in range(3 if quick else 15):
            alone = [_timed(lab, "ssh", name, f"{COMMAND} status --json") for name in NAMES]
            words = ("-m", "reserve_gpu", "status", "--json", "--hosts", *NAMES)
            extra_s.append(_timed(lab, sys.executable, *words) - max(alone))
    measured_s = statistics.median(extra_s[1:])
    yield Row(LABEL, f"{measured_s:.2f} s", bar, measured_s <= LIMIT_S)


def _timed(lab: Hosts, *argv: str) -> float:
    """Return the run time of a command in seconds.

    Raises:
        RuntimeError: The command failed.
    """
    start = time.monotonic()
    done = subprocess.run(
        argv, env=lab.environ(), capture_output=True, text=True, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return time.monotonic() - start
