"""Interrupt an action of this package by a signal at a given place, and check the state then."""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reserve_gpu
from reserve_gpu.locks import files
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.settings import LOCK_DIRECTORY
from tests.support.locked import watched

if TYPE_CHECKING:
    from collections.abc import Callable

# Python handles signals at the start of a function, after a call, and at the end of a loop's body.
# https://github.com/python/cpython/blob/3.11/Python/ceval.c: CHECK_EVAL_BREAKER
HANDLING = ("RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
# The package, and the module that runs its context managers.
FILES = (os.path.dirname(reserve_gpu.__file__), contextlib.__file__)
HANG_S = 30
HANDLING_S = 1.0  # time in which the main thread handles a signal
HANDLED = threading.Event()  # set by `handle`
VARIABLES = ("CUDA_DEVICE_MEMORY", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")


def reserve(*devices: Any, **wishes: Any) -> None:
    """Reserve, and ignore a refusal."""
    with suppress(reserve_gpu.NoFreeDeviceError, reserve_gpu.RequestError):
        reserve_gpu.reserve(*devices, **wishes)


def use() -> None:
    """Use a reservation in a block."""
    with suppress(reserve_gpu.RequestError), reserve_gpu.reserve():
        pass


def use_inside() -> None:
    """Use a reservation in a block inside of another block."""
    with suppress(reserve_gpu.RequestError), reserve_gpu.reserve(), reserve_gpu.reserve():
        pass


def change_inside() -> None:
    """Reserve another device in a block."""
    with suppress(reserve_gpu.RequestError), reserve_gpu.reserve():
        reserve(1)


# For each action, the preparation and the function that is interrupted.
ACTIONS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "reserve": (int, reserve),
    "reserve two": (int, lambda: reserve(count=2)),
    "reserve the same": (reserve, reserve),
    "reserve another": (reserve, lambda: reserve(1)),
    "reserve less": (lambda: reserve(count=2), lambda: reserve(count=1)),
    "reduce to a part": (reserve, lambda: reserve(memory="1GB")),
    "extend a part": (lambda: reserve(memory="1GB"), reserve),
    "release": (reserve, reserve_gpu.release),
    "with": (int, use),
    "with inside of with": (int, use_inside),
    "with, then another": (int, change_inside),
    "status": (reserve, reserve_gpu.status),
}
# Actions that fail because another process holds all GPUs.
FAILING: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "fail to reserve": (int, reserve),
    "fail to wait": (int, lambda: reserve(wait=0.001)),
}


def time_out() -> None:
    """Raise TimeoutError, as a handler of SIGALRM might do."""
    raise TimeoutError("SIGALRM")


INTERRUPT, TIMEOUT = "KeyboardInterrupt", "TimeoutError"
# The functions that a signal handler calls.
HANDLERS: dict[str, Callable[[], object]] = {
    INTERRUPT: lambda: signal.default_int_handler(signal.SIGINT, None),
    TIMEOUT: time_out,
    "release": reserve_gpu.release,
    "reserve": lambda: reserve(1),
}


def handle(handler: str) -> None:
    """Call one of HANDLERS."""
    HANDLED.set()
    HANDLERS[handler]()


class Interrupted:
    """The outcome of an action that a signal interrupts.

    Places are instructions in FILES at which the main thread handles signals, and audit events of
    other threads.

    Args:
        action: The action.
        number: The signal.
        at: The number of the place at which the signal is sent, or None to send none.

    Attributes:
        count: The number of places.
        where: The place of the signal, for people to read.
        error: The exception that ended the action, or None.
    """

    def __init__(
        self, action: Callable[[], object], number: signal.Signals, at: int | None = None
    ) -> None:
        self.count = 0
        self._number = number
        self.where = ""
        self.error: BaseException | None = None
        self._at = at
        self._is_handling = False
        self._last: tuple[Any, int] | None = None  # instruction
        try:
            with watched(self._heard):
                sys.settrace(self._trace)
                action()
        except BaseException as error:
            self.error = error  # its frames keep their objects alive, as in IPython
        finally:
            sys.settrace(None)

    def _heard(self, event: str, _: object) -> None:
        """Count the audit events of other threads, such as opening a file."""
        if threading.current_thread() is not threading.main_thread():
            self._count_place(f"{event} on another thread")

    def _count_place(self, where: str) -> None:
        self.count += 1
        if self.count == self._at:
            self.where = where
            self._signal()

    def _trace(self, frame: Any, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self._is_handling and self._is_of_last(frame):
            self._count_place(f"{frame.f_code.co_name}, line {frame.f_lineno}, {frame.f_lasti}")
        if event == "opcode":
            self._last = frame.f_code, frame.f_lasti
        if event != "line":  # a "line" event is about the next instruction
            is_call_or_loop = event == "opcode" and operation(frame).startswith(HANDLING)
            self._is_handling = event == "call" or is_call_or_loop
        return self._trace

    def _is_of_last(self, frame: Any) -> bool:
        """Return whether the same `except` clauses apply here as at the previous instruction.

        Python attributes an exception of a signal handler to the previous instruction.
        """
        if self._last is None or self._last[0] is not frame.f_code:
            return True
        return handlers(*self._last) == handlers(frame.f_code, frame.f_lasti)

    def _signal(self) -> None:
        """Send the signal to the main thread, which handles it at its current place."""
        main = threading.main_thread().ident or 0
        if threading.get_ident() == main:
            sys.settrace(None)
            signal.raise_signal(self._number)
        else:
            HANDLED.clear()
            signal.pthread_kill(main, self._number)
            HANDLED.wait(HANDLING_S)


def handlers(code: Any, offset: int) -> list[int]:
    """Return the offsets of the handlers of an exception at this instruction, if Python tells."""
    parse: Any = getattr(dis, "_parse_exception_table", lambda _: [])  # from Python 3.11 on
    return [entry.target for entry in parse(code) if entry.start <= offset < entry.end]


def operation(frame: Any) -> str:
    """Return the name of the next instruction."""
    name: str = dis.opname[code_of(frame.f_code)[frame.f_lasti]]
    return name


@cache
def code_of(code: Any) -> bytes:
    """Return the instructions, which Python copies at each access."""
    return bytes(code.co_code)


def fault(action: str, handler: str, at: int) -> str | None:
    """Return the faults after a signal at this place, and after the next call."""
    before, function = (ACTIONS | FAILING)[action]
    before()
    interrupted = Interrupted(function, signal.SIGUSR1, at)
    error, wrong = interrupted.error, disagreements() if interrupted.where else []
    is_raised = handler in (INTERRUPT, TIMEOUT)
    if interrupted.where and is_raised and type(error).__name__ not in (handler, "NoneType"):
        wrong.append(f"it was ended by {error!r}")
    if interrupted.where and error and not is_raised:
        wrong.append(f"it was ended by {error!r}")
    wrong += faults_of_next_call(is_failing=action in FAILING)
    return f"{interrupted.where}: {'; '.join(wrong)}" if wrong else None


def disagreements() -> list[str]:
    """Return the contradictions between current(), the locks and the variables."""
    held = reserve_gpu.current()
    devices = held.devices if held else ()
    ends = ("lock", f"record-{os.geteuid()}-0")
    whole = {f"{device.uuid}.{end}" for device in devices for end in ends}
    shared = {f"{device.uuid}.share-{os.geteuid()}-0.lock" for device in devices}
    environ = {name: os.environ.get(name) for name in VARIABLES}
    wrong = []
    files = open_files()
    if set(files) not in ({f"{folder()}/{name}" for name in names} for names in (whole, shared)):
        wrong.append(f"{set(files)} are open, but {whole} are held")
    if not all(files.values()):
        wrong.append(f"some open files are not locked: {files}")
    if held and {name: held.environ.get(name) for name in VARIABLES} != environ:
        wrong.append(f"the variables are {environ}, of {held}")
    if not held and any(environ.values()):
        wrong.append(f"the variables are {environ}, and nothing is held")
    thread = threading.Thread(target=try_to_fork, args=(wrong,))
    thread.start()
    thread.join()
    return wrong


def try_to_fork(wrong: list[str]) -> None:
    """Add a fault if a thread other than the interrupted one can't fork."""
    if no_fork.acquire(blocking=False):
        no_fork.release()
    else:
        wrong.append("no other thread can fork any more")


def faults_of_next_call(*, is_failing: bool) -> list[str]:
    """Return the faults of the next call, and release everything."""
    wrong = []
    try:
        reserve_gpu.reserve(1)
    except reserve_gpu.NoFreeDeviceError as error:
        wrong += [] if is_failing else [f"the next call fails: {error}"]
    except reserve_gpu.ReserveGPUError as error:
        wrong.append(f"the next call fails: {error}")
    reserve_gpu.release()
    if any(os.environ.get(name) for name in VARIABLES):
        wrong.append("release() leaves variables")
    if left := open_files():
        wrong.append(f"release() leaves {set(left)} open")
    for descriptor in list(files._opened):
        wrong.append(f"descriptor {descriptor} is left")
        files.close(descriptor)
    return wrong


def folder() -> str:
    """Return the lock directory."""
    return os.environ[LOCK_DIRECTORY]


def open_files() -> dict[str, bool]:
    """Return this process's open files in the lock directory, and whether each is locked.

    The locks are read from the descriptor, because /proc/locks can miss one.
    """
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            files[path] = "lock:" in Path(f"/proc/self/fdinfo/{number}").read_text("ascii")
    return {p: is_locked for p, is_locked in files.items() if p.startswith(folder())}


def interrupt_everywhere(action: str, handler: str, number: int) -> tuple[int, list[str]]:
    """Interrupt an action at about as many places; return their number, and the faults.

    The process ends if the handler makes it wait for itself.
    """
    before, function = (ACTIONS | FAILING)[action]
    signal.signal(signal.SIGUSR1, lambda *_: None)
    for _ in range(2):  # the first time, files are created and modules are loaded
        before()
        count = Interrupted(function, signal.SIGUSR1).count
        reserve_gpu.release()
    signal.signal(signal.SIGUSR1, lambda *_: handle(handler))
    tried = range(1, count + 1, max(1, count // number))
    faults = []
    for at in tried:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        faults.append(fault(action, handler, at))
    faulthandler.cancel_dump_traceback_later()
    return len(tried), [wrong for wrong in faults if wrong]
