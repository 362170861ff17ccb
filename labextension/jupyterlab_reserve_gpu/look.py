"""Read the machine's status for the browser, and release the user's reservations."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import reserve_gpu
from reserve_gpu import public

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

EVERY_S = 2.0  # seconds for which this machine's status is reused
HOSTS_EVERY_S = 10.0  # seconds for which other machines' status is reused


class Shared:
    """An answer that concurrent requests share. Only one answer is computed at a time."""

    def __init__(self, make: Callable[[], Awaitable[Any]], every_s: float) -> None:
        """Create a shared answer that has not been computed yet.

        Args:
            make: The function that computes an answer.
            every_s: The age in seconds at which an answer expires.
        """
        self._make, self._every_s = make, every_s
        self._answer: asyncio.Future[Any] | None = None
        self._started = 0.0

    async def get(self, *, is_new: bool = False) -> Any:
        """Return the shared answer. Canceling one request does not affect the others.

        Args:
            is_new: Whether to accept only an answer whose computation began after this call. The
                panel's buttons require this.
        """
        called = time.monotonic()
        while True:
            answer = self._answer
            if answer and not answer.done():
                if not is_new or self._started >= called:
                    return await asyncio.shield(answer)
                await asyncio.wait({answer})  # all requests waiting here share the next answer
            elif answer and self._started >= (
                called if is_new else time.monotonic() - self._every_s
            ):
                return answer.result()
            else:
                self._started = time.monotonic()
                self._answer = asyncio.ensure_future(self._make())


def look(kernels: Mapping[int | str, str]) -> dict[str, Any]:
    """Return the machine's status for the browser.

    Args:
        kernels: The ids of this server's kernels, by pid and by connection file.

    Returns:
        The JSON object of `reserve-gpu status` with additional fields: `failure` says why the GPUs
        can't be read, or is null if they can. For each holder and waiter, `is_own` says whether it
        belongs to this user, and `kernel` is the id of its kernel.
    """
    failure = None
    try:
        status = reserve_gpu.status()
    except reserve_gpu.ReserveGPUError as error:  # no driver, or an invalid setting
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
    return {**public.printable(answer), "failure": failure}


def look_elsewhere() -> dict[str, Any]:
    """Return the status of the configured hosts, as `reserve-gpu status --hosts --json` does."""
    try:
        machines = public.other_machines()
    except reserve_gpu.RequestError as error:
        return {"hosts": [], "failure": str(error)}
    return {"hosts": []} if machines is None else public.printable(machines.to_dict())


def release(pid: int, *, since: float | None = None, is_end: bool) -> dict[str, Any]:
    """Make one of the user's processes release its GPUs, or end the process.

    This function does the same as `reserve-gpu release`.

    Args:
        pid: The process that holds the reservation.
        since: The start time of the reservation in seconds since the epoch. If the process now
            holds a newer reservation, that reservation is not released. If None, any reservation
            that the process holds is released.
        is_end: Whether to end the process.

    Returns:
        A dict with two items: `is_done` says whether the request succeeded, and `text` is the
        message for the user.
    """
    try:
        done = public.release(pid, since=since, is_end=is_end)
    except reserve_gpu.LockError:
        done = None
    except reserve_gpu.ReserveGPUError as error:
        done = False, str(error)
    is_done, text = done or (False, f"Process {pid} holds none of your reservations.")
    # Omit the advice on ending the process, because the panel has a button for it.
    return {"is_done": is_done, "text": text.split(" To end ")[0]}
