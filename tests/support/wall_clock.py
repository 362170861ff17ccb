"""A wall clock that a test can set, for processes that load a library with LD_PRELOAD."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from tests import driver

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long shift(void) {
    char text[32] = {0};
    int file = open(getenv("WALL_CLOCK_SHIFT"), O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    long length = read(file, text, 31);
    close(file);
    return length > 0 ? atol(text) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
    int failed = syscall(SYS_clock_gettime, clock, at);
    if (!failed && clock == CLOCK_REALTIME) at->tv_sec += shift();
    return failed;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


class WallClock:
    """The wall clock of processes with the variables in `environ`. File times are not changed."""

    def __init__(self, folder: Path, shift_s: int) -> None:
        """Build the library.

        Args:
            folder: The folder for the library, and for the file with the shift.
            shift_s: The seconds to add to the real wall clock at first.
        """
        self.file, library = folder / "shift", folder / "clock.so"
        source = folder / "clock.c"
        source.write_text(SOURCE)
        build = [*driver.compiler(), "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(build, check=True)
        self.environ = {"LD_PRELOAD": str(library), "WALL_CLOCK_SHIFT": str(self.file)}
        self.set(shift_s)

    def set(self, shift_s: int) -> None:
        """Set the seconds to add to the real wall clock."""
        self.file.write_text(str(shift_s))
