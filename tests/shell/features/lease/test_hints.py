"""The commands that are named before a lease ends do as described."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.features.lease.lease_notices import Action, LeaseNotice
from reserve_gpu.features.lease.timer import LeaseTimer
from reserve_gpu.render.frontends import MAGIC, PYTHON
from reserve_gpu.reservation.session import session
from tests.support.parts import ONE, promised, records
from tests.support.reserving import variables

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.hints import typed


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
