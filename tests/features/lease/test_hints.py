"""The commands that are named before a lease ends do as described."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.lease.lease_notices import Action, LeaseNotice
from reserve_gpu.features.lease.timer import LeaseTimer
from reserve_gpu.model.requests import Lease, Rule, Size
from reserve_gpu.render.frontends import MAGIC, PYTHON
from reserve_gpu.reservation.session import session
from tests.reserving import variables
from tests.test_frontends import GPU0, GPU1
from tests.test_parts import ONE, promised, records

if TYPE_CHECKING:
    from reserve_gpu.render.frontends import Frontend
    from tests.here import Here

RULE = Rule('time = "24h"', "[limits]", "/etc/reserve_gpu.toml", 86400.0)


def notice(action: Action, left_s: float = 300.0, **more: Any) -> LeaseNotice:
    at = time.time() + left_s
    lease = Lease(until=at)
    return LeaseNotice(action, [GPU0], lease, at)._replace(**more)


def typed(text: str) -> str:
    """Return the command to type: the last line."""
    return text.splitlines()[-1]


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


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_hint_keeps_a_part(here: Here, *, is_shared: bool) -> None:
    """To type what the warning says keeps the part and its caps, on a shared GPU and alone."""
    here.write(ONE)
    shell = here.shell()
    shell.run("%reserve_gpu --memory 4000MiB --for 4m")
    before = variables()
    line = typed(shown(Action.WARN).text(MAGIC))
    if is_shared:
        with promised(here, gpu0=[3000]):
            assert shell.run(line).error is None
    else:
        assert shell.run(line).error is None
    assert variables() == before
    assert records(here) == [4000]
    assert (session().holding.lease.until or 0.0) - time.time() == pytest.approx(7200, abs=60)


def shown(action: Action) -> LeaseNotice:
    """Return a notice of what is held, as the timer shows it."""
    now = session().holding
    return LeaseTimer.notice(now, action, now.lease.until or 0.0)


def test_an_end_by_a_rule_has_no_hint(here: Here) -> None:
    """A message about an end by a rule names no command that the rule refuses."""
    here.rules.write_text('[limits]\ntime = "2h"\n')
    reserve_gpu.reserve()
    text = shown(Action.WARN).text(PYTHON)
    assert 'doesn\'t allow you to extend it: time = "2h"' in text
