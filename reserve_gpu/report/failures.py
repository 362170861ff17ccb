"""Make the error of a reason why nothing was reserved, in the words of the face that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu import notices
from reserve_gpu.calls import Late
from reserve_gpu.errors import (
    ImpossibleError,
    LockError,
    NoFreeDeviceError,
    RequestError,
    ReservedAboveError,
    TooLateError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from reserve_gpu.errors import ReserveGPUError
    from reserve_gpu.report import messages, pictures
    from reserve_gpu.report.faces import Face
else:  # what a program that catches the error never needs
    messages, pictures = Late("report.messages"), Late("report.pictures")


def error(reason: notices.Reason, face: Face) -> ReserveGPUError:
    """Return the error to raise. face: where it is read, which decides how its hints are typed."""
    if isinstance(reason, notices.Refused):
        kind = NoFreeDeviceError if reason.waited_s is None else WaitTimeoutError
        return kind(lambda: pictures.refusal(reason, face), reason.rows)
    if isinstance(reason, notices.ReservedAbove):
        return ReservedAboveError(messages.above(reason, face), reason.rows)
    if isinstance(reason, notices.TooLate):
        return TooLateError(messages.too_late(reason, face))
    if isinstance(reason, notices.Lost):
        return LockError(messages.say(reason))
    if isinstance(reason, (notices.Impossible, notices.TooMany)):
        return ImpossibleError(messages.say(reason))
    return RequestError(messages.say(reason))
