"""The status of GPUs in parts whose holders are other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.platforms import CONTAINER, behind
from tests.support.status import devices_of, parts_of

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine


def test_each_holder_uses_the_memory_of_its_own_processes(machine: Machine) -> None:
    machine.write("gpu")
    with machine.child() as first, machine.child() as second:
        for child, size in ((first, "2GiB"), (second, "3GiB")):
            assert child.reserve(f"memory={size!r}").value == "0"
        machine.write(f"gpu\n compute {first.pid} 2100\n compute {second.pid} 1000")
        (device,) = devices_of(first)
    assert parts_of(device) == [(2048, 2100, True), (3072, 1000, False)]
    assert device["memory_promisable_mib"] == 8192 - 2100 - 3072


@pytest.mark.parametrize("is_own", [False, True])
def test_in_a_container_the_use_of_a_part_is_unknown(here: Here, *, is_own: bool) -> None:
    """A pid that the driver lists may be of another process there."""
    here.write("gpu\n memory 40960\n used 12000")
    if is_own:
        with behind(here, *CONTAINER) as child:
            assert child.reserve("memory='10GiB'").value == "0"
            (device,) = devices_of(child)
    else:
        with here.rival(part_mib=10240), behind(here, *CONTAINER) as child:
            (device,) = devices_of(child)
        assert device["memory_promisable_mib"] == 40960 - 12000
    assert parts_of(device) == [(10240, None, None)]
