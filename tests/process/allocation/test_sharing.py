"""Processes that share a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.machine import Machine


@pytest.mark.promise
def test_each_holder_of_a_part_has_a_record_and_a_pid(machine: Machine) -> None:
    """Each holder is listed with its own PID and note, until it is killed."""
    machine.write("gpu")
    holders = "[(h.pid, h.note, h.confirmed) for h in reserve_gpu.status().rows[0].holders]"
    with machine.child() as first, machine.child() as second, machine.child() as third:
        for child, note in ((first, "one"), (second, "two")):
            assert child.reserve(f"memory='1GB', note={note!r}").value == "0"
        assert third.run(holders).value == [[first.pid, "one", True], [second.pid, "two", True]]
        assert f"pid {first.pid}" in third.reserve().text
        first.kill()
        assert third.run(holders).value == [[second.pid, "two", True]]
        assert f"pid {second.pid}" in third.reserve("0").text
        assert third.reserve("memory='1GB', note='three'").value == "0"
        both = [[second.pid, "two", True], [third.pid, "three", True]]  # its own first
        assert second.run(holders).value == both
