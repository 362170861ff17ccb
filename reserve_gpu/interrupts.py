"""Ctrl-C, and a fork in another thread, wait for a safe place while this process changes things.

Python raises KeyboardInterrupt between any two instructions of the main thread. Between taking a
lock and writing down that it is held, that would leave a GPU reserved by nobody who knows of it. So
a call that changes something runs in `deferred`: SIGINT is only noted there, and raised at the end
of the call, or at once while the call waits for something (`allowed`). A fork waits for the end of
`no_fork`.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Handler = Callable[[int, Any], Any]

# Of the main thread, the only one in which Python handles signals.
_handler: Handler | None = None  # what SIGINT did before; None while nothing is deferred
_is_pending = False
_is_allowed = False

# Reentrant, as a handler of a signal that reserves or releases may run while this thread has it.
_fork_guard = threading.RLock()


@contextmanager
def deferred() -> Iterator[None]:
    """Run the block without KeyboardInterrupt; one that came meanwhile is raised at its end.

    Nothing changes in other threads, where none is ever raised, nor inside of another `deferred`,
    nor where SIGINT is ignored or not Python's.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler) or handler is _note or not _begin(handler):
        yield
        return
    try:
        yield
    finally:
        _end(handler)


@contextmanager
def allowed() -> Iterator[None]:
    """Let KeyboardInterrupt be raised in the block: it only waits, so nothing is left half done."""
    global _is_allowed
    if _handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _is_allowed = True
    try:
        checkpoint()
        yield
    finally:
        _is_allowed = False


def checkpoint() -> None:
    """Raise the KeyboardInterrupt that is due, if one is: nothing is half done here.

    Not in another thread: it is the main thread's call that is to be ended.
    """
    global _is_pending
    if _is_pending and _handler and threading.current_thread() is threading.main_thread():
        _is_pending = False
        _handler(signal.SIGINT, None)


@contextmanager
def no_fork() -> Iterator[None]:
    """Keep this process from forking in the block: a child would get something half made.

    A lock that nobody has noted yet would outlive this process in the child. A module in the midst
    of its import would never be there in the child, which waits for it for ever.
    """
    with deferred(), _fork_guard:  # an interrupt could leave the guard to a frame that lives on
        yield


def _begin(handler: Handler) -> bool:
    """Note SIGINT from now on. False in a subinterpreter, where Python handles no signals."""
    global _handler, _is_allowed, _is_pending
    _handler, _is_allowed, _is_pending = handler, False, False
    try:
        signal.signal(signal.SIGINT, _note)
    except ValueError:
        _handler = None
        return False
    return True


def _end(handler: Handler) -> None:
    """Let SIGINT do again what it did before, and do it now if it came meanwhile."""
    global _handler, _is_pending
    _handler = None  # before: from now on it is only noted, also where something waits
    signal.signal(signal.SIGINT, handler)
    is_due, _is_pending = _is_pending, False
    if is_due:
        handler(signal.SIGINT, None)


def _note(_signal: int, _frame: Any) -> None:
    global _is_allowed, _is_pending
    _is_pending = True
    if _is_allowed:
        _is_allowed = False  # before it raises: the end of `allowed` may be where it came
        checkpoint()


def _restore_in_child() -> None:
    """A child has the handler of its parent's call, which will never end there."""
    global _handler, _is_allowed, _is_pending
    if _handler is not None and signal.getsignal(signal.SIGINT) is _note:
        signal.signal(signal.SIGINT, _handler)
    _handler, _is_allowed, _is_pending = None, False, False


# At import: a fork that has begun asks for no more hooks. Those of a reload do no harm.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=_fork_guard.acquire,
        after_in_parent=_fork_guard.release,
        after_in_child=_fork_guard.release,
    )
    os.register_at_fork(after_in_child=_restore_in_child)
