"""Reservations that a user can release from another process."""

from __future__ import annotations

import pytest

from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.holders import Answer, DeviceStatus, Holder, Reserved
from reserve_gpu.render import reservation_list
from reserve_gpu.render.frontends import SHELL
from tests.support.holders import a_holder


def reserved(holder: Holder, index: int = 0) -> Reserved:
    """Return a reservation of one GPU."""
    device = Device(index, f"GPU-{index}")
    return Reserved(holder, (DeviceStatus(device, State.RESERVED, holders=(holder,)),))


def test_forged_pid_joins_no_reservations() -> None:
    """A holder that the kernel does not list is not merged with the pid in its record."""
    own = a_holder(4321, seen=True)._replace(file="GPU-0.lock")
    other = a_holder(4321)._replace(file="GPU-1.lock")
    both = [reserved(own, 0), reserved(other, 1)]
    found = Reserved.among([row for each in both for row in each.rows])
    assert [(each.holder, each.rows) for each in found] == [tuple(each)[:2] for each in both]


def test_pid_that_equals_the_number_of_a_gpu_is_not_used() -> None:
    each, other = reserved(a_holder(1, seen=True), 0), reserved(a_holder(9, seen=True), 1)
    assert reservation_list.name(each, [each]) == "1"
    assert reservation_list.name(each, [each, other]) == "GPU0"


@pytest.mark.parametrize("answer", [Answer.CUDA, Answer.CHILD, Answer.PROGRAM, Answer.SILENT])
def test_only_a_person_sees_the_command_that_ends_a_process(answer: Answer) -> None:
    each, command = reserved(a_holder(pid=4321)), "release 4321 --end"
    assert command in reservation_list.released(each, answer, [each], SHELL)
    program = SHELL._replace(is_for_program=True)
    assert command not in reservation_list.released(each, answer, [each], program)
