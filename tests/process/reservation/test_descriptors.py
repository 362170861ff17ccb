"""A child process closes all its descriptors, or uses them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model.devices import State
from tests.support.locked import held
from tests.support.reserving import would_be_refused

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.descriptors import BEFORE, assert_all_are_told

# Code for a child, which closes all descriptors except the standard ones and the pipe to the test.
CLOSE_ALL = """
for number in range(3, 256):
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
            os.close(number)
    except OSError:
        pass
"""


def test_a_device_is_locked_again_after_all_descriptors_were_closed(here: Here) -> None:
    """This happens at the next request, or at the end of a cell."""
    with here.child() as child:
        assert child.reserve("0").value == "0"
        assert child.run(CLOSE_ALL).error is None
        assert held(here) == []
        assert child.reserve("0").value == "0"
        assert held(here) == [0]
        assert would_be_refused("0").rows[0].state is State.RESERVED
        child.run(CLOSE_ALL)
        child.run("from reserve_gpu.ipython import magic")
        (line,) = child.run("magic.end_cell()").value
        assert "GPU0 has been locked again" in line
        assert held(here) == [0]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("options", ["", "memory='1GB'"])
def test_a_request_without_free_descriptors_changes_nothing(
    machine: Machine, before: str, options: str
) -> None:
    """The error is the same wherever the missing descriptor is noticed first."""
    assert_all_are_told(machine, before, options)
