"""A helper of property tests for functions that may refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reserve_gpu.model.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable


def result_unless_refused(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, or None if it raises a RequestError with one line of text."""
    try:
        return function(*arguments)
    except RequestError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) == 1
    return None
