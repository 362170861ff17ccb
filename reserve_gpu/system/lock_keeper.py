"""A small process that keeps the locks of a kernel that restarts, until the next one asks for them.

It has the descriptors of the locks and nothing else of the kernel: no socket, no terminal, no
working directory, and it is no child of the kernel, which ends all its children. The kernel's list
of locks and `reserve_gpu.reservation.restart_handover` find it; whoever ends it frees the devices.

This file is also the program of that process, which is run by Python alone, without this package:
it imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
import time

PROGRAM = os.path.abspath(__file__)
WORDS = ("-I", "-S", PROGRAM)  # with which Python runs it
LEFT = "RESERVE_GPU_LEFT"  # in its environment: what the kernel has left, for the next one
POLL_S = 0.5  # between two looks at whether the connection file is still there


def keep(connection_file: str, seconds: float) -> None:
    """Stay for so long, as long as the connection file is there, if it is a file."""
    until, is_file = time.monotonic() + seconds, os.path.isabs(connection_file)
    while (left_s := until - time.monotonic()) > 0:
        if is_file and not os.path.exists(connection_file):
            return
        time.sleep(min(left_s, POLL_S))


if __name__ == "__main__" and os.fork() == 0:
    keep(sys.argv[1], float(sys.argv[2]))
