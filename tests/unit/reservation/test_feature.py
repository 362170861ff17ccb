"""The table of features, and what the order of its rows means."""

from __future__ import annotations

import inspect

import pytest

from reserve_gpu.reservation.feature import FEATURES, Feature, FeatureRow

HOOKS = {name for name, _ in inspect.getmembers(Feature, inspect.isfunction)}


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_each_row_is_a_feature(row: FeatureRow) -> None:
    """Each row loads, and its class has no method that nobody calls, as a misspelt hook is."""
    kind = row.load()
    assert issubclass(kind, Feature)
    source = inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]
    own = {name for name, method in vars(kind).items() if inspect.isfunction(method)}
    assert [name for name in own - HOOKS if f".{name}" not in source] == []
