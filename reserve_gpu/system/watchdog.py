"""The watchdog of `reserve-gpu run --for`, a small process that ends the command at a given time.

The command replaces the `reserve-gpu` process through exec, so that signals and the exit code need
no forwarding. The watchdog holds no lock, terminal or pipe, is not a child of the command, and
exits as soon as the command has ended. It refers to the command by a pidfd, so that it can't end
another process that reuses the pid:
https://man7.org/linux/man-pages/man2/pidfd_open.2.html

This file runs as a standalone program, without the rest of the package. So it only imports the
standard library.

`timeout --foreground -k 60` (coreutils 9.1) is not suitable, because the command gets Ctrl-C twice
and is killed a minute later.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# The system call numbers of pidfd_send_signal and pidfd_open are the same on all architectures that
# CUDA supports (Linux, scripts/syscall.tbl). Python builds for old systems, such as conda's and
# uv's, lack os.pidfd_open: https://github.com/astral-sh/python-build-standalone/issues/193
SEND_SIGNAL, OPEN = 424, 434
SLICE_S = 60.0  # maximum seconds between checks of the clock, because it might be changed
KILL_AFTER_S = 60.0  # seconds between SIGTERM and SIGKILL
FIRST_PROCESS = 1  # pid of a container's init process, which can't be killed from inside


def require() -> None:
    """Raise OSError if a watchdog can't end this process."""
    if os.getpid() == FIRST_PROCESS:
        text = "process 1 of a container can't be ended from inside; use docker run --init"
        raise OSError(text)
    os.close(open_process(os.getpid()))


def words(
    until: float, kill_after_s: float = KILL_AFTER_S, *, clock: int = time.CLOCK_REALTIME
) -> list[str]:
    """Return the arguments that make Python run a watchdog for this process.

    The watchdog ends the process even after an exec.

    Args:
        until: The time at which to end the process, in seconds on `clock`.
        kill_after_s: Seconds between SIGTERM and SIGKILL.
        clock: A clock for clock_gettime(2), such as CLOCK_BOOTTIME to measure a duration.
    """
    program = ["-I", "-S", os.path.abspath(__file__)]
    return [*program, str(os.getpid()), repr(until), repr(kill_after_s), str(int(clock))]


def watch(command: int, until: float, kill_after_s: float, clock: int) -> None:
    """Wait for the command to end. Send it SIGTERM at the given time, and SIGKILL later.

    Args:
        command: The command's pidfd.
        until: The time at which to end the command, in seconds on `clock`.
        kill_after_s: Seconds between SIGTERM and SIGKILL.
        clock: A clock for clock_gettime(2).
    """
    if _ends(command, lambda: until - time.clock_gettime(clock)):
        return
    # SIGCONT lets a stopped command save its work. Sending a signal fails if the command has just
    # ended, or is now running as another user (sudo).
    with suppress(OSError):
        send(command, signal.SIGTERM)
        send(command, signal.SIGCONT)
    if not ends_within(command, kill_after_s):
        with suppress(OSError):
            send(command, signal.SIGKILL)


def open_process(pid: int) -> int:
    """Return a pidfd for a process.

    Raises:
        OSError: The process has ended, or pidfds are not supported.
    """
    return _call(OPEN, pid, 0)


def send(process: int, number: int) -> None:
    """Send a signal to the process that a pidfd refers to.

    Raises:
        OSError: The process has ended, or this process lacks permission.
    """
    _call(SEND_SIGNAL, process, number, 0, 0)


def ends_within(process: int, seconds: float) -> bool:
    """Wait for the process that a pidfd refers to, and return whether it ended in time."""
    until = time.monotonic() + seconds
    return _ends(process, lambda: until - time.monotonic())


def _ends(process: int, remaining_s: Callable[[], float]) -> bool:
    """Wait for the process to end while time remains, and return whether it ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    while (seconds := remaining_s()) > 0:
        if poll.poll(1000 * min(seconds, SLICE_S)):
            return True
    return False


def _call(number: int, *arguments: int) -> int:
    """Make a system call by its number.

    Raises:
        OSError: The system call failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _main() -> None:
    """Fork a watchdog for this process's parent, and exit."""
    pid, until, kill_after_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    clock = int(sys.argv[4])
    command = open_process(pid)
    if os.getppid() != pid or os.fork():  # if the parent has ended, its pid might be reused
        return
    watch(command, until, kill_after_s, clock)


if __name__ == "__main__":
    _main()
