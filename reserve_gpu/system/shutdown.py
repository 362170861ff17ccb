"""Ends this process where nothing else frees the memory of its GPU: checkpoints, then signals.

It has a thread of its own, as what people want called before may ask for more time.
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

LONGEST_S = 600.0  # for all that is called before: nobody keeps a GPU by what never ends
STOP_S = 10.0  # until a process that is to end by itself gets the next signal
POLL_S = 0.1


class ProcessEnd:
    """What is done where this process has to end.

    longest_s: for how long to wait for all that is called before, together.
    """

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._functions: dict[object, tuple[Callable[[], object], float]] = {}

    def call_before(self, function: Callable[[], object], limit_s: float) -> None:
        """Call it before the process ends, in place of an earlier one of that name.

        The cell that defines it may be run again. limit_s: for how long to wait for it.
        """
        name = _name_of(function)
        key = id(function) if "<" in name else name  # lambdas all have the same
        self._functions.pop(key, None)  # the newest is called last
        self._functions[key] = function, limit_s

    @property
    def longest_s(self) -> float:
        """Return how long all that is called before may take; 0 if nothing is."""
        return min(self._longest_s, sum(limit_s for _, limit_s in self._functions.values()))

    def call(self, say: Callable[[str], object]) -> None:
        """Call what is to be called before. say: tells a person what went wrong."""
        until = time.monotonic() + self._longest_s
        for function, limit_s in [*self._functions.values()]:
            left_s = max(0.0, until - time.monotonic())
            if problem := _called(function, min(limit_s, left_s)):
                say(problem)

    def begin(
        self,
        is_due: Callable[[], bool],
        say: Callable[[str], object],
        go_on: Callable[[], object],
    ) -> None:
        """Begin to end the process, as long as that is due.

        say: tells a person what went wrong. go_on: called where it is not due any more.
        """

        def end() -> None:
            self.call(say)
            _end_process(is_due)
            go_on()

        _start(end)

    def save(self, say: Callable[[str], object]) -> None:
        """Call what is to be called before, as others will end the process."""
        _start(lambda: self.call(say))


def of_this_process() -> ProcessEnd:
    """Return the one of this very process: a fork has its own."""
    known: dict[int, ProcessEnd] = executor.survive_reload("process ends", dict)
    pid = os.getpid()
    return known.get(pid) or known.setdefault(pid, ProcessEnd())


def _start(function: Callable[[], object]) -> None:
    """Call the function on a thread of its own."""
    try:
        threading.Thread(target=function, name="reserve_gpu end", daemon=True).start()
    except RuntimeError:  # no thread can be had: then on this one
        function()


def _end_process(is_due: Callable[[], bool]) -> None:
    """End it as long as that is due: as it ends by itself first, then by force."""
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


def _called(function: Callable[[], object], limit_s: float) -> str | None:
    """Call a function of before_end(); returns what to say where it has not done its work."""
    name = _name_of(function)
    named = f"before_end: {sanitize(name)}"
    problems: list[str] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - a person's code may raise anything
            why = sanitize(f"raised {type(error).__name__}: {error}", REASON_LIMIT)
            problems.append(f"{named} {why}.")

    thread = threading.Thread(target=call, name=f"before_end {name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return f"{named} was not called: no thread can be started."
    thread.join(limit_s)
    if thread.is_alive():
        return f"{named} has not ended within {limit_s:g} s."
    return problems[0] if problems else None


def _name_of(function: Callable[[], object]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))
