"""Write to a descriptor without waiting for its reader.

A full pipe or a stopped terminal blocks the process that writes to it, and a blocked `reserve-gpu
run` would hold its GPU without starting the command. O_NONBLOCK can't be set on the descriptor
itself, because the flag belongs to the open file description, which the command and other processes
share. So the pipe or terminal is opened a second time through /proc/self/fd.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import time
from contextlib import suppress
from typing import TextIO

from reserve_gpu.system import file_control

POLL_S, LONGEST_POLL_S = 0.01, 0.5  # initial and maximum pause between attempts, in seconds
PTY_MASTER = 5, 2  # device number of /dev/ptmx; reopening it would create a new terminal


class Writer:
    """Writes whole messages to a descriptor, and drops any message for which there is no room.

    Attributes:
        descriptor: The writer's own descriptor, which duplicates or reopens the given descriptor.
        rest: The unwritten remainder of a message, which is written before the next message.
    """

    def __init__(self, descriptor: int, rest: bytes = b"") -> None:
        """Duplicate or reopen the descriptor.

        Args:
            descriptor: The descriptor to write to.
            rest: The unwritten remainder of an earlier message.

        Raises:
            OSError: The descriptor is closed or read-only.
        """
        status = os.fstat(descriptor)
        self._is_socket = stat.S_ISSOCK(status.st_mode)
        self._is_file = stat.S_ISREG(status.st_mode)
        self._is_pipe = stat.S_ISFIFO(status.st_mode)
        if not self._is_socket:
            _require_writable(descriptor)
        is_terminal = os.isatty(descriptor)
        can_reopen = self._is_pipe or (is_terminal and status.st_rdev != os.makedev(*PTY_MASTER))
        # After `su` or `sudo`, the pipe or terminal belongs to another user, so it can't be
        # reopened.
        reopened = _reopen(descriptor) if can_reopen else None
        self._is_shared = reopened is None
        self._piece = select.PIPE_BUF if self._is_pipe else 1 if is_terminal else None
        self.descriptor = os.dup(descriptor) if reopened is None else reopened
        self.rest = rest

    def write(self, data: bytes, limit_s: float = 0.0) -> bool:
        """Write a message, or drop it if there is no room for it.

        Args:
            data: The message.
            limit_s: Maximum seconds to wait for the reader.

        Returns:
            True if the whole message was written, or if its beginning was written and the remainder
            was stored in `rest`. False if the message was dropped.
        """
        until, is_written, pause_s = time.monotonic() + limit_s, False, POLL_S
        while True:
            try:
                self.rest = self.rest[self._push(self.rest) :] if self.rest else b""
                if not (self.rest or is_written):
                    done = self._push(data) if self._has_room(len(data)) else 0
                    is_written, self.rest = done > 0, data[done:] if done else b""
            except OSError:  # the reader has closed the pipe, or the disk is full
                return is_written
            if (is_written and not self.rest) or time.monotonic() >= until:
                return is_written
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)

    def close(self) -> None:
        """Close the writer's own descriptor; the given descriptor stays open."""
        os.close(self.descriptor)

    def _has_room(self, size: int) -> bool:
        """Return whether a message of this size fits into a pipe; always True for other files.

        Linux writes up to PIPE_BUF bytes either completely or not at all, but might split longer
        writes. The estimate counts unread bytes twice, because the pages of a pipe might be half
        empty.
        """
        if not self._is_pipe or size <= select.PIPE_BUF:
            return True
        unread, capacity = file_control.pipe_use(self.descriptor)
        return not unread or size + 2 * (unread + select.PIPE_BUF) <= capacity

    def _push(self, data: bytes) -> int:
        """Write as much as possible without blocking, and return the number of bytes written."""
        with suppress(BlockingIOError):
            if self._is_file:
                return self._append(data)
            if self._is_socket:
                return self._send(data)
            if self._is_shared:
                return self._write_pieces(data)
            return os.write(self.descriptor, data)
        return 0

    def _append(self, data: bytes) -> int:
        """Append to a file. If the disk fills up, remove the part that was written."""
        done = os.write(self.descriptor, data)
        end = os.lseek(self.descriptor, 0, os.SEEK_CUR)
        if done == len(data) or end != os.fstat(self.descriptor).st_size:
            return done
        os.ftruncate(self.descriptor, end - done)
        os.lseek(self.descriptor, end - done, os.SEEK_SET)
        return 0

    def _send(self, data: bytes) -> int:
        import socket

        with socket.socket(fileno=os.dup(self.descriptor)) as duplicate:
            return duplicate.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _write_pieces(self, data: bytes) -> int:
        """Write piece by piece while poll() reports that there is room.

        A piece is PIPE_BUF bytes for a pipe, and one byte for a terminal.
        """
        done, poll = 0, select.poll()
        poll.register(self.descriptor, select.POLLOUT)
        while done < len(data) and poll.poll(0):
            size = self._piece or len(data)
            done += os.write(self.descriptor, data[done : done + size])
        return done


def _require_writable(descriptor: int) -> None:
    """Raise OSError if a descriptor is closed or read-only, but not if a terminal has hung up."""
    try:
        os.write(descriptor, b"")
    except OSError as error:
        if error.errno == errno.EBADF:
            raise


def _reopen(descriptor: int) -> int | None:
    """Open a pipe or terminal again in nonblocking mode, or return None if that fails."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
    with suppress(OSError):
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    return None


class Printer:
    """Prints to a text stream such as sys.stderr, without waiting for its reader.

    A stream without a descriptor, such as a notebook's, is written to normally.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._writer: Writer | None = None

    def print(self, text: str, limit_s: float = 0.0) -> bool:
        """Print text, without adding a line ending.

        Args:
            text: The text to print, including its line endings.
            limit_s: Maximum seconds to wait for the reader.

        Returns:
            Whether the text was printed.
        """
        data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
        try:
            if self._writer is None and type(self._stream) is io.TextIOWrapper:
                with suppress(io.UnsupportedOperation):  # an in-memory stream has no descriptor
                    self._writer = Writer(self._stream.fileno())
            if self._writer:
                return self._writer.write(data, limit_s)
            printable = data.decode(self._stream.encoding or "utf-8")
            print(printable, end="", file=self._stream, flush=True)
        except OSError:  # the reader has closed the pipe
            return False
        return True

    def close(self) -> None:
        """Close the printer's own descriptor; the stream stays open."""
        writer, self._writer = self._writer, None
        if writer:
            writer.close()
