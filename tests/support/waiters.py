"""Processes that wait in the queue, and the state of the queue by the kernel's data."""

from __future__ import annotations

import json
import os
import select
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.machine import LIMIT_S
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Answer, Child, Machine

LONG_S = 100  # no wait takes so long in a test that passes


class Waiter:
    """A process that waits in the queue and records each of its checks."""

    def __init__(
        self, machine: Machine, child: Child, arguments: str = "", limit_s: float = LONG_S
    ) -> None:
        self.child, self.pid = child, child.pid
        self._answer: Answer | None = None
        self._looks = machine.folder / f"checks of {child.pid}"
        child.run(f"looks = open({str(self._looks)!r}, 'w')")
        child.run(
            "def look(waiting):\n"
            " states = [row.state.value for row in waiting.rows]\n"
            " print(waiting.place, *states, file=looks, flush=True)"
        )
        child.send(
            f"reserve_gpu.reserve({arguments or None}, wait={limit_s}, progress=look)"
            ".environ['CUDA_VISIBLE_DEVICES']"
        )
        wait_for(self.looks)

    def answer(self) -> Answer:
        """Return the result of the request, after the end of the wait."""
        self._answer = self._answer or self.child.answer()
        return self._answer

    def looks(self) -> list[str]:
        """Return the place in the queue and the state of each device, for each check so far."""
        return self._looks.read_text().splitlines()

    def sees(self, *words: object) -> None:
        """Wait until the last check has found this place and these states of the devices."""
        wait_for(lambda: self.looks()[-1] == " ".join(map(str, words)))


def queued(machine: Machine) -> list[int]:
    """Return the PIDs of the waiters with locked tickets, in the order of the queue."""
    tickets = []
    for path in machine.locks.glob("queue-*"):
        with suppress(
            ValueError, KeyError, TypeError
        ):  # a new waiter has not written its ticket yet
            pid = json.loads(path.read_bytes())["pid"]
            if has_locked(path, pid):
                tickets.append((path.stat().st_mtime_ns, pid))
    return [pid for _, pid in sorted(tickets)]


def has_locked(path: Path, pid: int) -> bool:
    """Return whether the process has locked the file, by the kernel's data."""
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{number}") == str(path):
                    return "FLOCK" in Path(f"/proc/{pid}/fdinfo/{number}").read_text()
    return False


@contextmanager
def stopped(machine: Machine, pid: int) -> Iterator[None]:
    """Stop a waiting process while it does not hold the mutex, and continue it at the end."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        if not has_locked(machine.locks / "mutex.lock", pid):
            break
        os.kill(pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def read(terminal: int) -> str:
    """Return the next output of a terminal, or an empty text at its end."""
    assert select.select([terminal], [], [], LIMIT_S)[0]
    try:
        return os.read(terminal, 65536).decode()
    except OSError:  # EIO: no process has the other end open
        return ""
