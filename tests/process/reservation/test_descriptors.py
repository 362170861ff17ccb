"""What other code does to the descriptors of a process: closes all of them, or uses them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.locked import held
from tests.support.reserving import refused

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.descriptors import BEFORE, assert_all_are_told

RELOCKED = "Other code in this process closed the lock file of GPU{0}. GPU{0} has been locked again"
# For a child to run: all are closed but its standard ones and the pipe for its answers.
CLOSE_ALL = """
for number in range(3, 256):
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
            os.close(number)
    except OSError:
        pass
"""


def test_all_closed(here: Here) -> None:
    """A process that closes all of its descriptors has its GPU locked again at its next call."""
    with here.child() as child:
        assert child.reserve("0").value == "0"
        assert child.run(CLOSE_ALL).error is None
        assert held(here) == []
        assert child.reserve("0").value == "0"
        assert held(here) == [0]
        assert "reserved" in refused("0")
        child.run(CLOSE_ALL)
        child.run("from reserve_gpu.ipython import magic")
        (line,) = child.run("magic.end_cell()").value
        assert line.startswith(RELOCKED.format(0))
        assert held(here) == [0]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("options", ["", "memory='1GB'"])
def test_no_descriptor_is_left(machine: Machine, before: str, options: str) -> None:
    """Who can open no more files reads that, wherever it shows first, and nothing is changed.

    Python says it by itself where nothing of this package has been asked for yet.
    """
    assert_all_are_told(machine, before, options)
