"""Listens for what this user, or root, asks of this process from elsewhere.

A thread of its own waits at the socket, and costs nothing meanwhile.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.locks import descriptors
from reserve_gpu.model import untrusted
from reserve_gpu.reservation import socket_directory
from reserve_gpu.reservation.remote_release import LIMIT
from reserve_gpu.system import executor, procfs
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from collections.abc import Callable

    Answerer = Callable[[dict[str, Any]], dict[str, Any]]

HEARD_S = 1.0  # in which one that has connected says what it wants
BACKLOG = 128  # who have connected and are not heard yet
SOCKET_MODE = 0o600
ATTEMPTS = 10  # at a folder: other processes of this user remove it while it is empty


class Listener:
    """Answers what is asked of this process.

    answer: returns the answer to a request; called on a thread of the listener's.
    """

    def __init__(self, answer: Answerer) -> None:
        self._answer = answer
        self._descriptor = descriptors.NONE

    def start(self, open_folder: Callable[[], int]) -> None:
        """Listen from now on.

        Args:
            open_folder: Returns the descriptor of the folder for the socket.

        Raises:
            OSError, LockError: The folder or the socket can't be created.
            NoThreadError: The process can't start a thread.
        """
        for _ in range(ATTEMPTS):
            with suppress(FileNotFoundError):
                self._start(open_folder)
                return
        self._start(open_folder)

    def _start(self, open_folder: Callable[[], int]) -> None:
        name = f"{socket_directory.sockets_of(os.getpid())}{os.urandom(8).hex()}"
        with no_fork, ExitStack() as failed:  # a fork closes the descriptors in the child
            folder = descriptors.remember(open_folder())
            failed.callback(descriptors.close, folder)
            socket_directory.sweep(folder)
            own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._descriptor = descriptors.remember(own.fileno())
            failed.callback(lambda: descriptors.close(own.detach()))
            path = f"/proc/self/fd/{folder}/{name}"  # the kernel takes no long paths
            own.bind(path)
            failed.callback(os.unlink, name, dir_fd=folder)
            os.chmod(path, SOCKET_MODE)  # the umask may have taken permissions away
            own.listen(BACKLOG)
            executor.start(self._serve, own, folder, name)
            failed.pop_all()

    def stop(self) -> None:
        """Listen no more; the thread ends."""
        with suppress(OSError), no_fork:
            if descriptors.opening(self._descriptor):
                with socket.socket(fileno=os.dup(self._descriptor)) as own:
                    own.shutdown(socket.SHUT_RDWR)

    def _serve(self, own: socket.socket, folder: int, name: str) -> None:
        while True:
            try:
                connection, _ = own.accept()
            except OSError:  # it was stopped, or other code has closed all descriptors
                break
            with connection, suppress(Exception):  # of a client, or of what it asked for
                connection.settimeout(HEARD_S)
                request = untrusted.parsed(connection.recv(LIMIT))
                by = procfs.user_name(socket_directory.peer(connection)[1])
                answer = self._answer({**request, "by": by})
                connection.sendall(json.dumps(answer).encode())
        descriptors.close(own.detach())
        if descriptors.opening(folder):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            socket_directory.remove_if_empty(folder)
            descriptors.close(folder)
