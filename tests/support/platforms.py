"""Start processes in containers, which are namespaces of their own."""

from __future__ import annotations

import os
import shlex
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from reserve_gpu.system import procfs
from tests.support.machine import Child, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator


CONTAINER = ("unshare", "--pid", "--mount-proc", "--kill-child")

on_a_host = pytest.mark.skipif(
    procfs.pid_namespace() != procfs.INITIAL_PID_NAMESPACE,
    reason="in a container, an empty process list is not reliable",
)


@contextmanager
def behind(machine: Machine, *prefix: str, script: str = "", **extra: str) -> Iterator[Child]:
    """Start a child behind a command such as unshare, after a script that mounts.

    In the script, $L is the lock directory.
    """
    if os.geteuid() or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("namespaces need root, and a system that allows them")
    machine.locks.mkdir(exist_ok=True)
    script = f'set -e; L={shlex.quote(str(machine.locks))}; {script}\nexec "$@"'
    child = Child(machine.environ(**extra), machine.folder, *prefix, "sh", "-c", script, "sh")
    try:
        yield child
    finally:
        child.kill()


def pid_outside(child: Child) -> int:
    """Return the pid of a child in a container, as processes outside see it."""
    (process,) = psutil.Process(child.process.pid).children()
    return process.pid
