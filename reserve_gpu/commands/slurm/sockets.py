"""Sockets that connect a client to its kernel and reject other users.

With the `ipc` transport, the sockets are files in a folder that only their user can enter. Some
clients support only `tcp`, and any user on the machine can connect to a TCP port. So this process
accepts the TCP connections itself, and passes a connection on only if the Linux kernel reports that
the other end belongs to this user or to root.
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

# maximum length of a socket's path, in bytes: https://man7.org/linux/man-pages/man7/unix.7.html
LONGEST_PATH = 107
LONGEST_NAME = "kernel-65535"  # the longest file name that a socket can have
PREFIX = "reserve_gpu-"
PRIVATE = 0o700
BACKLOG = 4096  # default of net.core.somaxconn, which limits this value
CHUNK_SIZE = 1 << 20  # maximum number of bytes to read at a time
RETRY_S = 0.1  # seconds between attempts to accept a connection when no descriptor is available


def socket_root() -> str:
    """Return the parent directory for socket folders.

    This is the default directory for temporary files, or /tmp if the default directory's path is
    too long for sockets.

    Raises:
        OSError: There is no usable directory for temporary files.
    """
    default = os.path.abspath(tempfile.gettempdir())
    longest = os.path.join(default, f"{PREFIX}12345678", LONGEST_NAME)
    return default if len(os.fsencode(longest)) <= LONGEST_PATH else "/tmp"  # noqa: S108


def make_folder() -> str:
    """Create a socket folder that only this user can access.

    Raises:
        OSError: The folder can't be created.
    """
    return tempfile.mkdtemp(prefix=PREFIX, dir=socket_root())


def require_private(folder: str) -> None:
    """Make sure that a folder from `make_folder` still exists and is private.

    If a /tmp cleaner has removed the folder, create it again.

    Raises:
        OSError: The folder belongs to another user, other users can enter it, or it can't be
            created.
    """
    with suppress(FileExistsError):
        os.mkdir(folder, PRIVATE)
    status = os.lstat(folder)
    is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == PRIVATE
    if not is_private or status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a private folder owned by this user")


def remove(base: str, ports: Iterable[int]) -> None:
    """Remove the sockets of a client that has exited, if `make_folder` created their folder."""
    folder = os.path.dirname(base)
    if os.path.basename(folder).startswith(PREFIX):
        with suppress(OSError):
            for port in ports:
                os.unlink(f"{base}-{port}")
            os.rmdir(folder)


class Gate:
    """Accepts TCP connections from this user and from root, and connects them to Unix sockets.

    Each port has its own thread, so a flood of connections from other users does not block the
    event loop. The threads empty the accept queues fast enough for the client to connect.
    """

    def __init__(self, refused: Callable[[int | None], None]) -> None:
        """Create a gate that has no ports yet.

        Args:
            refused: A function that is called in a thread the first time that a connection is
                refused. Its argument is the other user's UID, or None if the UID is unknown.
        """
        self._refused, self._has_refused = refused, False
        self._listeners = list[tuple[socket.socket, str]]()
        self._threads = list[Thread]()
        self._connections = set[asyncio.Task[None]]()
        self._is_finished = False

    def listen(self, ip: str, port: int, path: str) -> None:
        """Listen on a TCP port for connections to a Unix socket.

        Args:
            ip: The IPv4 address to listen on, or `*` for all addresses.
            port: The TCP port.
            path: The path of the Unix socket.

        Raises:
            OSError: The address or the port is not available.
        """
        listening = socket.create_server(("" if ip == "*" else ip, port), backlog=BACKLOG)
        self._listeners.append((listening, path))

    def admit(self) -> None:
        """Start accepting connections on all ports."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            self._threads.append(Thread(target=self._accept, args=(loop, *listener), daemon=True))
            self._threads[-1].start()

    def _accept(self, loop: asyncio.AbstractEventLoop, listening: socket.socket, path: str) -> None:
        find = socket_owners.finder(listening)
        while not self._is_finished:
            try:
                client, address = listening.accept()
            except OSError:
                time.sleep(RETRY_S)
                continue
            uid = _owner(find, client, address)
            if uid in {0, os.geteuid()}:
                loop.call_soon_threadsafe(self._connect, client, path)
                continue
            client.close()
            if not self._has_refused:  # one call per connection would flood the event loop
                loop.call_soon_threadsafe(self._report, uid)

    def _connect(self, client: socket.socket, path: str) -> None:
        client.setblocking(False)  # noqa: FBT003 - the standard library's signature
        task = asyncio.ensure_future(_bridge(client, path))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    def _report(self, uid: int | None) -> None:
        if not self._has_refused:
            self._has_refused = True
            # Use a thread, because looking up a user's name can take minutes.
            Thread(target=self._refused, args=(uid,), daemon=True).start()

    async def finish(self, limit_s: float) -> None:
        """Stop listening, and wait until all data from the Unix sockets has been passed on.

        Args:
            limit_s: The maximum wait, in seconds.
        """
        self._is_finished = True
        for listening, _ in self._listeners:
            listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that is blocked in accept()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        for listening, _ in self._listeners:
            listening.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=limit_s)


def _owner(
    find: socket_owners.Finder, client: socket.socket, address: socket_owners.Address
) -> int | None:
    """Return the UID of the user who connected, or None if it is unknown."""
    with suppress(OSError):
        return socket_owners.owner(find, address, client.getsockname())
    return None


async def _bridge(client: socket.socket, path: str) -> None:
    """Copy data between a TCP connection and a Unix socket until either one is closed."""
    writers, copies = list[asyncio.StreamWriter](), list[asyncio.Future[None]]()
    try:
        client_reader, client_writer = await asyncio.open_connection(sock=client, limit=CHUNK_SIZE)
        writers.append(client_writer)
        kernel_reader, kernel_writer = await asyncio.open_unix_connection(path, limit=CHUNK_SIZE)
        writers.append(kernel_writer)
        copies = [
            asyncio.ensure_future(_copy(client_reader, kernel_writer)),
            asyncio.ensure_future(_copy(kernel_reader, client_writer)),
        ]
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    except OSError:
        client.close()
    finally:
        for copy in copies:
            copy.cancel()
        for writer in writers:
            writer.close()
    for writer in writers:
        with suppress(OSError):
            await writer.wait_closed()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(CHUNK_SIZE):
            target.write(data)
            await target.drain()
