"""The table of features, and what the order of its rows means."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import reserve_gpu
from reserve_gpu.reservation.session import session
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here


def test_the_history_says_how_a_lease_has_ended(logged: Here) -> None:
    """What a lease ends is logged as over, not as released or lost."""
    reserve_gpu.reserve(1, for_=2)
    wait_for(lambda: reserve_gpu.current() is None)
    session().run(session()._step)
    folder = logged.home / ".local/state/reserve_gpu" / os.uname().nodename
    (file,) = folder.glob("*.jsonl")
    assert json.loads(file.read_text())["how"] == "its time was over"
