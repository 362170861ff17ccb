"""Helpers of tests: clusters."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.support.engines import LIMIT_S, said

if TYPE_CHECKING:
    from tests.support.hosts import Hosts

GPUS = 2


def ask(hosts: Hosts, *argv: str) -> list[Any]:
    """Run Python on the machine that asks to its end; what it says."""
    done = subprocess.run(
        [sys.executable, *argv], env=hosts.environ(), cwd=hosts.asking.folder, text=True,
        capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return said(done.stdout)


def holders(hosts: Hosts, name: str) -> list[int]:
    """Return who has the GPUs of a host, by their pids."""
    status = json.loads(hosts.run(name, "reserve-gpu status --format json").stdout)
    return [holder["pid"] for row in status["devices"] for holder in row["holders"]]


def until_free(hosts: Hosts, name: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while found := holders(hosts, name):
        assert time.monotonic() < deadline, found
