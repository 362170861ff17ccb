"""A refusal as programs read it: who has what and until when, and what may be typed next."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from reserve_gpu.report import asking, messages, pictures
from reserve_gpu.report.status import Status

if TYPE_CHECKING:
    from reserve_gpu.notices import Refused
    from reserve_gpu.report.faces import Face

# Seconds after which a program does well to ask again: until the first end that is known, within
# these bounds, as ends are put off, and as nobody gains by asking more often.
SOONEST_S, LATEST_S, UNKNOWN_S = 5, 600, 60


def values(reason: Refused, face: Face) -> dict[str, Any]:
    """Return what the picture of the refusal says, in the shape that docs/formats.md describes.

    face: where it is read. What is named there to be typed ends nothing, releases nothing, and
    takes nothing that somebody uses.
    """
    # Those that were started together may be ranks, which wait for each other, or runs, which end.
    now, waits = time.time(), pictures.can_wait(reason._replace(siblings=()))
    first = asking.first_end(reason.rows, now)
    after_s = first["at"] - now if first else UNKNOWN_S
    seen = Status(tuple(reason.rows), tuple(reason.ahead), time=now, user=reason.user).to_dict()
    return {
        **{name: seen[name] for name in ("time", "user", "devices")},
        "asks": messages.asked(reason.request),
        "first_free": first,
        "place": 1 + len(reason.ahead) if waits else None,
        "retry_after_s": min(max(math.ceil(after_s), SOONEST_S), LATEST_S) if waits else None,
        "next": pictures.next_lines(reason, face, waits=waits)[:2],
    }
