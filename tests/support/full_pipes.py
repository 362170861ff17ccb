"""Pipes and other files that are full, because no process reads from them."""

from __future__ import annotations

import fcntl
import os
import select
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def fill(descriptor: int) -> None:
    """Write until the descriptor is full."""
    os.set_blocking(descriptor, False)
    with suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"x" * 999 + b"\n")
    with suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"\n")
    os.set_blocking(descriptor, True)


def full_pipe(_: Path | None = None) -> tuple[int, int]:
    """Return both ends of a full pipe."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, select.PIPE_BUF)
    fill(writer)
    return reader, writer
