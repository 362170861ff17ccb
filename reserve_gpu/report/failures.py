"""Make the error of a reason why nothing was reserved, in the words of the face that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu import notices
from reserve_gpu.errors import (
    ImpossibleError,
    LockError,
    NoFreeDeviceError,
    RequestError,
    ReservedAboveError,
    TooLateError,
    WaitTimeoutError,
)
from reserve_gpu.report import pictures
from reserve_gpu.report.messages import above, say, too_late

if TYPE_CHECKING:
    from reserve_gpu.errors import ReserveGPUError
    from reserve_gpu.report.faces import Face


def error(reason: notices.Reason, face: Face) -> ReserveGPUError:
    """Return the error to raise. face: where it is read, which decides how its hints are typed."""
    if isinstance(reason, notices.Refused):
        kind = NoFreeDeviceError if reason.waited_s is None else WaitTimeoutError
        return kind(pictures.refusal(reason, face), reason.rows)
    if isinstance(reason, notices.ReservedAbove):
        return ReservedAboveError(above(reason, face), reason.rows)
    if isinstance(reason, notices.TooLate):
        return TooLateError(too_late(reason, face))
    if isinstance(reason, notices.Lost):
        return LockError(say(reason))
    if isinstance(reason, (notices.Impossible, notices.TooMany)):
        return ImpossibleError(say(reason))
    return RequestError(say(reason))
