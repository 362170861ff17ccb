"""Helpers of tests: watchdog."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.processes import US, is_running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Machine


def alarms(pid: int) -> list[int]:
    """Return the processes that watch that one."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_one = (
                any(word.endswith(b"system/watchdog.py") for word in words)
                and str(pid).encode() in words
            )
            if is_one and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


@contextmanager
def running(machine: Machine, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `reserve-gpu run` with these words, and wait until the command has printed."""
    command = (*US, "run", *words)
    with machine.running(*command, environ=machine.environ(), stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        yield process
        process.stdout.close()
