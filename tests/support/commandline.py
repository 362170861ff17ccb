"""`reserve-gpu` in the test process, until it would execute another program."""

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

CHANGED = (signal.SIGPIPE, signal.SIGXFSZ)  # the command line restores their default actions


@dataclass
class Ended:
    """The result of a command line.

    Attributes:
        code: The exit code.
        stdout: The standard output.
        stderr: The standard error.
        visible: The value of CUDA_VISIBLE_DEVICES at the end.
        argv: The program that would have been executed, or None.
    """

    code: Any
    stdout: str
    stderr: str
    visible: str | None
    argv: list[str] | None = None


class Executed(BaseException):
    """Raised instead of executing a program. `argv` are its arguments."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self.argv = argv


class CommandLine:
    """Runs `reserve-gpu` as if in a process of its own, which releases everything at its end.

    Call an instance with the arguments of `reserve-gpu`.
    """

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str) -> Ended:
        code: Any = 0
        argv = None
        self._capture.readouterr()
        with _restored_process(), watched(_raise_instead_of_exec):
            try:
                code = main(arguments)
            except SystemExit as end:
                code = end.code
            except Executed as program:
                argv = program.argv
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        out, err = self._capture.readouterr()
        return Ended(code, out, err, visible, argv)


def _raise_instead_of_exec(event: str, arguments: tuple[Any, ...]) -> None:
    """Handle an audit event, and raise Executed before another program is executed."""
    if event == "os.exec":
        raise Executed(list(arguments[1]))


@contextmanager
def _restored_process() -> Iterator[None]:
    """Undo all changes to this process at the end."""
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
