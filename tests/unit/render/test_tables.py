"""Tables of numbers with bars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reserve_gpu.render import phrases
from reserve_gpu.render.tables import in_columns


@pytest.mark.parametrize(
    ("shares", "length", "columns"),
    [
        ((0.25, 0.25, 0.5), 8, [2, 2, 4]),
        ((0.001, 0.0, 0.0), 10, [0, 0, 1]),
        ((0.6, 0.6, 0.6), 10, [6, 4, 0]),
    ],
)
def test_bar_is_split_into_its_pieces(
    shares: tuple[float, ...], length: int, columns: list[int]
) -> None:
    assert in_columns(shares, length) == columns


@given(st.lists(st.floats(0, 2), min_size=3, max_size=3), st.integers(8, 24))
def test_bar_fits_its_column(shares: list[float], length: int) -> None:
    """A bar is never wider than its column, and a nonzero bar is visible."""
    found = in_columns(shares, length)
    assert min(found) >= 0
    assert bool(sum(shares)) <= sum(found) <= length


@pytest.mark.parametrize(
    ("hours", "text"), [(0.0, "0.0"), (0.049, "<0.1"), (0.05, "0.1"), (12345.64, "12345.6")]
)
def test_hours_have_one_decimal_place(hours: float, text: str) -> None:
    assert phrases.hours(hours) == text
