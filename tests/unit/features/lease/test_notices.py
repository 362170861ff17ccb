"""Commands in a notice about a lease."""

from __future__ import annotations

import time
from math import inf

import pytest

from reserve_gpu.features.lease.lease_notices import NEAR_S, Action, LeaseNotice
from reserve_gpu.model.requests import Lease, Rule
from reserve_gpu.render.frontends import MAGIC
from tests.support.frontends import GPU0

RULE = Rule('time = "24h"', "[limits]", "/etc/reserve_gpu.toml", 86400.0)


def warning(left_s: float, longer_s: float = inf) -> str:
    """Return the warning before a lease ends."""
    at = time.time() + left_s
    rule = None if longer_s == inf else RULE
    lease = Lease(until=at)
    return LeaseNotice(Action.WARN, [GPU0], lease, at, longer_s=longer_s, rule=rule).text(MAGIC)


@pytest.mark.parametrize(
    ("longer_s", "command"),
    [
        (inf, "%reserve_gpu --for 2h"),
        (86400.0, "%reserve_gpu --for 2h"),
        (5430.0, "%reserve_gpu --for 90m"),
        (379.0, "%reserve_gpu --for 6m"),
        (301.0, None),
    ],
)
def test_command_to_extend_stays_within_the_rule(longer_s: float, command: str | None) -> None:
    """A warning offers at most the time that the rule allows, and no less than what is left."""
    text = warning(299.0, longer_s)
    assert text.splitlines()[-1] == command or (command is None and "--for" not in text)


def test_seconds_are_shown_for_the_last_two_minutes() -> None:
    assert warning(NEAR_S - 1).split(" ends at ")[1].count(":") == 3
    assert warning(NEAR_S + 5).split(" ends at ")[1].count(":") == 2
