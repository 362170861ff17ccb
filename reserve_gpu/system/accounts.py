"""Cached user and group lookups, because a directory server can take seconds to answer."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

with suppress(ImportError):  # Windows does not have these modules
    import grp
    import pwd

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")
V = TypeVar("V")

SHORTEST_S = 60.0  # minimum lifetime of a cached answer, in seconds
LONGEST_S = 300.0  # maximum lifetime of a cached answer, in seconds
SHARE = 0.01  # an answer is cached for the lookup's duration divided by this, within limits
CAPACITY = 1000  # maximum number of cached answers per lookup function


def remember(
    look_up: Callable[[K], V], clock: Callable[[], float] = time.monotonic
) -> Callable[[K], V]:
    """Decorate a lookup function with a cache whose entries expire.

    Most answers expire after `SHORTEST_S`, so that a kernel or `reserve-gpu top` notices changes.
    An answer that took a long time expires later, after at most `LONGEST_S`, so that a slow server
    does not delay every refresh. Failed lookups are cached as well.

    Args:
        look_up: The function to call for a key that is not cached. It reports failure by its return
            value, because exceptions are not cached.
        clock: A function that returns the current time in seconds.
    """
    cached: dict[K, tuple[float, V]] = {}

    @wraps(look_up)
    def recall(key: K) -> V:
        began = clock()
        if key in cached:
            expires, answer = cached[key]
            if began < expires:
                return answer
        answer = look_up(key)
        ended = clock()
        if len(cached) >= CAPACITY:
            cached.clear()
        cached[key] = ended + min(max((ended - began) / SHARE, SHORTEST_S), LONGEST_S), answer
        return answer

    return recall


@remember
def find_user(uid: int) -> pwd.struct_passwd | None:
    """Return a user's password database entry, or None if the user is unknown."""
    try:
        return pwd.getpwuid(uid)
    except (KeyError, NameError):
        return None


@remember
def find_gid(group: str) -> int | None:
    """Return a group's id, or None if the group is unknown."""
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError, OSError):
        return None


@remember
def find_groups(uid: int) -> frozenset[int]:
    """Return the ids of a user's groups, or an empty set if the user is unknown."""
    if entry := find_user(uid):
        with suppress(OSError):
            return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return frozenset()
