"""The session's own thread, where no signal handler runs: who may call what there, and when."""

from __future__ import annotations

import threading
from math import inf
from typing import TYPE_CHECKING, Any

from reserve_gpu import calls
from reserve_gpu.calls import Call, Executor, no_fork
from reserve_gpu.cells import cells
from reserve_gpu.errors import NoThreadError, RequestError
from reserve_gpu.notices import NESTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

    from reserve_gpu.calls import T, Ts


class OwnThread:
    """Makes calls on a thread of its own, and the steps of a schedule between them.

    step: as of an Executor.
    """

    def __init__(self, step: Callable[[], float | None]) -> None:
        self._executor = Executor(step)

    def run(
        self,
        function: Callable[[Unpack[Ts]], T],
        *arguments: Unpack[Ts],
        show: Callable[[Any], object] = lambda _: None,
        until: float = 0.0,
        undo: Callable[[], object] = int,
    ) -> T:
        """Call the function on the session's thread; as `Executor.run`.

        Raises RequestError in a signal handler that came in the midst of another call, and
        NoThreadError.
        """
        if self._executor.is_own_thread:
            return function(*arguments)
        if self._is_nested:
            raise RequestError(NESTED)
        return self._executor.run(function, *arguments, show=show, until=until, undo=undo)

    def run_in_any_case(
        self, function: Callable[[Unpack[Ts]], T], *arguments: Unpack[Ts]
    ) -> T | None:
        """Call the function, which gives something back, on the session's thread.

        It is called even if an exception ends the wait for it, then perhaps twice. From a signal
        handler, or a finalizer, in the midst of a call it is called at the end of that. Where no
        thread can be had, as at the end of Python 3.12, it is called on this one.
        """
        if self._is_nested or self._executor.is_own_thread or calls.is_made_here():
            self._executor.post(Call(function, *arguments, until=inf, is_awaited=False))
            return None
        try:
            return self._executor.run(function, *arguments, undo=lambda: function(*arguments))
        except NoThreadError:
            return function(*arguments)

    @property
    def _is_nested(self) -> bool:
        """Tell whether a signal handler has come in the midst of what the thread may wait for.

        That is a call of this package, an import, a fork, or the begin of a cell.
        """
        under_way = self._executor.calls_of(threading.get_ident())
        is_in_call = any(call.is_awaited for call in under_way)
        return is_in_call or calls.is_mine(no_fork) or calls.is_mine(cells().quiet)

    def between(self) -> None:
        """Do what can't wait for the end of a call that waits; called by that call."""
        self._executor.between()

    def wake(self) -> None:
        """Look at the lease now."""
        self._executor.wake()

    def run_within(
        self, limit_s: float, function: Callable[[Unpack[Ts]], object], *arguments: Unpack[Ts]
    ) -> None:
        """Call the function on the session's thread, and wait for its end for so long at most.

        Raises what it raises, and NoThreadError.
        """
        call = Call(function, *arguments)
        self._executor.post(call)
        if call.wait(limit_s=limit_s):
            call.result()
