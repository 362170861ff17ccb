"""Fixtures of the tests of `reserve-gpu setup`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.commands.setup.profiles import Home

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return an empty home directory."""
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")
