"""The Jupyter kernel, or the shell, that this process is: its connection file and its cells.

The extension reports when IPython begins and ends a cell. A lease that expires asks here, because
it must not take the GPU away from a running cell.
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
    """Return the path of this kernel's connection file, None if this is no kernel of Jupyter's.

    Of a kernel that was started by ssh it is the name that it has been given: over a restart its
    connection file is removed.
    words: the command that this process becomes, if that is a kernel.
    """
    path = _connection_file(words)
    return path and (started().get("id") or path)


def _connection_file(words: Sequence[str]) -> str | None:
    for place, word in enumerate(words):
        if word == "-f" and words[place + 1 :]:
            return os.path.abspath(words[place + 1])
        if word.startswith(("-f=", "--f=", "--IPKernelApp.connection_file=")):
            return os.path.abspath(word.partition("=")[2])
    kernel = process_identity.application("ipykernel.kernelapp", "IPKernelApp")
    path = getattr(kernel, "abs_connection_file", None)
    return os.path.abspath(path) if path else None


def started() -> dict[str, str]:
    """Return what the machine that has started this kernel by ssh has said of it; mostly nothing.

    `id` names the kernel over its restarts, `notebook` is its path, `machine` the user's, `wishes`
    the options, divided by NUL. Once the kernel is known, `pid` and `began` are its pid and start
    time: another process has inherited the variable. Older versions wrote no `began`.
    """
    with suppress(ValueError):  # as without the variable
        fields = untrusted.parsed(bytes.fromhex(os.environ.get(settings.STARTED, "")))
        pid, _, began = procfs.stamp(os.getpid()).partition(" ")
        if not isinstance(fields, dict) or fields.get("pid") not in (None, pid):
            return {}
        if fields.get("began") in (None, "", began):
            return {name: value for name, value in fields.items() if isinstance(value, str)}
    return {}


def as_started(fields: Mapping[str, str]) -> str:
    """Return the variable that says so of a kernel."""
    return json.dumps(dict(fields)).encode().hex()


def origin() -> str | None:
    """Return the machine from which this kernel was started, where that is another one."""
    return started().get("machine")


# -- the cells -------------------------------------------------------------------------------------

TURN_S = 0.2  # until a waiting cell has begun


class Cells:
    """The cells of one shell.

    shell: IPython's, None if no shell tells of its cells. quiet: a lock; while a thread has it, no
    cell begins or ends. last: when the last cell that a person ran began or ended, by
    time.monotonic(). began: when the last cell began, in seconds since the epoch.
    listeners: called at the end of each cell.
    """

    def __init__(self) -> None:
        self.shell: Any = None
        self.quiet = threading.RLock()
        self.is_running = False
        self.last = time.monotonic()
        self.began = time.time()
        self.listeners: list[Callable[[], object]] = []
        self._code: str | None = None  # of the one that runs, None where its begin was not seen

    def begin(self, info: Any) -> None:
        """Remember that a cell begins (pre_run_cell). One within another counts as a part of it."""
        with self.quiet:
            if not self.is_running:
                self.is_running, self._code = True, info.raw_cell
                self.began = time.time()
            self._look_at(info)

    def end(self, result: Any) -> None:
        """Remember that a cell has ended (post_run_cell).

        result: None of one that awaits something and was interrupted.
        """
        info = result and result.info
        with self.quiet:
            if info is None or self._code in (None, info.raw_cell):
                self.is_running, self._code = False, None
            self._look_at(info)
        for listener in [*self.listeners]:
            listener()

    def watch(self, shell: Any) -> None:
        """Watch the cells of this shell from now on; one may run already.

        IPython has a display hook of its own while a cell runs.
        """
        with self.quiet:
            self.shell = shell
            self.is_running, self._code = sys.displayhook is shell.displayhook, None

    def leave(self) -> None:
        """Watch no cells any more."""
        with self.quiet:
            self.shell, self.is_running = None, False

    def stop_shell(self, is_due: Callable[[], bool]) -> None:
        """Let the shell end as it does when it is told to, with all that is done at its end.

        is_due: asked when it gets to that, as a cell may have come before.
        """
        with suppress(AttributeError):  # one of another make
            if hasattr(self.shell, "kernel"):
                loop = self.shell.kernel.io_loop
                # A moment later, as a cell that waits for its turn is begun first: what it says of
                # its time counts, and a loop that has stopped cuts off what awaits.
                loop.add_callback(
                    loop.call_later, TURN_S, lambda: loop.stop() if is_due() else None
                )
            else:  # a terminal, which would be left without an echo
                self.shell.confirm_exit = False
                prompt = self.shell.pt_app.app
                end = partial(prompt.exit, exception=EOFError())
                prompt.loop.call_soon_threadsafe(lambda: end() if is_due() else None)

    def _look_at(self, info: Any) -> None:
        # Front ends run code of their own unseen, without a place in the history.
        if info is None or info.store_history:
            self.last = time.monotonic()


# By process id; an entry of another process is its parent's.
_cells: dict[int, Cells] = executor.survive_reload("cells", dict)


def kernels_file() -> str | None:
    """Return the connection file of the kernel that this very process is, None if it is none."""
    return connection_file() if cells().shell else None


def cells() -> Cells:
    """Return the cells of this very process: a forked child runs none."""
    pid = os.getpid()
    return _cells.get(pid) or _cells.setdefault(pid, Cells())
