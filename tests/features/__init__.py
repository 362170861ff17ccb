"""Tests of the features, each in a folder that goes with its feature."""

from __future__ import annotations

import pytest

from reserve_gpu.reservation.feature_registry import FEATURES


def needs_feature(name: str) -> pytest.MarkDecorator:
    """Skip a test that uses a feature, too, where that one has no row."""
    there = any(row.module.startswith(f"features.{name}.") for row in FEATURES)
    return pytest.mark.skipif(not there, reason=f"needs the feature {name}")
