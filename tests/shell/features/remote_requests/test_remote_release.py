"""What a user has on a machine, and releases, from another process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.locked import held
from tests.support.waiters import stopped

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.remote_release import reserve_gpu

pytest.importorskip("ipykernel.kernelspec")

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("elsewhere")]


@pytest.mark.full
def test_a_stopped_kernel(here: Here) -> None:
    """A kernel that is stopped is said not to answer, and what it holds stays."""
    with here.kernel() as kernel:
        kernel.run("%reserve_gpu 1")
        with stopped(here, kernel.pid):
            done = reserve_gpu(here, "release")
            assert "does not respond: it is suspended, or it hangs. Leave that to " in done.stdout
            assert held(here) == [1]
