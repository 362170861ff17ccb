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
    before = _ours()
    yield
    assert _ours() == before


def _ours() -> dict[str, str]:
    """The variables that this package reads or sets; other packages set some of their own."""
    return {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "RESERVE_GPU_"))}
