"""When somebody lets go of a file in a directory: the kernel tells, so nobody has to keep looking.

A lock file is closed when it is released, and when the last process that has it open ends, however
it ends; inotify reports either (https://man7.org/linux/man-pages/man7/inotify.7.html), also to
other users and in other containers that the directory is mounted into. Who looks whether a file is
locked opens and closes it too; where it matters, what counts is who closes what was open before.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu import descriptors
from reserve_gpu.descriptors import NONE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

IN_CLOSE_WRITE, IN_CLOSE, IN_OPEN, IN_Q_OVERFLOW = 0x8, 0x18, 0x20, 0x4000  # linux/inotify.h
EVENT = struct.Struct("iIII")  # struct inotify_event: watch, mask, cookie, length of the name
LONGEST = EVENT.size + 256  # one with a name of 255 bytes
BUFFER, READS = 1 << 17, 8  # all that the kernel keeps; more may come as fast as it is read
CALM_S = 1.0  # after so much that to look is cheaper than to read it all


class Changes:
    """Tells of files that others close; a context manager.

    directory: its descriptor.
    pause_s: the least time between two tellings. Where the kernel does not tell, as too many
        processes watch something already, `wait` says after that time that there may be changes.
    counts: whether to leave out those that close what they have just opened; for whom it is more
        work to look than to count.
    unheard: the name of a file that is not counted.
    """

    def __init__(self, directory: int, pause_s: float, *, counts: bool, unheard: str) -> None:
        self._directory = directory
        self._pause_s = pause_s
        self._counts = counts
        self._unheard = ("", unheard)  # the first is the directory itself
        self._next = 0.0
        self._opened: Counter[str] = Counter()

    def __enter__(self) -> Self:
        mask = IN_OPEN | IN_CLOSE if self._counts else IN_CLOSE_WRITE
        self._descriptor = _watch(self._directory, mask)
        return self

    def __exit__(self, *_: object) -> None:
        descriptors.close(self._descriptor)

    def wait(self, limit_s: float) -> bool:
        """Return when a file was closed since the last call, but after limit_s seconds at most.

        True if somebody may have let go of a file since the last call of `forget`.
        """
        if not descriptors.is_ours(self._descriptor):  # none, or somebody has closed it
            time.sleep(max(0.0, min(limit_s, self._pause_s)))
            return True
        end = time.monotonic() + limit_s
        told = select.poll()
        told.register(self._descriptor, select.POLLIN)
        if not told.poll(max(0.0, limit_s) * 1e3):
            return False
        time.sleep(max(0.0, min(self._next, end) - time.monotonic()))
        is_fewer, is_much = self._read()
        self._next = time.monotonic() + (CALM_S if is_much else self._pause_s)
        return is_fewer or is_much

    def forget(self) -> None:
        """Tell of nothing that was closed until now."""
        if descriptors.is_ours(self._descriptor):
            with suppress(OSError):  # in the end there is nothing more to read
                for _ in range(READS):
                    os.read(self._descriptor, BUFFER)
        self._opened.clear()

    def _read(self) -> tuple[bool, bool]:
        """Whether of some file more were closed than were opened, and whether it is too much."""
        with suppress(OSError):
            data = os.read(self._descriptor, BUFFER)
            if not self._counts:
                return True, False
            is_fewer, is_much = False, len(data) > BUFFER - LONGEST
            for mask, name in _events(data):
                if name not in self._unheard:
                    self._opened[name] += 1 if mask & IN_OPEN else -1
                    is_fewer |= self._opened[name] < 0
                is_much |= bool(mask & IN_Q_OVERFLOW)
            return is_fewer, is_much
        return False, True


def _events(data: bytes) -> Iterator[tuple[int, str]]:
    """The mask and the file name of each event, "" for the directory itself."""
    start = 0
    while start < len(data):
        _, mask, _, length = EVENT.unpack_from(data, start)
        start += EVENT.size + length
        yield mask, os.fsdecode(data[start - length : start].rstrip(b"\0"))


def _watch(directory: int, mask: int) -> int:
    """A descriptor to read what happens to files in the directory; NONE if there can be none."""
    import ctypes

    try:
        system = ctypes.CDLL(None)
        with descriptors.opening():
            found: int = system.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
            if found == NONE:
                return NONE
            descriptors.note(found)
        path = f"/proc/self/fd/{directory}".encode()
        if system.inotify_add_watch(found, path, mask) != NONE:
            return found
        descriptors.close(found)
    except (OSError, AttributeError):  # no C library of that kind
        pass
    return NONE
