"""The table of features."""

from __future__ import annotations

import inspect

import pytest

from reserve_gpu.reservation.feature import FEATURES, Feature, FeatureRow

HOOKS = {name for name, _ in inspect.getmembers(Feature, inspect.isfunction)}


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
def test_feature_has_no_unused_method(row: FeatureRow) -> None:
    """Each method is a hook or is called in its module, so a hook is not misspelled."""
    kind = row.load()
    assert issubclass(kind, Feature)
    source = inspect.getsource(inspect.getmodule(kind))  # type: ignore[arg-type]
    own = {name for name, method in vars(kind).items() if inspect.isfunction(method)}
    assert [name for name in own - HOOKS if f".{name}" not in source] == []
