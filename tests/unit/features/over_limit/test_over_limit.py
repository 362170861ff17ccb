"""The devices on which this process uses more memory than it reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.features.over_limit.over_limit import exceeded
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.reservation.holding import Holding
from tests.support.pictures import A100, T4

if TYPE_CHECKING:
    from reserve_gpu.model.devices import Device


@pytest.mark.parametrize(
    ("used_mib", "before", "expected"),
    [
        ({A100: 10.0}, (), ()),
        ({A100: 10.1, T4: 3.0}, (), (A100,)),
        ({A100: 9.0}, (A100,), ()),
        ({A100: None}, (), ()),
        ({A100: None, T4: 11.0}, (A100,), (A100, T4)),
        ({}, (A100,), ()),
    ],
)
def test_exceeded_devices(
    used_mib: dict[Device, float | None],
    before: tuple[Device, ...],
    expected: tuple[Device, ...],
) -> None:
    """A device whose use can't be read keeps its previous state."""
    held = Holding((A100, T4), {}, ReservationTerms(Size(10.0)))
    over, _ = exceeded(held, {}, used_mib, frozenset(before))
    assert over == set(expected)
