"""A fault matrix: every driver function that a reservation calls x every error code there is.

Generated: the functions come from the stand-in driver's log of each kind of reservation, the codes
from the bindings. All of it happens in the test process, as the stand-in driver reads its scenario
again at every call. A sample of the kinds and codes is tried at every run; with `pytest -m full`
that sample of kinds with all codes, and all kinds with that sample of codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.support.reserving import of_gpu, refused

if TYPE_CHECKING:
    from tests.support.here import Here

    Fault = tuple[tuple[str, ...], str, int]  # functions, where (`0`, `0:0`, `*`), code

from tests.support.faults import GPU

BUSY = " compute 4321000 {}\n"


def test_no_count(here: Here) -> None:
    """A driver without a GPU, and one that counts more than it lets us open, are told apart."""
    here.write("count 0\n")
    with pytest.raises(reserve_gpu.DriverError, match="no GPU"):
        reserve_gpu.reserve()
    here.write(f"count 3\n{GPU.format('a')}{BUSY.format(9000)}")
    text = refused()
    assert of_gpu(text, "0").startswith("busy: ")
    for number in "12":
        assert of_gpu(text, number).startswith("no permission: Insufficient Permissions")
