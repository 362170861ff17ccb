"""Until when somebody holds a GPU: what others read of it, and what it makes likeliest."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import reserve_gpu

if TYPE_CHECKING:
    from tests.support.here import Here


HOUR_S, DAY_S = 3600.0, 86400.0
# A Friday, at noon where the tests run.
NOW = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))


# -- for programs ----------------------------------------------------------------------------------


def test_json(here: Here) -> None:
    """The JSON has the terms as they were written, and since when one is overdue."""
    now = time.time()
    with (
        here.rival("0", since=now - 60, until=now - 30),
        here.rival("1", idle_s=60, if_wanted=True),
    ):
        first, second = (
            device["holders"][0] for device in reserve_gpu.status().to_dict()["devices"]
        )
    assert (first["until"], first["overdue"]) == (now - 30, now - 30)
    assert (first["idle_s"], first["if_wanted"]) == (None, False)
    assert [second[name] for name in ("until", "idle_s", "if_wanted", "overdue")] == [
        *[None, 60, True, None]
    ]
