"""The end of `reserve-gpu run --for`: a small process that ends the command at that moment.

The command itself stays the very process that was started, with its signals, its terminal and its
exit code. What watches it holds no lock, no terminal and no pipe, is no child of the command, and
is gone as soon as the command is. It holds a pidfd, so it can't take another process for it:
https://man7.org/linux/man-pages/man2/pidfd_open.2.html

This file is also the program of that process, which is run by Python alone, without this package:
it imports nothing but the standard library.
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

# Linux numbers these alike for all processors that CUDA runs on (scripts/syscall.tbl). Python's own
# os.pidfd_open is missing where it was built for old systems, as conda's and uv's are:
# https://github.com/astral-sh/python-build-standalone/issues/193
SEND_SIGNAL, OPEN = 424, 434
SLICE_S = 60.0  # within it a suspension, or a wall clock that was set, is noticed
KILL_AFTER_S = 60.0
FIRST_PROCESS = 1  # no process below it, in its container, can end it


def require() -> None:
    """Raise OSError where the process that this one becomes can't be watched and ended."""
    if os.getpid() == FIRST_PROCESS:
        text = "process 1 of a container can't be ended from inside; docker run --init helps"
        raise OSError(text)
    os.close(open_process(os.getpid()))


def words(
    until: float, kill_after_s: float = KILL_AFTER_S, *, clock: int = time.CLOCK_REALTIME
) -> list[str]:
    """Return the arguments for Python that end this process at a time, also after exec.

    Args:
        until: The time, in seconds by the clock.
        kill_after_s: Seconds between SIGTERM and SIGKILL.
        clock: A clock of clock_gettime(2): CLOCK_BOOTTIME for the end of a duration.
    """
    program = ["-I", "-S", os.path.abspath(__file__)]
    return [*program, str(os.getpid()), repr(until), repr(kill_after_s), str(int(clock))]


def watch(command: int, until: float, kill_after_s: float, clock: int) -> None:
    """Wait for the end of the command, and end it at that moment. command: its pidfd."""
    if _ends(command, lambda: until - time.clock_gettime(clock)):
        return
    # One that is stopped goes on: it may have something to save. It may also have ended meanwhile,
    # or have become another user's (sudo).
    with suppress(OSError):
        send(command, signal.SIGTERM)
        send(command, signal.SIGCONT)
    if not ends_within(command, kill_after_s):
        with suppress(OSError):
            send(command, signal.SIGKILL)


def open_process(pid: int) -> int:
    """Return a pidfd of the process. Raises OSError."""
    return _call(OPEN, pid, 0)


def send(process: int, number: int) -> None:
    """Send a signal to the process of a pidfd. Raises OSError; the kernel asks for permission."""
    _call(SEND_SIGNAL, process, number, 0, 0)


def ends_within(process: int, seconds: float) -> bool:
    """Wait until a process, given by a pidfd, ends; return whether it ended in time."""
    until = time.monotonic() + seconds
    return _ends(process, lambda: until - time.monotonic())


def _ends(process: int, left_s: Callable[[], float]) -> bool:
    """Return whether the process ends while there is time left."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    while (seconds := left_s()) > 0:
        if poll.poll(1000 * min(seconds, SLICE_S)):
            return True
    return False


def _call(number: int, *arguments: int) -> int:
    """Make a system call that Python may lack. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _main() -> None:
    """Leave a process that watches the one that has started this one."""
    pid, until, kill_after_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    clock = int(sys.argv[4])
    command = open_process(pid)
    if os.getppid() != pid or os.fork():  # it has ended already, and the number is another's
        return
    watch(command, until, kill_after_s, clock)


if __name__ == "__main__":
    _main()
