"""What the browser is told of the machine, and what it may ask of the user's own reservations."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import reserve_gpu
from reserve_gpu import public

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

EVERY_S = 2.0  # between two looks at the machine
HOSTS_EVERY_S = 10.0  # between two questions to other machines


class Shared:
    """One answer for all requests that arrive in the meantime; at most one is made at a time."""

    def __init__(self, make: Callable[[], Awaitable[Any]], every_s: float) -> None:
        """Share the answers of a function.

        Args:
            make: Makes an answer.
            every_s: The age in seconds at which an answer is out of date.
        """
        self._make, self._every_s = make, every_s
        self._answer: asyncio.Future[Any] | None = None
        self._begun = 0.0

    async def get(self, *, is_new: bool = False) -> Any:
        """Return the answer. A request that is cancelled ends it for no other one.

        Args:
            is_new: Return an answer whose look starts after this call: a button acts on it.
        """
        asked = time.monotonic()
        while True:
            answer = self._answer
            if answer and not answer.done():
                if not is_new or self._begun >= asked:
                    return await asyncio.shield(answer)
                await asyncio.wait({answer})  # then all requests that waited share the next one
            elif answer and self._begun >= (asked if is_new else time.monotonic() - self._every_s):
                return answer.result()
            else:
                self._begun = time.monotonic()
                self._answer = asyncio.ensure_future(self._make())


def look(kernels: Mapping[int | str, str]) -> dict[str, Any]:
    """Return the JSON of `reserve-gpu status`, and what only the browser needs.

    kernels: the ids of this server's kernels, each by its pid and by its connection file.
    `html` is the picture, `failure` why the GPUs cannot be read. Each holder and each waiter has
    `kernel`, the id of the kernel that it belongs to, and `is_own`.
    """
    failure = None
    try:
        status = reserve_gpu.status()
    except reserve_gpu.ReserveGPUError as error:  # no driver, or a setting that is not valid
        failure, status = str(error), public.status_without_driver()
    answer = status.to_dict()
    pairs = [
        pair
        for row, device in zip(status.rows, answer["devices"], strict=True)
        for pair in zip(row.holders, device["holders"], strict=True)
    ]
    holders = (ticket.holder for ticket in status.waiting)
    for holder, fields in [*pairs, *zip(holders, answer["waiting"], strict=True)]:
        fields["is_own"] = is_own = public.is_own(holder)
        fields["kernel"] = public.kernel_of(holder, kernels) if is_own else None
    return {
        **public.printable(answer),
        "failure": failure,
        "html": "" if failure else public.html(status),
    }


def look_elsewhere() -> dict[str, Any]:
    """Return the machines of the table [hosts], as `reserve-gpu status --hosts`; empty without."""
    try:
        seen = public.other_machines()
    except reserve_gpu.RequestError as error:
        return {"hosts": [], "html": "", "failure": str(error)}
    if seen is None:
        return {"hosts": [], "html": ""}
    return {**public.printable(seen.to_dict()), "html": seen.picture()._repr_html_()}


def release(pid: int, *, since: float | None = None, is_end: bool) -> dict[str, Any]:
    """Have a process of this user's release what it holds, or end it; as `reserve-gpu release`.

    since: of the reservation that is meant; None for whatever that process holds.
    """
    try:
        done = public.release(pid, since=since, is_end=is_end)
    except reserve_gpu.LockError:
        done = None
    except reserve_gpu.ReserveGPUError as error:
        done = False, str(error)
    is_done, text = done or (False, f"You hold no GPU in a process of the number {pid}.")
    return {"is_done": is_done, "text": text.split(" To end ")[0]}  # a button does that
