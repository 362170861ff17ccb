"""A reservation whose device gets another number, or is lost, in one process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from tests.support.locked import held
from tests.support.reserving import variables

if TYPE_CHECKING:
    from tests.support.here import Here

A = "gpu\n  name RTX A6000\n  bus 0000:01:00.0\n  uuid GPU-aaaaaaaa-1\n"
B = "gpu\n  name RTX A6000\n  bus 0000:02:00.0\n  uuid GPU-bbbbbbbb-1\n"
C = "gpu\n  name RTX A6000\n  bus 0000:03:00.0\n  uuid GPU-cccccccc-1\n"
NEW = "gpu\n  name RTX 4090\n  bus 0000:00:10.0\n  uuid GPU-eeeeeeee-1\n"
LOST = "fail nvmlDeviceGetHandleByIndex_v2 {} 15\n"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def test_the_next_cell_uses_the_new_number(here: Here) -> None:
    """The cell warns once, and other processes read the new number in the lock file."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    here.write(NEW + A + B)
    cell = shell.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert cell.stdout == "2\n"
    assert "GPU1 is now GPU2" in cell.stderr
    assert shell.run("1").stderr == ""
    assert [device.index for device in reserve_gpu.current().devices] == [2]  # type: ignore[union-attr]
    fields = json.loads((here.locks / "GPU-bbbbbbbb-1.lock").read_bytes())
    assert (fields["label"], fields["index"], fields["visible"]) == ("GPU2", 2, "2")
    here.write(B)  # the others are gone
    cell = shell.run("%reserve_gpu")
    assert "GPU2 is now GPU0" in cell.stderr
    assert cell.stdout.endswith("CUDA_VISIBLE_DEVICES = '0'\n")


def test_the_next_request_in_a_script_uses_the_new_numbers(here: Here) -> None:
    """reserve() returns the same reservation."""
    here.write(A + B + C)
    reservation = reserve_gpu.reserve("2,0")
    here.write(NEW + A + B + C)
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as warnings:
        assert reserve_gpu.reserve() is reservation
    told = [str(each.message).partition(":")[0] for each in warnings]
    assert told == ["GPU2 is now GPU3", "GPU0 is now GPU1"]
    assert variables()[VISIBLE] == reservation.environ[VISIBLE] == "3,1"
    assert [device.index for device in reservation.devices] == [3, 1]


def test_a_lost_gpu_is_replaced(here: Here) -> None:
    """%reserve_gpu gives a notebook another GPU instead."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu")
    here.write(LOST.format(0) + A + B)
    cell = shell.run("%reserve_gpu")
    assert "Reserving GPU1" in cell.stdout
    assert "GPU0 is lost" in cell.stderr
    assert held(here) == [1]


def test_a_reservation_of_several_gpus_keeps_the_working_ones(here: Here) -> None:
    here.write(A + B + C)
    shell = here.shell()
    shell.run("%reserve_gpu 2,0")
    here.write(LOST.format(0) + A + B + C)
    assert "GPU0 is lost" in shell.run("1").stderr
    assert variables()[VISIBLE] == "2"
    assert held(here) == [2]


def test_a_notebook_does_not_see_the_gpu_that_replaces_its_own(here: Here) -> None:
    """The number of a removed GPU can become another GPU's."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu 0")
    here.write(B)
    cell = shell.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])")
    assert cell.stdout == "['']\n"
    assert "GPU0 is lost" in cell.stderr


def test_a_driver_error_releases_nothing(here: Here) -> None:
    """The driver may not start, or a reading may fail."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    for trouble in ("fail nvmlInitWithFlags * 18\n", "fail nvmlDeviceGetUUID 1 999\n"):
        here.write(trouble + A + B)
        assert shell.run("1").stderr == ""
        assert (variables()[VISIBLE], held(here)) == ("1", [1])
