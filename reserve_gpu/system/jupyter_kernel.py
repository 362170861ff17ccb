"""The Jupyter kernel or IPython shell of this process: its connection file and its cells.

The extension reports when IPython starts and ends a cell. When a lease expires, its timer uses this
to avoid taking the GPU away from a running cell.
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

    For a kernel that was started over ssh, the result is the kernel's id, because a restart removes
    the connection file.

    Args:
        words: The command line of the kernel that this process becomes by exec, if any.
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
    """Return the description of this kernel, written by the machine that started it over ssh.

    The description comes from RESERVE_GPU_STARTED. The field `id` identifies the kernel across
    restarts, `notebook` is the notebook's path, `machine` is the user's machine, and `wishes`
    contains the options, separated by NUL. Once the kernel has started, `pid` and `began` are its
    pid and start time, so that a child process that inherits the variable ignores it. Older
    versions wrote no `began`.

    Returns:
        The fields; empty for a kernel that was not started over ssh.
    """
    with suppress(ValueError):  # treat a malformed value as if it were not set
        fields = untrusted.parsed(bytes.fromhex(os.environ.get(settings.STARTED, "")))
        pid, _, began = procfs.stamp(os.getpid()).partition(" ")
        if not isinstance(fields, dict) or fields.get("pid") not in (None, pid):
            return {}
        if fields.get("began") in (None, "", began):
            return {name: value for name, value in fields.items() if isinstance(value, str)}
    return {}


def encode_description(fields: Mapping[str, str]) -> str:
    """Return the value of RESERVE_GPU_STARTED that describes a kernel with these fields."""
    return json.dumps(dict(fields)).encode().hex()


def origin() -> str | None:
    """Return the machine that started this kernel over ssh, or None if it was started locally."""
    return remote_description().get("machine")


# -- the cells -------------------------------------------------------------------------------------

TURN_S = 0.2  # seconds within which a queued cell starts


class Cells:
    """The activity of an IPython shell.

    Attributes:
        shell: The shell, or None if no shell reports its cells.
        quiet: A lock. While a thread holds it, no cell starts or ends.
        is_running: Whether a cell is running.
        last: The time by time.monotonic() when the user's last cell started or ended.
        began: The start time of the last cell in seconds since the epoch.
        listeners: Functions that are called at the end of each cell.
    """

    def __init__(self) -> None:
        self.shell: Any = None
        self.quiet = threading.RLock()
        self.is_running = False
        self.last = time.monotonic()
        self.began = time.time()
        self.listeners: list[Callable[[], object]] = []
        self._code: str | None = None  # code of the running cell; None if unknown

    def begin(self, info: Any) -> None:
        """Record the start of a cell (pre_run_cell); a nested cell is part of the outer cell."""
        with self.quiet:
            if not self.is_running:
                self.is_running, self._code = True, info.raw_cell
                self.began = time.time()
            self._record_activity(info)

    def end(self, result: Any) -> None:
        """Record the end of a cell (post_run_cell).

        Args:
            result: IPython's execution result, or None if the cell was interrupted in an await.
        """
        info = result and result.info
        with self.quiet:
            if info is None or self._code in (None, info.raw_cell):
                self.is_running, self._code = False, None
            self._record_activity(info)
        for listener in [*self.listeners]:
            listener()

    def watch(self, shell: Any) -> None:
        """Start to watch the cells of a shell, even if a cell is already running.

        A running cell is recognized by sys.displayhook, which IPython replaces while a cell runs.
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
            is_due: A function that returns whether the shell must still exit. It is called again
                just before the exit, because a cell may have started in the meantime.
        """
        with suppress(AttributeError):  # a shell other than ipykernel's or IPython's
            if hasattr(self.shell, "kernel"):
                loop = self.shell.kernel.io_loop
                # Wait a moment, so that a queued cell starts first. The cell may extend the lease,
                # and stopping the loop would abort a cell that awaits something.
                loop.add_callback(
                    loop.call_later, TURN_S, lambda: loop.stop() if is_due() else None
                )
            else:  # a terminal, which would lose its echo if the process were killed
                self.shell.confirm_exit = False
                prompt = self.shell.pt_app.app
                end = partial(prompt.exit, exception=EOFError())
                prompt.loop.call_soon_threadsafe(lambda: end() if is_due() else None)

    def _record_activity(self, info: Any) -> None:
        # Front ends also run their own code silently, and do not store it in the history.
        if info is None or info.store_history:
            self.last = time.monotonic()


# The cells by process id. After a fork, the entry of the parent process remains.
_cells: dict[int, Cells] = executor.survive_reload("cells", dict)


def kernels_file() -> str | None:
    """Return the connection file of the kernel in this process; None in a forked child."""
    return connection_file() if cells().shell else None


def cells() -> Cells:
    """Return the cells of this process; a forked child does not share those of its parent."""
    pid = os.getpid()
    return _cells.get(pid) or _cells.setdefault(pid, Cells())
