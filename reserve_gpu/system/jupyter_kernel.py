"""This process's Jupyter kernel or IPython shell: its connection file, and the cells that it runs.

The IPython extension reports when a cell starts or ends. When a lease expires, the lease timer
checks these reports, so that it does not take the GPU away from a running cell.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from reserve_gpu.model import untrusted
from reserve_gpu.system import executor, process_identity, procfs, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def connection_file(words: Sequence[str] = ()) -> str | None:
    """Return the path of this kernel's connection file, or None outside of a Jupyter kernel.

    For a kernel that was started over ssh, the result is the kernel's id instead, because a restart
    removes the connection file.

    Args:
        words: The kernel's command line, if this process is about to exec the kernel.
    """
    path = _connection_file(words)
    return path and (remote_description().get("id") or path)


def _connection_file(words: Sequence[str]) -> str | None:
    for index, word in enumerate(words):
        if word == "-f" and words[index + 1 :]:
            return os.path.abspath(words[index + 1])
        if word.startswith(("-f=", "--f=", "--IPKernelApp.connection_file=")):
            return os.path.abspath(word.partition("=")[2])
    kernel = process_identity.application("ipykernel.kernelapp", "IPKernelApp")
    path = getattr(kernel, "abs_connection_file", None)
    return os.path.abspath(path) if path else None


def remote_description() -> dict[str, str]:
    """Return the description that this kernel was given when it was started over ssh.

    The machine that starts the kernel passes the description in RESERVE_GPU_STARTED. The field `id`
    identifies the kernel across restarts, `notebook` is the notebook's path, `machine` is the
    user's machine, and `wishes` contains the request options, separated by NUL characters. When the
    kernel starts, it adds its pid and start time as `pid` and `began`, so that child processes that
    inherit the variable ignore it. Older versions did not add `began`.

    Returns:
        The fields, or an empty dict if this kernel was not started over ssh.
    """
    text = os.environ.get(settings.STARTED)
    if not text:
        return {}
    with suppress(ValueError):  # treat a malformed value as unset
        fields = untrusted.parsed(bytes.fromhex(text))
        pid, _, began = procfs.stamp(os.getpid()).partition(" ")
        if not isinstance(fields, dict) or fields.get("pid") not in (None, pid):
            return {}
        if fields.get("began") in (None, "", began):
            return {name: value for name, value in fields.items() if isinstance(value, str)}
    return {}


def encode_description(fields: Mapping[str, str]) -> str:
    """Encode a kernel's description as a value of RESERVE_GPU_STARTED."""
    return json.dumps(dict(fields)).encode().hex()


def origin() -> str | None:
    """Return the machine that started this kernel over ssh, or None for a local kernel."""
    return remote_description().get("machine")


# -- the cells -------------------------------------------------------------------------------------

TURN_S = 0.2  # seconds to wait for a queued cell to start


class Cells:
    """Tracks the cells that an IPython shell runs.

    Attributes:
        shell: The shell, or None if no shell reports its cells.
        quiet: A lock. While a thread holds it, no cell can start or end.
        is_running: Whether a cell is running.
        last: When the user's last cell started or ended, on the time.monotonic() clock.
        began: When the last cell started, in seconds since the epoch.
        listeners: Functions that are called whenever a cell ends.
        has_lock_keeper: Whether a lock keeper held devices for this kernel when its first cell
            ended; None before that. No lock keeper starts later, because a lock keeper starts
            before the kernel that it waits for.
    """

    def __init__(self) -> None:
        self.shell: Any = None
        self.quiet = threading.RLock()
        self.is_running = False
        self.last = time.monotonic()
        self.began = time.time()
        self.listeners: list[Callable[[], object]] = []
        self.has_lock_keeper: bool | None = None
        self._code: str | None = None  # the running cell's code, or None if unknown

    def begin(self, info: Any) -> None:
        """Record that a cell has started (IPython's event pre_run_cell).

        A nested cell counts as part of the outer cell.
        """
        with self.quiet:
            if not self.is_running:
                self.is_running, self._code = True, info.raw_cell
                self.began = time.time()
            self._record_activity(info)

    def end(self, result: Any) -> None:
        """Record that a cell has ended (IPython's event post_run_cell).

        Args:
            result: IPython's execution result, or None if the cell was interrupted while it was
                awaiting something.
        """
        info = result and result.info
        with self.quiet:
            if info is None or self._code in (None, info.raw_cell):
                self.is_running, self._code = False, None
            self._record_activity(info)
        for listener in [*self.listeners]:
            listener()

    def watch(self, shell: Any) -> None:
        """Start watching a shell's cells, even if a cell is already running.

        A running cell is detected by sys.displayhook, which IPython replaces while a cell is
        running.
        """
        with self.quiet:
            self.shell = shell
            self.is_running, self._code = sys.displayhook is shell.displayhook, None

    def leave(self) -> None:
        """Stop watching cells."""
        with self.quiet:
            self.shell, self.is_running = None, False

    def stop_shell(self, is_due: Callable[[], bool]) -> None:
        """Exit the shell normally, so that its exit handlers run.

        Args:
            is_due: A function that returns whether the shell still has to exit. It is called just
                before the exit, because a cell might have started in the meantime.
        """
        with suppress(AttributeError):  # the shell is neither ipykernel's nor IPython's
            if hasattr(self.shell, "kernel"):
                loop = self.shell.kernel.io_loop
                # Wait a moment, so that a queued cell starts first. That cell might extend the
                # lease, and stopping the loop would abort a cell that is awaiting something.
                loop.add_callback(
                    loop.call_later, TURN_S, lambda: loop.stop() if is_due() else None
                )
            else:  # if the process were killed, the terminal would no longer echo input
                self.shell.confirm_exit = False
                prompt = self.shell.pt_app.app
                end = partial(prompt.exit, exception=EOFError())
                prompt.loop.call_soon_threadsafe(lambda: end() if is_due() else None)

    def _record_activity(self, info: Any) -> None:
        # Front ends also run code of their own, which they do not store in the history. Such code
        # does not count as user activity.
        if info is None or info.store_history:
            self.last = time.monotonic()


# The `Cells` of each process, by pid. A forked child inherits the entry of its parent.
_cells: dict[int, Cells] = executor.survive_reload("cells", dict)


def kernels_file() -> str | None:
    """Return this kernel's `connection_file`, or None in a forked child."""
    return connection_file() if cells().shell else None


def cells() -> Cells:
    """Return this process's `Cells`. A forked child does not share its parent's `Cells`."""
    pid = os.getpid()
    return _cells.get(pid) or _cells.setdefault(pid, Cells())
