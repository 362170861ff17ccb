"""Make the error of a reason why nothing was reserved, in the words of the face that shows it.

What programs read of a refusal is here, too: who has what and until when, and what may be typed.
"""

from __future__ import annotations

import math
import time
from typing import Any

from reserve_gpu.model import errors, notices
from reserve_gpu.render import contacts, messages, pictures, status_view
from reserve_gpu.render.frontends import Frontend, read_here

# Seconds after which a program does well to ask again: until the first end that is known, within
# these bounds, as ends are put off, and as nobody gains by asking more often.
SOONEST_S, LATEST_S, UNKNOWN_S = 5, 600, 60


def error(reason: notices.Reason, frontend: Frontend) -> errors.ReserveGPUError:
    """Return the error to raise. face: where it is read, which decides how its hints are typed."""
    frontend = read_here(frontend)
    if isinstance(reason, notices.Refused):
        is_first_try = reason.waited_s is None
        kind = errors.NoFreeDeviceError if is_first_try else errors.WaitTimeoutError
        return kind(
            lambda: pictures.refusal(reason, frontend),
            reason.rows,
            lambda: values(reason, frontend),
        )
    if isinstance(reason, notices.ReservedAbove):
        return errors.ReservedAboveError(messages.above(reason, frontend), reason.rows)
    if isinstance(reason, notices.TooLate):
        return errors.TooLateError(messages.too_late(reason, frontend))
    if isinstance(reason, notices.Lost):
        return errors.LockError(messages.say(reason))
    if isinstance(reason, notices.HidesAll):
        return errors.NoVisibleDeviceError(messages.hides_all(reason, frontend))
    if isinstance(reason, (notices.Impossible, notices.TooMany)):
        return errors.ImpossibleError(messages.say(reason))
    return errors.RequestError(messages.say(reason))


def values(reason: notices.Refused, frontend: Frontend) -> dict[str, Any]:
    """Return what the picture of the refusal says, in the shape that docs/formats.md describes.

    face: where it is read. What is named there to be typed ends nothing, releases nothing, and
    takes nothing that somebody uses.
    """
    # Those that were started together may be ranks, which wait for each other, or runs, which end.
    now, waits = time.time(), pictures.can_wait(reason._replace(siblings=()))
    first = contacts.first_end(reason.rows, now)
    after_s = first["at"] - now if first else UNKNOWN_S
    seen = status_view.Status(tuple(reason.rows), tuple(reason.ahead), time=now, user=reason.user)
    told = seen.to_dict()
    return {
        **{name: told[name] for name in ("time", "user", "devices")},
        "asks": messages.asked(reason.request),
        "first_free": first,
        "place": 1 + len(reason.ahead) if waits else None,
        "retry_after_s": min(max(math.ceil(after_s), SOONEST_S), LATEST_S) if waits else None,
        "next": pictures.next_lines(reason, frontend, waits=waits)[:2],
    }
