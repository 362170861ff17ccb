"""Make the error of a reason why nothing was reserved, in the words of the face that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu import errors, notices
from reserve_gpu.calls import Late

if TYPE_CHECKING:
    from reserve_gpu.report import messages, pictures, refusal
    from reserve_gpu.report.faces import Face
else:  # what a program that catches the error never needs
    refusal = Late("report.refusal")
    messages, pictures = Late("report.messages"), Late("report.pictures")


def error(reason: notices.Reason, face: Face) -> errors.ReserveGPUError:
    """Return the error to raise. face: where it is read, which decides how its hints are typed."""
    face = pictures.read_here(face)
    if isinstance(reason, notices.Refused):
        is_first_try = reason.waited_s is None
        kind = errors.NoFreeDeviceError if is_first_try else errors.WaitTimeoutError
        return kind(
            lambda: pictures.refusal(reason, face),
            reason.rows,
            lambda: refusal.values(reason, face),
        )
    if isinstance(reason, notices.ReservedAbove):
        return errors.ReservedAboveError(messages.above(reason, face), reason.rows)
    if isinstance(reason, notices.TooLate):
        return errors.TooLateError(messages.too_late(reason, face))
    if isinstance(reason, notices.Lost):
        return errors.LockError(messages.say(reason))
    if isinstance(reason, (notices.Impossible, notices.TooMany)):
        return errors.ImpossibleError(messages.say(reason))
    return errors.RequestError(messages.say(reason))
