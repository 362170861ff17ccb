"""Sends this process a signal where Python would handle one, and looks how things stand then."""

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

# Where Python handles signals: as a function begins, after a call, and as a loop goes back.
# https://github.com/python/cpython/blob/3.11/Python/ceval.c: CHECK_EVAL_BREAKER
HANDLING = ("RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
# The package's own, and those that run its context managers.
FILES = (os.path.dirname(reserve_gpu.__file__), contextlib.__file__)
HANG_S = 30
HANDLING_S = 1.0  # in which the main thread handles a signal
HANDLED = threading.Event()  # by a handler of one of HANDLERS
VARIABLES = ("CUDA_DEVICE_MEMORY", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")


def reserve(*devices: Any, **wishes: Any) -> None:
    """Reserve, and be content if that can't be."""
    with suppress(reserve_gpu.NoFreeDeviceError, reserve_gpu.RequestError):
        reserve_gpu.reserve(*devices, **wishes)


def use() -> None:
    with suppress(reserve_gpu.RequestError), reserve_gpu.reserve():
        pass


def use_inside() -> None:
    with suppress(reserve_gpu.RequestError), reserve_gpu.reserve(), reserve_gpu.reserve():
        pass


def change_inside() -> None:
    with suppress(reserve_gpu.RequestError), reserve_gpu.reserve():
        reserve(1)


# What is done before, and what is interrupted.
ACTIONS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "reserve": (int, reserve),
    "reserve two": (int, lambda: reserve(count=2)),
    "say it again": (reserve, reserve),
    "reserve another": (reserve, lambda: reserve(1)),
    "reserve less": (lambda: reserve(count=2), lambda: reserve(count=1)),
    "part": (reserve, lambda: reserve(memory="1GB")),
    "part no more": (lambda: reserve(memory="1GB"), reserve),
    "release": (reserve, reserve_gpu.release),
    "with": (int, use),
    "with inside of with": (int, use_inside),
    "with, then another": (int, change_inside),
    "status": (reserve, reserve_gpu.status),
}
# The same where others have all GPUs.
IN_VAIN: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "reserve in vain": (int, reserve),
    "wait in vain": (int, lambda: reserve(wait=0.001)),
}


def time_out() -> None:
    raise TimeoutError("the alarm of somebody's code")


INTERRUPT, RAISE = "KeyboardInterrupt", "TimeoutError"
# What the handler of a signal does.
HANDLERS: dict[str, Callable[[], object]] = {
    INTERRUPT: lambda: signal.default_int_handler(signal.SIGINT, None),
    RAISE: time_out,
    "release": reserve_gpu.release,
    "reserve": lambda: reserve(1),
}


def handle(does: str) -> None:
    HANDLED.set()
    HANDLERS[does]()


class Interrupted:
    """What became of an action in the midst of which a signal came.

    at: the number of the place: of FILES on the main thread, and each audit event of another one;
    where there are fewer no signal comes. where: it, for people to read. count: of those places.
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
            self.error = error  # kept with its frames and all that they hold, as IPython keeps it
        finally:
            sys.settrace(None)

    def _heard(self, event: str, _: object) -> None:
        """Count what other threads ask of the system: each file and each variable, for a start."""
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
        if event != "line":  # of the instruction that is next
            is_call_or_loop = event == "opcode" and operation(frame).startswith(HANDLING)
            self._is_handling = event == "call" or is_call_or_loop
        return self._trace

    def _is_of_last(self, frame: Any) -> bool:
        """Tell whether an error here is caught where one of the last instruction would be.

        Python raises what a handler raises as an error of the instruction that it came after.
        """
        if self._last is None or self._last[0] is not frame.f_code:
            return True
        return handlers(*self._last) == handlers(frame.f_code, frame.f_lasti)

    def _signal(self) -> None:
        """Send the signal, which Python handles in the main thread, wherever that is."""
        main = threading.main_thread().ident or 0
        if threading.get_ident() == main:
            sys.settrace(None)
            signal.raise_signal(self._number)
        else:
            HANDLED.clear()
            signal.pthread_kill(main, self._number)
            HANDLED.wait(HANDLING_S)


def handlers(code: Any, offset: int) -> list[int]:
    """Return where an error at that instruction is caught, as far as Python tells."""
    parse: Any = getattr(dis, "_parse_exception_table", lambda _: [])  # from Python 3.11 on
    return [entry.target for entry in parse(code) if entry.start <= offset < entry.end]


def operation(frame: Any) -> str:
    """Return what the instruction does that is next."""
    name: str = dis.opname[code_of(frame.f_code)[frame.f_lasti]]
    return name


@cache
def code_of(code: Any) -> bytes:
    """Return the instructions, which Python copies each time."""
    return bytes(code.co_code)


def fault(action: str, does: str, at: int) -> str | None:
    """Return what is wrong after a signal came there, and after the next call."""
    before, function = (ACTIONS | IN_VAIN)[action]
    before()
    interrupted = Interrupted(function, signal.SIGUSR1, at)
    error, wrong = interrupted.error, disagreements() if interrupted.where else []
    is_raised = does in (INTERRUPT, RAISE)
    if interrupted.where and is_raised and type(error).__name__ not in (does, "NoneType"):
        wrong.append(f"it was ended by {error!r}")
    if interrupted.where and error and not is_raised:
        wrong.append(f"it was ended by {error!r}")
    wrong += what_the_next_call_says(is_in_vain=action in IN_VAIN)
    return f"{interrupted.where}: {'; '.join(wrong)}" if wrong else None


def disagreements() -> list[str]:
    """Return what says one thing, where something else says another."""
    held = reserve_gpu.current()
    devices = held.devices if held else ()
    ends = ("lock", f"record-{os.geteuid()}-0")
    whole = {f"{device.uuid}.{end}" for device in devices for end in ends}
    shared = {f"{device.uuid}.share-{os.geteuid()}-0.lock" for device in devices}
    environ = {name: os.environ.get(name) for name in VARIABLES}
    wrong = []
    files = open_files()
    if set(files) not in ({f"{folder()}/{name}" for name in names} for names in (whole, shared)):
        wrong.append(f"{set(files)} are open, {whole} held")
    if not all(files.values()):
        wrong.append(f"of what is open not all is locked: {files}")
    if held and {name: held.environ.get(name) for name in VARIABLES} != environ:
        wrong.append(f"the variables are {environ}, of {held}")
    if not held and any(environ.values()):
        wrong.append(f"the variables are {environ}, and nothing is held")
    thread = threading.Thread(target=try_to_fork, args=(wrong,))
    thread.start()
    thread.join()
    return wrong


def try_to_fork(wrong: list[str]) -> None:
    """Try it in another thread than the interrupted one, which may always fork."""
    if no_fork.acquire(blocking=False):
        no_fork.release()
    else:
        wrong.append("no other thread can fork any more")


def what_the_next_call_says(*, is_in_vain: bool) -> list[str]:
    """Return what is wrong with it; afterwards nothing is held, whatever it was."""
    wrong = []
    try:
        reserve_gpu.reserve(1)
    except reserve_gpu.NoFreeDeviceError as error:
        wrong += [] if is_in_vain else [f"the next call fails: {error}"]
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
    return os.environ[LOCK_DIRECTORY]


def open_files() -> dict[str, bool]:
    """Return what this process has open of the lock directory.

    Whether it has each of them locked: asked of the descriptor, as /proc/locks may miss one.
    """
    files = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            files[path] = "lock:" in Path(f"/proc/self/fdinfo/{number}").read_text("ascii")
    return {p: is_locked for p, is_locked in files.items() if p.startswith(folder())}


def try_all(action: str, does: str, number: int) -> tuple[int, list[str]]:
    """Interrupt an action at about so many of its places; how many, and what was wrong.

    does: what the handler does. This process ends if that makes it wait for itself.
    """
    before, function = (ACTIONS | IN_VAIN)[action]
    signal.signal(signal.SIGUSR1, lambda *_: None)
    for _ in range(2):  # the first time it takes more: files are made, modules loaded
        before()
        count = Interrupted(function, signal.SIGUSR1).count
        reserve_gpu.release()
    signal.signal(signal.SIGUSR1, lambda *_: handle(does))
    tried = range(1, count + 1, max(1, count // number))
    faults = []
    for at in tried:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        faults.append(fault(action, does, at))
    faulthandler.cancel_dump_traceback_later()
    return len(tried), [wrong for wrong in faults if wrong]
