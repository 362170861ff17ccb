"""Users and groups are looked up once, not once for each place that names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.system import accounts

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def counting(clock: Clock, took_s: float = 0.0) -> tuple[list[str], Callable[[str], None]]:
    """Return the keys that are looked up, and a look-up that takes so long and finds nothing."""
    asked: list[str] = []

    def look_up(key: str) -> None:
        asked.append(key)
        clock.now += took_s

    return asked, accounts.remember(look_up, clock)


def test_an_answer_is_kept_for_a_minute() -> None:
    """A name is looked up again after a minute, even if the first look-up found nothing."""
    clock = Clock()
    asked, recall = counting(clock)
    for clock.now in (0, 1, 59, 60, 61, 119, 120):
        recall("alice")
    recall("bob")
    assert asked == ["alice", "alice", "alice", "bob"]


@pytest.mark.parametrize(("took_s", "kept_s"), [(0.5, 60), (2, 200), (60, 300)])
def test_a_slow_answer_is_kept_for_longer(took_s: float, kept_s: float) -> None:
    """A slow look-up is repeated later, so that its server slows down few refreshes."""
    clock = Clock()
    asked, recall = counting(clock, took_s)
    recall("alice")
    for clock.now in (took_s + kept_s - 1, took_s + kept_s):
        recall("alice")
    assert asked == ["alice", "alice"]
    assert clock.now == kept_s + 2 * took_s


def test_remembered_answers_are_bounded() -> None:
    """A process that sees very many users does not remember them all."""
    asked, recall = counting(Clock())
    for number in range(accounts.CAPACITY + 1):
        recall(str(number))
    for number, times in ((accounts.CAPACITY, 1), (0, 2)):
        recall(str(number))
        assert asked.count(str(number)) == times
