"""What tests ask of other processes, and of those that wait."""

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
    """Press Ctrl-C in a process after a wait; returns what it has printed on stderr."""
    try:
        wait()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    return stderr


def wait_for(condition: Callable[[], object], pause_s: float = 0.005) -> None:
    """Wait until the condition holds; fail after a long time."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause_s)


def is_running(pid: int) -> bool:
    """Tell whether there is such a process, and not only what is left of one."""
    with suppress(FileNotFoundError, ProcessLookupError):  # the last where it ends meanwhile
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
    """Make sure that the process lives through the block, and end it then."""
    try:
        assert is_running(pid)
        yield
        assert is_running(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def queue(machine: Machine) -> set[str]:
    """Return the tickets of those who wait."""
    return {name for name in locked(machine.locks) if name.startswith("queue-")}
