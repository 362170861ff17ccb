"""What a type checker sees of the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.type_checks import assert_mypy_sees

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.needs("lint")]

USER = """\
from reserve_gpu.dask import ReserveGPU

ReserveGPU(wait="1h", count=2)
ReserveGPU(nonsense=3)  # call-arg
ReserveGPU(count="two")  # arg-type
"""


def test_a_users_mistakes(tmp_path: Path) -> None:
    """With mypy --strict a wrong argument of the plugin is an error."""
    assert_mypy_sees(USER, tmp_path)
