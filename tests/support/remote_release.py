"""Requests to release the devices of other processes, and code for processes that listen."""

from __future__ import annotations

import pwd
from typing import TYPE_CHECKING

from tests.support.processes import US
from tests.support.users import as_user

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from tests.support.machine import Child, Machine

# Code for a child process: listen for requests, and collect them in `requests`.
LISTEN = """
from reserve_gpu.features.remote_requests.handler import Listener
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.reservation import socket_directory
with LockDirectory(): pass
requests = []
def answer(request):
    requests.append(request)
    return {'answer': 'RELEASED'}
listener = Listener(answer)
def start():
    try: listener.start(socket_directory.open_first)
    except OSError: listener.start(socket_directory.open_any)
start()
"""
ASK = "from reserve_gpu.reservation.remote_release import ask\nask({}, {}, {{'do': 'release'}})"
RELEASED = {"answer": "RELEASED"}


def release(machine: Machine, *words: str, user: str | None = None) -> CompletedProcess[str]:
    """Run `reserve-gpu release`, as another user if one is given."""
    return machine.command(*(as_user(user) if user else ()), *US, "release", *words)


def is_heard(asking: Child, listening: Child, user: str) -> bool:
    """Return whether a process of that user answers the request of another process."""
    return bool(asking.run(ASK.format(listening.pid, uid_of(user))).value == RELEASED)


def uid_of(user: str) -> int:
    """Return a user's ID."""
    return pwd.getpwnam(user).pw_uid
