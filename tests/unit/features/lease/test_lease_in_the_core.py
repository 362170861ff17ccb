"""Leases where the core is tested, too: hints, threads, descriptors, and the lock of imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.frontends import FACES, assert_asks_for

if TYPE_CHECKING:
    from reserve_gpu.render.frontends import Frontend


@pytest.mark.parametrize("frontend", FACES.values(), ids=FACES.keys())
def test_a_hint_can_be_typed_as_it_stands(frontend: Frontend) -> None:
    """What is to be typed asks for the end that was asked for."""
    assert_asks_for(frontend, {"for_": 3660})
