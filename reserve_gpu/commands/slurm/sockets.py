"""The sockets at which a client reaches its kernel; no other user's process gets to one of them.

Over `ipc` they are files in a folder that only their user can enter. Some clients know `tcp` alone,
and any user of the machine can connect to a TCP port: there each connection is accepted here, and
passed on only if the kernel names this user as the owner of its other end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The longest path of a socket in bytes: https://man7.org/linux/man-pages/man7/unix.7.html
LONGEST_PATH = 107
LONGEST_NAME = "kernel-65535"
PREFIX = "reserve_gpu-"
PRIVATE = 0o700
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # Documentation/networking/proc_net_tcp.rst
LOCAL, REMOTE, STATE, UID, INODE = 1, 2, 3, 7, 9  # columns of such a table
ESTABLISHED = "01"
MAPPED = "0000000000000000FFFF0000"  # in front of an IPv4 address in the table of IPv6
BACKLOG = 128
CHUNK = 1 << 20
BUSY_S = 0.1  # after a connection that could not be accepted, as no descriptor was left

Address = tuple[str, int]


def place() -> str:
    """Return the directory in which to make a folder for sockets. Raises OSError."""
    default = os.path.abspath(tempfile.gettempdir())
    longest = os.path.join(default, f"{PREFIX}12345678", LONGEST_NAME)
    return default if len(os.fsencode(longest)) <= LONGEST_PATH else "/tmp"  # noqa: S108


def make_folder() -> str:
    """Make a folder for sockets that only this user can enter. Raises OSError."""
    return tempfile.mkdtemp(prefix=PREFIX, dir=place())


def require_own(folder: str) -> None:
    """Make a folder of `make_folder` again if a cleaner has removed it.

    Raises OSError if another user has made one of that name, or can enter it.
    """
    with suppress(FileExistsError):
        os.mkdir(folder, PRIVATE)
    status = os.lstat(folder)
    is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == PRIVATE
    if not is_private or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a private folder of this user")


def remove(base: str, ports: Iterable[int]) -> None:
    """Remove the sockets of a client that has gone, and the folder that was made for them."""
    folder = os.path.dirname(base)
    if os.path.basename(folder).startswith(PREFIX):
        with suppress(OSError):
            for port in ports:
                os.unlink(f"{base}-{port}")
            os.rmdir(folder)


def owner(client: Address, server: Address) -> int | None:
    """Return the UID of the process at the other end of a TCP connection, as the kernel says.

    None if that process is on another machine, or has closed its end: the kernel then gives UID 0.

    Args:
        client: The IPv4 address and port of the other end.
        server: Those of this end.
    """
    ends = tuple(map(_as_listed, (client, server)))
    pairs = (ends, tuple(f"{MAPPED}{end}" for end in ends))
    for table in TABLES:
        with suppress(OSError), open(table, encoding="ascii") as lines:
            for line in lines:
                row = line.split()
                if (row[LOCAL], row[REMOTE]) in pairs and row[STATE] == ESTABLISHED:
                    return int(row[UID]) if row[INODE] != "0" else None
    return None


def _as_listed(address: Address) -> str:
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"


class Gate:
    """Accepts TCP connections of this user and of root, and passes them on to Unix sockets.

    refused: Called with the UID of each other connection's owner, None if it is unknown.
    """

    def __init__(self, refused: Callable[[int | None], None]) -> None:
        self._refused = refused
        self._doors = list[tuple[socket.socket, str]]()
        self._passing = set[asyncio.Task[None]]()

    def listen(self, ip: str, port: int, path: str) -> None:
        """Listen at a TCP port for the Unix socket of that path. Raises OSError."""
        listening = socket.create_server(("" if ip == "*" else ip, port), backlog=BACKLOG)
        listening.setblocking(False)  # noqa: FBT003 - Python's own
        self._doors.append((listening, path))

    async def admit(self) -> None:
        """Accept connections; never return if there are ports."""
        await asyncio.gather(*(self._admit(*door) for door in self._doors))

    async def _admit(self, listening: socket.socket, path: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(BUSY_S)
                continue
            uid = self._owner(client, address)
            if uid not in {0, os.geteuid()}:
                client.close()
                self._refused(uid)
                continue
            task = asyncio.ensure_future(_pass_on(client, path))
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)

    async def finish(self, limit_s: float) -> None:
        """Listen no more, and wait until what the Unix sockets have sent last was passed on."""
        for listening, _ in self._doors:
            listening.close()
        if self._passing:
            await asyncio.wait(self._passing, timeout=limit_s)

    @staticmethod
    def _owner(client: socket.socket, address: Address) -> int | None:
        with suppress(OSError):
            return owner(address, client.getsockname())
        return None


async def _pass_on(client: socket.socket, path: str) -> None:
    """Connect a TCP connection with a Unix socket until one of them is closed."""
    writers, ways = list[asyncio.StreamWriter](), list[asyncio.Future[None]]()
    try:
        near, to_near = await asyncio.open_connection(sock=client, limit=CHUNK)
        writers.append(to_near)
        far, to_far = await asyncio.open_unix_connection(path, limit=CHUNK)
        writers.append(to_far)
        ways = [asyncio.ensure_future(_copy(*way)) for way in ((near, to_far), (far, to_near))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    except OSError:
        client.close()
    finally:
        for way in ways:
            way.cancel()
        for writer in writers:
            writer.close()
    for writer in writers:
        with suppress(OSError):
            await writer.wait_closed()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
