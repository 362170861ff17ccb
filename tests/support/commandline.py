"""`reserve-gpu` in the test process: up to the exec that would make it another program."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import reserve_gpu
from reserve_gpu.cli.main import main
from reserve_gpu.model import errors
from reserve_gpu.system import process_identity
from reserve_gpu.system.settings import HELD
from tests.support.here import become
from tests.support.locked import watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

CHANGED = (signal.SIGPIPE, signal.SIGXFSZ)  # which the command line gives their default


@dataclass
class Ended:
    """What a command line came to.

    code: the exit code. visible: CUDA_VISIBLE_DEVICES at the end.
    argv: of the command that the process would have become; None where it ended itself.
    """

    code: Any
    stdout: str
    stderr: str
    visible: str | None
    argv: list[str] | None = None


class Became(BaseException):
    """Raised in place of an exec. argv: of the program."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self.argv = argv


class CommandLine:
    """Runs the command line as a process of its own would: nothing is held afterwards.

    To be called with the words after `reserve-gpu`.
    """

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: str) -> Ended:
        code: Any = 0
        argv = None
        self._capture.readouterr()
        with as_a_process(), watched(stop_at_exec):
            try:
                code = main(words)
            except SystemExit as end:
                code = end.code
            except Became as command:
                argv = command.argv
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        out, err = self._capture.readouterr()
        return Ended(code, out, err, visible, argv)


def stop_at_exec(event: str, arguments: tuple[Any, ...]) -> None:
    """Return a watcher of audit events that stops the process from becoming another program."""
    if event == "os.exec":
        raise Became(list(arguments[1]))


@contextmanager
def as_a_process() -> Iterator[None]:
    """Take back what the end of a process takes with it."""
    environ = {name: value for name, value in os.environ.items() if name != HELD}
    handlers = {number: signal.getsignal(number) for number in CHANGED}
    try:
        yield
    finally:
        reserve_gpu.release()
        process_identity.set_name("")
        errors.shows_cell_syntax = False
        become(environ)
        for number, handler in handlers.items():
            signal.signal(number, handler)
