"""Listens for what this user, or root, asks of this process from elsewhere.

A thread of its own waits at the socket, and costs nothing meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import calls, foreign, proc
from reserve_gpu.core.elsewhere import FOLDER, LIMIT, names_of, opened, peer
from reserve_gpu.errors import LockError, NoThreadError
from reserve_gpu.forks import no_fork
from reserve_gpu.locks import descriptors
from reserve_gpu.locks.directory import default_path

if TYPE_CHECKING:
    from collections.abc import Callable

    Answerer = Callable[[dict[str, Any]], dict[str, Any]]

HEARD_S = 1.0  # in which one that has connected says what it wants
BACKLOG = 128  # who have connected and are not heard yet
OWN_FOLDER = 0o700


class Listener:
    """Answers what is asked of this process.

    answer: returns the answer to a request; called on a thread of the listener's.
    """

    def __init__(self, answer: Answerer) -> None:
        self._answer = answer
        self._descriptor = descriptors.NONE

    def start(self) -> None:
        """Listen from now on; where that can't be had, nobody is heard."""
        with suppress(OSError, LockError), no_fork:  # a fork closes it in the child
            folder = _own_folder()
            # The kernel takes no long names.
            path = f"/proc/self/fd/{folder}/{names_of(os.getpid())}{os.urandom(8).hex()}"
            own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._descriptor = descriptors.remember(own.fileno())
            try:
                own.bind(path)
                own.listen(BACKLOG)
                calls.start(self._serve, own, os.path.realpath(path))
            except (OSError, NoThreadError):
                descriptors.close(own.detach())
            finally:
                os.close(folder)

    def stop(self) -> None:
        """Listen no more; the thread ends."""
        with suppress(OSError), no_fork:
            if descriptors.opening(self._descriptor):
                with socket.socket(fileno=os.dup(self._descriptor)) as own:
                    own.shutdown(socket.SHUT_RDWR)

    def _serve(self, own: socket.socket, path: str) -> None:
        while True:
            try:
                connection, _ = own.accept()
            except OSError:  # it was stopped, or other code has closed all descriptors
                break
            with connection, suppress(Exception):  # of a client, or of what it asked for
                connection.settimeout(HEARD_S)
                request = foreign.parsed(connection.recv(LIMIT))
                answer = self._answer({**request, "by": proc.user_name(peer(connection)[1])})
                connection.sendall(json.dumps(answer).encode())
        descriptors.close(own.detach())
        with suppress(OSError):
            os.unlink(path)


def _own_folder() -> int:
    """Open the folder for sockets of this user's, without those of processes that have ended.

    Raises OSError, LockError.
    """
    first, uid = f"{default_path()}/{FOLDER.format(uid=os.geteuid())}", os.geteuid()
    try:
        with suppress(FileExistsError):
            os.mkdir(first, OWN_FOLDER)
        folder = opened(first, uid)
    except PermissionError:
        another = f"{first}-{os.urandom(8).hex()}"
        os.mkdir(another, OWN_FOLDER)
        folder = opened(another, uid)
    for name in os.listdir(folder):
        pid = re.fullmatch(rf"{proc.pid_namespace()}-([0-9]{{1,10}})-[0-9a-f]+", name)
        if pid and proc.uid_of(int(pid[1])) is None:
            os.unlink(name, dir_fd=folder)
    return folder
