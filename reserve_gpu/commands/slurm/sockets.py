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
import tempfile
import time
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

from reserve_gpu.commands.slurm import socket_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The longest path of a socket in bytes: https://man7.org/linux/man-pages/man7/unix.7.html
LONGEST_PATH = 107
LONGEST_NAME = "kernel-65535"
PREFIX = "reserve_gpu-"
PRIVATE = 0o700
BACKLOG = 4096  # the default of net.core.somaxconn, which is the limit
CHUNK = 1 << 20
BUSY_S = 0.1  # after a connection that could not be accepted, as no descriptor was left


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


class Gate:
    """Accepts TCP connections of this user and of root, and passes them on to Unix sockets.

    Each port has its own thread. A flood of other users' connections does not block the event loop,
    and the threads empty the ports' queues fast enough for the client to get in.

    refused: Called once in a thread, with the UID of the first refused user, None if unknown.
    """

    def __init__(self, refused: Callable[[int | None], None]) -> None:
        self._refused, self._has_refused = refused, False
        self._doors = list[tuple[socket.socket, str]]()
        self._threads = list[Thread]()
        self._passing = set[asyncio.Task[None]]()
        self._is_over = False

    def listen(self, ip: str, port: int, path: str) -> None:
        """Listen at a TCP port for the Unix socket of that path. Raises OSError."""
        listening = socket.create_server(("" if ip == "*" else ip, port), backlog=BACKLOG)
        self._doors.append((listening, path))

    def admit(self) -> None:
        """Start to accept connections."""
        loop = asyncio.get_running_loop()
        for door in self._doors:
            self._threads.append(Thread(target=self._admit, args=(loop, *door), daemon=True))
            self._threads[-1].start()

    def _admit(self, loop: asyncio.AbstractEventLoop, listening: socket.socket, path: str) -> None:
        find = socket_owners.finder(listening)
        while not self._is_over:
            try:
                client, address = listening.accept()
            except OSError:
                time.sleep(BUSY_S)
                continue
            uid = _owner(find, client, address)
            if uid in {0, os.geteuid()}:
                loop.call_soon_threadsafe(self._let_in, client, path)
                continue
            client.close()
            if not self._has_refused:  # a call for each connection would flood the loop
                loop.call_soon_threadsafe(self._report, uid)

    def _let_in(self, client: socket.socket, path: str) -> None:
        client.setblocking(False)  # noqa: FBT003 - Python's own
        task = asyncio.ensure_future(_pass_on(client, path))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    def _report(self, uid: int | None) -> None:
        if not self._has_refused:
            self._has_refused = True
            # In a thread, because looking up that user's name may take minutes.
            Thread(target=self._refused, args=(uid,), daemon=True).start()

    async def finish(self, limit_s: float) -> None:
        """Stop listening, and wait until the last data of the Unix sockets has been passed on."""
        self._is_over = True
        for listening, _ in self._doors:
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        for listening, _ in self._doors:
            listening.close()
        if self._passing:
            await asyncio.wait(self._passing, timeout=limit_s)


def _owner(
    find: socket_owners.Finder, client: socket.socket, address: socket_owners.Address
) -> int | None:
    with suppress(OSError):
        return socket_owners.owner(find, address, client.getsockname())
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
