"""When somebody lets go of a file in a directory: the kernel tells, so nobody has to keep looking.

A lock file is closed when it is released, and when the last process that has it open ends, however
it ends; inotify reports either (https://man7.org/linux/man-pages/man7/inotify.7.html), also to
other users and in other containers that the directory is mounted into.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import descriptors
from reserve_gpu.descriptors import NONE

if TYPE_CHECKING:
    from typing_extensions import Self

IN_CLOSE_WRITE = 0x8  # linux/inotify.h
BUFFER = 1 << 16


class Changes:
    """Tells of files that were closed by those who could write to them; a context manager.

    directory: its descriptor.
    pause_s: the least time between two tellings, as those who look close files as well. Where the
        kernel does not tell, as too many processes watch something already, `wait` says after
        that time that there may be changes.
    """

    def __init__(self, directory: int, pause_s: float) -> None:
        self._directory = directory
        self._pause_s = pause_s
        self._next = 0.0

    def __enter__(self) -> Self:
        self._descriptor = _watch(self._directory)
        return self

    def __exit__(self, *_: object) -> None:
        descriptors.close(self._descriptor)

    def wait(self, limit_s: float) -> None:
        """Return when files were closed since the last call, but after limit_s seconds at most."""
        if not descriptors.is_ours(self._descriptor):  # or no more: a handler of a signal reserved
            time.sleep(max(0.0, min(limit_s, self._pause_s)))
            return
        end = time.monotonic() + limit_s
        told = select.poll()
        told.register(self._descriptor, select.POLLIN)
        if told.poll(max(0.0, limit_s) * 1e3):
            time.sleep(max(0.0, min(self._next, end) - time.monotonic()))
            self._next = time.monotonic() + self._pause_s
            with suppress(OSError):
                os.read(self._descriptor, BUFFER)


def _watch(directory: int) -> int:
    """A descriptor to read when a file in the directory was closed; NONE if there can be none."""
    import ctypes

    try:
        system = ctypes.CDLL(None)
        with descriptors.opening():
            found: int = system.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
            if found == NONE:
                return NONE
            descriptors.note(found)
        path = f"/proc/self/fd/{directory}".encode()
        if system.inotify_add_watch(found, path, IN_CLOSE_WRITE) != NONE:
            return found
        descriptors.close(found)
    except (OSError, AttributeError):  # no C library of that kind
        pass
    return NONE
