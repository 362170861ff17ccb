"""Look up users and groups, and remember the answers: a directory server can take seconds."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

with suppress(ImportError):  # Windows has neither
    import grp
    import pwd

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")
V = TypeVar("V")

SHORTEST_S = 60.0
LONGEST_S = 300.0
SHARE = 0.01  # repeated look-ups of one name take at most this share of the time
CAPACITY = 1000


def remember(
    look_up: Callable[[K], V], clock: Callable[[], float] = time.monotonic
) -> Callable[[K], V]:
    """Return a look-up that asks again only after a minute, or later if the answer was slow.

    A command asks once for each user. A kernel, or `reserve-gpu top`, learns of a change within
    `SHORTEST_S`. A slow answer is kept for longer, at most `LONGEST_S`, so that a slow server does
    not slow down every refresh. Failed look-ups are remembered like any other.

    Args:
        look_up: The function to call for a new key. It returns None instead of raising.
        clock: The current time in seconds.
    """
    known: dict[K, tuple[float, V]] = {}

    @wraps(look_up)
    def recall(key: K) -> V:
        began = clock()
        if key in known:
            expires, answer = known[key]
            if began < expires:
                return answer
        answer = look_up(key)
        ended = clock()
        if len(known) >= CAPACITY:
            known.clear()
        known[key] = ended + min(max((ended - began) / SHARE, SHORTEST_S), LONGEST_S), answer
        return answer

    return recall


@remember
def find_user(uid: int) -> pwd.struct_passwd | None:
    """Return a user's entry, None if the system has none."""
    try:
        return pwd.getpwuid(uid)
    except (KeyError, NameError):
        return None


@remember
def find_gid(group: str) -> int | None:
    """Return the number of a group by its name, None if there is no such group."""
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError, OSError):
        return None


@remember
def find_groups(uid: int) -> frozenset[int]:
    """Return the numbers of the groups that the system's database lists for a user."""
    if entry := find_user(uid):
        with suppress(OSError):
            return frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return frozenset()
