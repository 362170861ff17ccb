"""Parts of GPUs in the status: what each sharer was promised and uses, and what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.platforms import CONTAINER, behind
from tests.support.status import devices_of

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.status_parts import numbers


def test_what_each_of_several_uses(machine: Machine) -> None:
    """Each sharer's use is that of its own processes, and so is who of them is over."""
    machine.write("gpu")
    with machine.child() as first, machine.child() as second:
        for child, size in ((first, "2GiB"), (second, "3GiB")):
            assert child.reserve(f"memory={size!r}").value == "0"
        machine.write(f"gpu\n compute {first.pid} 2100\n compute {second.pid} 1000")
        (device,) = devices_of(first)
    assert numbers(device) == [(2048, 2100, True), (3072, 1000, False)]
    assert device["memory_promisable_mib"] == 8192 - 2100 - 3072


def test_parts_in_a_container(here: Here) -> None:
    """In a container sizes are seen and uses are not, so nobody is known to be over."""
    here.write("gpu\n memory 40960\n used 12000")
    with here.rival(part_mib=10240), behind(here, *CONTAINER) as child:
        (device,) = devices_of(child)
    assert numbers(device) == [(10240, None, None)]
    assert device["memory_promisable_mib"] == 40960 - 12000


def test_the_own_part_in_a_container(here: Here) -> None:
    """In a container a pid that the driver lists may be another process's, so no use is known."""
    here.write("gpu\n memory 40960\n used 12000")
    with behind(here, *CONTAINER) as child:
        assert child.reserve("memory='10GiB'").value == "0"
        (device,) = devices_of(child)
    assert numbers(device) == [(10240, None, None)]
