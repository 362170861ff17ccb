"""The fixtures that all tests share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with two idle GPUs."""
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """No test leaves a changed environment behind."""
    before = dict(os.environ)
    yield
    before.pop("PYTEST_CURRENT_TEST", None)
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    assert after == before
