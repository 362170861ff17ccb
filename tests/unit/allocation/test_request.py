"""The arguments of reserve() as a request, the deadline of a wait, and the idle-memory setting.

tests/unit/texts/test_invalid_requests.py contains the errors for invalid arguments.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from reserve_gpu.allocation import request
from reserve_gpu.allocation.request import Deadline
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from reserve_gpu.system import settings


@pytest.mark.parametrize(
    ("arguments", "expected", "needed"),
    [
        ({}, Request(), 1),
        ({"devices": 2}, Request(("2",)), 1),
        ({"devices": [1, "GPU-a"]}, Request(("1", "GPU-a")), 2),
        ({"devices": "1 3", "count": 2}, Request(("1", "3"), 2), 2),
        ({"devices": "0-2,5"}, Request(("0", "1", "2", "5")), 4),
        ({"count": 1}, Request(count=1), 1),
        ({"min_memory": "1 gb"}, Request((), None, 10**9 / 2**20, "GB"), 1),
        ({"min_memory": "1000"}, Request((), None, 1000, "MiB"), 1),
        ({"memory": "100%"}, Request(terms=ReservationTerms(Size(0, percent=100))), 1),
        ({"name": "a100"}, Request(model="a100"), 1),
        ({"note": "x"}, Request(terms=ReservationTerms(note="x")), 1),
    ],
)
def test_arguments_become_a_request(
    arguments: dict[str, Any], expected: Request, needed: int
) -> None:
    """The request contains the parsed arguments, and knows how many devices it needs."""
    parsed = request.parse(**{"devices": None, **arguments})
    assert (parsed, parsed.needed) == (expected, needed)


@pytest.mark.parametrize(("value", "mib"), [(None, None), ("", None), ("1GiB", 1024)])
def test_the_idle_memory_setting_is_a_size(
    monkeypatch: pytest.MonkeyPatch, value: str | None, mib: float | None
) -> None:
    """An unset or empty $RESERVE_GPU_IDLE_MEMORY means the default."""
    monkeypatch.delenv(settings.IDLE_MEMORY, raising=False)
    if value is not None:
        monkeypatch.setenv(settings.IDLE_MEMORY, value)
    assert request.idle_mib() == mib


@pytest.mark.parametrize(
    ("wait", "waits", "limit_s"),
    [(None, False, None), (0, True, 0), (True, True, math.inf), ("1h", True, 3600)],
)
def test_a_wait_has_a_deadline(wait: object, *, waits: bool, limit_s: float | None) -> None:
    """Without `wait` a request does not wait; a wait of 0 s is over at once."""
    before = time.monotonic()
    deadline = Deadline.after(wait)
    assert (deadline.waits, deadline.limit_s) == (waits, limit_s)
    assert deadline.at >= before + (limit_s or 0)
    assert bool(deadline.left_s) is bool(limit_s)
