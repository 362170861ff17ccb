"""Functions that are called before a process ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import reserve_gpu
from reserve_gpu.system.shutdown import ProcessEnd
from tests.support.machine import LIMIT_S


@pytest.mark.parametrize(("function", "limit"), [(7, "5m"), (print, "soon")])
def test_invalid_function_or_limit_is_refused(function: Any, limit: str) -> None:
    with pytest.raises(reserve_gpu.RequestError):
        reserve_gpu.before_end(function, limit=limit)


def test_all_functions_share_the_longest_limit() -> None:
    """Three functions that never return delay the end only by the longest limit."""
    end, problems, is_over = ProcessEnd(longest_s=0.1), list[str](), threading.Event()
    for _ in range(3):
        end.call_before(lambda: is_over.wait(LIMIT_S), LIMIT_S)
    end.begin(lambda: False, problems.append, is_over.set)
    assert is_over.wait(LIMIT_S)
    assert ["within 0 s" in problem for problem in problems] == [False, True, True]
