"""End this process if its GPU memory can't be freed in any other way.

Before the process ends, it calls callbacks that the user has registered, for example to save
checkpoints. The callbacks run on a separate thread, because they might extend the reservation.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from reserve_gpu.model.errors import REASON_LIMIT
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import executor
from reserve_gpu.system.jupyter_kernel import cells

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST_S = 600.0  # timeout in seconds for all callbacks, so that they can't hold a GPU forever
STOP_S = 10.0  # seconds to wait after each attempt to end the process
POLL_S = 0.1  # seconds between checks that the process still has to end


class ProcessEnd:
    """Ends this process, after calling the registered callbacks.

    Args:
        longest_s: Timeout in seconds for all callbacks together.
    """

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._functions: dict[object, tuple[Callable[[], object], float]] = {}

    def call_before(self, function: Callable[[], object], limit_s: float) -> None:
        """Register a callback to be called before the process ends.

        The callback replaces an earlier one of the same name, because the user might run the cell
        that defines the callback again.

        Args:
            function: The callback.
            limit_s: The callback's timeout in seconds.
        """
        name = _name_of(function)
        key = id(function) if "<" in name else name  # all lambdas have the same name
        self._functions.pop(key, None)  # call the newest callback last
        self._functions[key] = function, limit_s

    @property
    def longest_s(self) -> float:
        """Return the maximum total duration of the callbacks in seconds."""
        return min(self._longest_s, sum(limit_s for _, limit_s in self._functions.values()))

    def call(self, say: Callable[[str], object]) -> None:
        """Call the registered callbacks, the oldest one first.

        Args:
            say: A function that shows an error message to the user.
        """
        until = time.monotonic() + self._longest_s
        for function, limit_s in [*self._functions.values()]:
            remaining_s = max(0.0, until - time.monotonic())
            if problem := _call(function, min(limit_s, remaining_s)):
                say(problem)

    def begin(
        self,
        is_due: Callable[[], bool],
        say: Callable[[str], object],
        go_on: Callable[[], object],
    ) -> None:
        """Start a thread that calls the callbacks, and then ends the process.

        Args:
            is_due: A function that returns whether the process still has to end.
            say: A function that shows an error message to the user.
            go_on: A function that is called if the process no longer has to end.
        """

        def end() -> None:
            self.call(say)
            _end_process(is_due)
            go_on()

        _start(end)

    def save(self, say: Callable[[str], object]) -> None:
        """Start a thread that calls the callbacks, but does not end the process.

        Call this method if another process will end this one.
        """
        _start(lambda: self.call(say))


def process_end() -> ProcessEnd:
    """Return this process's `ProcessEnd`. A forked child gets a new one."""
    ends: dict[int, ProcessEnd] = executor.survive_reload("process ends", dict)
    pid = os.getpid()
    return ends.get(pid) or ends.setdefault(pid, ProcessEnd())


def _start(function: Callable[[], object]) -> None:
    """Call a function on a new thread, or on the current thread if no thread can be started."""
    try:
        threading.Thread(target=function, name="reserve_gpu end", daemon=True).start()
    except RuntimeError:
        function()


def _end_process(is_due: Callable[[], bool]) -> None:
    """As long as the process still has to end, exit the shell, then send SIGTERM, then SIGKILL."""
    steps: list[Callable[[], object]] = [
        lambda: cells().stop_shell(is_due),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
    ]
    for step in steps if cells().shell else steps[1:]:
        if not is_due():
            return
        step()
        until = time.monotonic() + STOP_S
        while time.monotonic() < until and is_due():
            time.sleep(POLL_S)


def _call(function: Callable[[], object], limit_s: float) -> str | None:
    """Call a callback, and return an error message if it fails or times out."""
    name = _name_of(function)
    subject = f"before_end: {sanitize(name)}"
    problems: list[str] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - user code can raise any exception
            reason = sanitize(f"raised {type(error).__name__}: {error}", REASON_LIMIT)
            problems.append(f"{subject} {reason}.")

    thread = threading.Thread(target=call, name=f"before_end {name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return f"{subject} was not called, because no thread could be started."
    thread.join(limit_s)
    if thread.is_alive():
        return f"{subject} did not finish within {limit_s:g} s."
    return problems[0] if problems else None


def _name_of(function: Callable[[], object]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))
