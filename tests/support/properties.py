"""Helpers of tests: properties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reserve_gpu.model.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable


def unless_refused(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns, None if it refuses by a RequestError of one line."""
    try:
        return function(*arguments)
    except RequestError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) == 1
    return None
