"""Helpers for other processes: wait for a condition, interrupt, and read their state."""

from __future__ import annotations

import os
import pwd
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.locked import locked
from tests.support.machine import LIMIT_S

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator

    from tests.support.machine import Machine

US = (sys.executable, "-m", "reserve_gpu")


def interrupted(process: subprocess.Popen[str], wait: Callable[[], object]) -> str:
    """Wait, interrupt a process as Ctrl-C does, and return its standard error."""
    try:
        wait()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    return stderr


def wait_for(condition: Callable[[], object], pause_s: float = 0.005) -> None:
    """Wait until the condition is true, and fail after LIMIT_S seconds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause_s)


def is_running(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    with suppress(FileNotFoundError, ProcessLookupError):  # the latter if it ends during the read
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def own_name() -> str:
    """Return this user's name; in a container it may be a number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid {os.getuid()}"


@contextmanager
def living(pid: int) -> Iterator[None]:
    """Check that the process survives the block, and then kill it."""
    try:
        assert is_running(pid)
        yield
        assert is_running(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def queue(machine: Machine) -> set[str]:
    """Return the names of the locked tickets."""
    return {name for name in locked(machine.locks) if name.startswith("queue-")}
