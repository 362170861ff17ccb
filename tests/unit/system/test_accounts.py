"""Tests of the cache for lookups of users and groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.system import accounts

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """A clock whose time a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def cached_lookup(clock: Clock, took_s: float = 0.0) -> tuple[list[str], Callable[[str], None]]:
    """Return a cached lookup that takes that long and finds nothing, and the list of its keys."""
    keys: list[str] = []

    def look_up(key: str) -> None:
        keys.append(key)
        clock.now += took_s

    return keys, accounts.remember(look_up, clock)


def test_a_result_is_kept_for_a_minute() -> None:
    """A name is looked up again after a minute, even if the first lookup found nothing."""
    clock = Clock()
    keys, look_up = cached_lookup(clock)
    for clock.now in (0, 1, 59, 60, 61, 119, 120):
        look_up("alice")
    look_up("bob")
    assert keys == ["alice", "alice", "alice", "bob"]


@pytest.mark.parametrize(("took_s", "kept_s"), [(0.5, 60), (2, 200), (60, 300)])
def test_a_slow_result_is_kept_for_longer(took_s: float, kept_s: float) -> None:
    """A slow lookup is repeated later, so that few refreshes wait for its server."""
    clock = Clock()
    keys, look_up = cached_lookup(clock, took_s)
    look_up("alice")
    for clock.now in (took_s + kept_s - 1, took_s + kept_s):
        look_up("alice")
    assert keys == ["alice", "alice"]
    assert clock.now == kept_s + 2 * took_s


def test_the_cache_is_bounded() -> None:
    keys, look_up = cached_lookup(Clock())
    for number in range(accounts.CAPACITY + 1):
        look_up(str(number))
    for number, times in ((accounts.CAPACITY, 1), (0, 2)):
        look_up(str(number))
        assert keys.count(str(number)) == times
