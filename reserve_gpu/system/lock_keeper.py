"""The lock keeper, a small process that holds the locks of a restarting Jupyter kernel.

The lock keeper inherits the descriptors of the lock files and nothing else: no socket, no terminal
and no working directory. It is not a child of the kernel, because a kernel kills its children when
it exits. `reserve_gpu.reservation.restart_handover` starts the lock keeper, and identifies it by
its command line. Killing the lock keeper frees the devices.

This file runs as a standalone program, without the rest of the package. So it only imports the
standard library.
"""

from __future__ import annotations

import os
import sys
import time

PROGRAM = os.path.abspath(__file__)
WORDS = ("-I", "-S", PROGRAM)  # arguments that make Python run this file
LEFT = "RESERVE_GPU_LEFT"  # environment variable that describes the next kernel's reservation
POLL_S = 0.5  # seconds between checks that the connection file still exists


def keep(connection_file: str, seconds: float) -> None:
    """Wait until the timeout, or until the connection file is removed.

    Args:
        connection_file: The path of the kernel's connection file, or the id of a kernel that was
            started over ssh. For an id, only the timeout applies.
        seconds: Timeout in seconds.
    """
    until, is_file = time.monotonic() + seconds, os.path.isabs(connection_file)
    while (remaining_s := until - time.monotonic()) > 0:
        if is_file and not os.path.exists(connection_file):
            return
        time.sleep(min(remaining_s, POLL_S))


if __name__ == "__main__" and os.fork() == 0:
    keep(sys.argv[1], float(sys.argv[2]))
