"""Commands in notices about the current lease."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.features.lease.lease_notices import Action, LeaseNotice
from reserve_gpu.features.lease.timer import LeaseTimer
from reserve_gpu.render.frontends import MAGIC
from reserve_gpu.reservation.session import session
from tests.support.parts import ONE, promised, records
from tests.support.reserving import variables

if TYPE_CHECKING:
    from tests.support.here import Here


def warning() -> LeaseNotice:
    """Return the warning about the current reservation."""
    held = session().holding
    return LeaseTimer.notice(held, Action.WARN, held.lease.until or 0.0)


@pytest.mark.parametrize("is_shared", [True, False])
def test_command_to_extend_keeps_the_part(here: Here, *, is_shared: bool) -> None:
    """The command in a warning extends the lease and keeps the part of the GPU and its limits."""
    here.write(ONE)
    shell = here.shell()
    shell.run("%reserve_gpu --memory 4000MiB --for 4m")
    before = variables()
    command = warning().text(MAGIC).splitlines()[-1]
    if is_shared:
        with promised(here, gpu0=[3000]):
            assert shell.run(command).error is None
    else:
        assert shell.run(command).error is None
    assert variables() == before
    assert records(here) == [4000]
    assert (session().holding.lease.until or 0.0) - time.time() == pytest.approx(7200, abs=60)


def test_warning_of_an_end_by_a_rule_names_the_rule(here: Here) -> None:
    here.rules.write_text('[limits]\ntime = "2h"\n')
    reserve_gpu.reserve()
    assert warning().rule
    assert "--for" not in warning().text(MAGIC)
    assert warning().longer_s == pytest.approx(7200, abs=60)
