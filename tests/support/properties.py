"""The Hypothesis profile of all property tests, and a helper for functions that may refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings

from reserve_gpu.model.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

settings.register_profile(
    "reserve_gpu",
    deadline=None,
    derandomize=True,
    max_examples=150,
    # All examples of a test use one machine, and leave it as it was.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("reserve_gpu")


def result_unless_refused(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result, or None if it raises a RequestError with one line of text."""
    try:
        return function(*arguments)
    except RequestError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) == 1
    return None
