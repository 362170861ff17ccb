"""The commands that are named before a lease ends do as described."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.features.lease.lease_notices import Action, LeaseNotice
from reserve_gpu.model.requests import Lease, Rule, Size
from reserve_gpu.render.frontends import MAGIC, PYTHON
from tests.support.frontends import GPU0, GPU1

if TYPE_CHECKING:
    import reserve_gpu
    from reserve_gpu.render.frontends import Frontend

from tests.support.hints import typed

RULE = Rule('time = "24h"', "[limits]", "/etc/reserve_gpu.toml", 86400.0)


def notice(action: Action, left_s: float = 300.0, **more: Any) -> LeaseNotice:
    at = time.time() + left_s
    lease = Lease(until=at)
    return LeaseNotice(action, [GPU0], lease, at)._replace(**more)


@pytest.mark.parametrize(
    ("size", "devices", "frontend", "expected"),
    [
        (None, [GPU0], MAGIC, "%reserve_gpu"),
        (Size(4000.0, "MiB"), [GPU0], MAGIC, "%reserve_gpu --memory 4000MiB"),
        (None, [GPU0, GPU1], MAGIC, "%reserve_gpu -n 2"),
        (
            Size(4000.0, "MiB"),
            [GPU0, GPU1],
            PYTHON,
            "reserve_gpu.reserve(count=2, memory='4000MiB')",
        ),
    ],
)
def test_the_same_again_after_the_end(
    size: Size | None, devices: list[reserve_gpu.Device], frontend: Frontend, expected: str
) -> None:
    """After the end the hint asks for as many GPUs, and as large a part, as were held."""
    text = notice(Action.RELEASE, -1.0, size=size, devices=devices).text(frontend)
    assert typed(text) == expected


@pytest.mark.parametrize(
    ("longer_s", "hint"),
    [
        (86400.0, "%reserve_gpu --for 2h"),
        (5430.0, "%reserve_gpu --for 90m"),
        (301.0, None),  # the end is the rule's
    ],
)
def test_a_hint_stays_within_the_rule(longer_s: float, hint: str | None) -> None:
    """No more time is offered than the administrator's rule allows; if none is left, it says so."""
    text = notice(Action.WARN, longer_s=longer_s, rule=RULE).text(MAGIC)
    if hint:
        assert typed(text) == hint
    else:
        assert text.endswith(
            "A rule doesn't allow you to extend it: "
            'time = "24h" ([limits] in /etc/reserve_gpu.toml).'
        )
        assert "--for" not in text
