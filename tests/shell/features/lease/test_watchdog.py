"""A command that ends when its time is over, and what ends it: real processes, real signals."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.watchdog import alarms, running

pytestmark = pytest.mark.process


@pytest.mark.full
def test_without_its_watcher_a_command_is_overdue(here: Here) -> None:
    """When what watches is killed the command runs on, and others read that it is overdue."""
    with running(here, "--for", "3s", "--", "sh", "-c", "echo; exec sleep 60") as process:
        (watching,) = alarms(process.pid)
        os.kill(watching, signal.SIGKILL)
        wait_for(lambda: "overdue since" in str(reserve_gpu.status()), 0.1)
        assert process.poll() is None
