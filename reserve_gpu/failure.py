"""What becomes of an attempt that took nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu import awaited, cuda, possible, processes, refusal
from reserve_gpu.errors import (
    ImpossibleError,
    NoFreeDeviceError,
    ReservedAboveError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.claim import Claim
    from reserve_gpu.device import Refusal
    from reserve_gpu.errors import ReserveGPUError
    from reserve_gpu.holding import Own


def is_above(refusals: Sequence[Refusal]) -> bool:
    """Whether all that would do is reserved by a process that this one was started from."""
    holders = [refusal.holder for refusal in refusals if refusal.state != "unfit"]
    if not holders or not all(holder and holder.seen for holder in holders):
        return False
    above = processes.ancestors()
    return all(holder and holder.pid in above for holder in holders)


def error(
    mine: Own,
    claim: Claim,
    outside: Mapping[str, str | None],
    wait_s: float | None,
    *,
    is_above: bool,
) -> ReserveGPUError:
    """Why nothing could be taken; unless the request was wrong, no GPU is visible from now on.

    mine: what this process holds. outside: the variables as somebody else set them. is_above: as
    above. wait_s: for how long it was to wait, None for not at all.
    """
    visible, count = outside[cuda.VISIBLE], claim.request.count
    if reason := possible.impossible(claim.refusals, claim.request):
        return ImpossibleError(" ".join([reason, *refusal.limit(visible, len(claim.refusals))]))
    if claim.request.exclude and not claim.refusals:
        return ImpossibleError("Every GPU that this process may use is excluded.")
    if is_above:
        return ReservedAboveError(refusal.above(claim.refusals, outside))
    mine.go_without()
    kept = held.devices if (held := mine.current()) else ()
    has_waited = bool(wait_s and claim.ticket)
    text = refusal.nothing_free(claim.refusals, count, kept, visible, has_waited=has_waited)
    if wait_s is not None and claim.ticket:
        return WaitTimeoutError(f"{awaited.waited(wait_s)}{text}")
    return NoFreeDeviceError(text)
