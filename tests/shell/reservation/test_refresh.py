"""A reservation is of a device, whatever number the driver gives it, and ends with the device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.model.devices import Device
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


def mig(*uuids: str) -> str:
    instances = (
        f"  instance {slot}\n    memory 9856\n    gi {7 + slot}\n    uuid {uuid}\n"
        for slot, uuid in enumerate(uuids)
    )
    return "driver 570.86.15\ngpu\n  name NVIDIA A100\n  memory 81920\n  mig on\n" + "".join(
        instances
    )


# -- the decision ----------------------------------------------------------------------------------

GPU0, GPU1 = Device(0, "GPU-aaaa"), Device(1, "GPU-bbbb")
GPU2 = GPU1._replace(index=2)


# -- the numbers change ----------------------------------------------------------------------------


def test_the_next_cell_has_the_new_number(here: Here) -> None:
    """After a GPU is plugged in, the next cell says so, and runs with the right variables."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    here.write(NEW + A + B)
    cell = shell.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert cell.stdout == "2\n"
    assert cell.stderr == (
        "Warning: GPU1 is now GPU2: the driver has renumbered the GPUs. The variables are set for "
        "GPU2.\n"
    )
    assert shell.run("1").stderr == ""
    assert [device.index for device in reserve_gpu.current().devices] == [2]  # type: ignore[union-attr]
    here.write(B)  # the others are gone
    cell = shell.run("%reserve_gpu")
    assert "GPU2 is now GPU0" in cell.stderr
    assert cell.stdout.endswith("CUDA_VISIBLE_DEVICES = '0'\n")


def test_python_has_the_new_number(here: Here) -> None:
    """reserve() in a script returns the same reservation with the number that the GPU has now."""
    here.write(A + B + C)
    reservation = reserve_gpu.reserve("2,0")
    here.write(NEW + A + B + C)
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as warnings:
        assert reserve_gpu.reserve() is reservation
    told = [str(each.message).partition(":")[0] for each in warnings]
    assert told == ["GPU2 is now GPU3", "GPU0 is now GPU1"]
    assert variables()[VISIBLE] == reservation.environ[VISIBLE] == "3,1"
    assert [device.index for device in reservation.devices] == [3, 1]


def test_a_lease_survives_a_new_number(here: Here) -> None:
    """A reservation that ends keeps its end when its GPU gets another number, and says nothing."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu 1 --for 4h")
    lease = reserve_gpu.current().lease  # type: ignore[union-attr]
    here.write(NEW + A + B)
    told = shell.run("1")
    assert "GPU1 is now GPU2" in told.stderr
    assert "taken the place" not in told.stderr + told.stdout
    assert reserve_gpu.current().lease == lease  # type: ignore[union-attr]


def test_others_read_the_new_number(here: Here) -> None:
    """The lock file names the number that its holder's variable has now."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    here.write(NEW + A + B)
    shell.run("1")
    fields = json.loads((here.locks / "GPU-bbbbbbbb-1.lock").read_bytes())
    assert (fields["label"], fields["index"], fields["visible"]) == ("GPU2", 2, "2")


# -- the device is gone ----------------------------------------------------------------------------


def test_a_lost_gpu_is_replaced(here: Here) -> None:
    """%reserve_gpu gives a notebook another GPU in place of one that has fallen off the bus."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu")
    here.write(LOST.format(0) + A + B)
    cell = shell.run("%reserve_gpu")
    assert "Reserving GPU1" in cell.stdout
    assert cell.stderr == (
        "Warning: GPU0 is lost: GPU is lost (nvmlDeviceGetHandleByIndex). It is no "
        "longer reserved for this kernel.\n"
    )
    assert held(here) == [1]


def test_a_lost_gpu_without_another(here: Here) -> None:
    """If no other GPU is free, the notebook sees none, and reads why."""
    here.write(A)
    shell = here.shell()
    shell.run("%reserve_gpu")
    here.write(LOST.format(0) + A)
    cell = shell.run("%reserve_gpu")
    assert "GPU is lost" in cell.stderr + cell.stdout
    assert variables() == {VISIBLE: ""}
    assert held(here) == []


def test_one_of_two_is_lost(here: Here) -> None:
    """A reservation of several GPUs keeps the working ones."""
    here.write(A + B + C)
    shell = here.shell()
    shell.run("%reserve_gpu 2,0")
    here.write(LOST.format(0) + A + B + C)
    assert "GPU0 is lost" in shell.run("1").stderr
    assert variables()[VISIBLE] == "2"
    assert held(here) == [2]


def test_a_removed_gpu_leaves_its_number(here: Here) -> None:
    """A notebook whose GPU was removed does not see the GPU that has the number from then on."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu 0")
    here.write(B)
    cell = shell.run("import os; print([os.environ['CUDA_VISIBLE_DEVICES']])")
    assert cell.stdout == "['']\n"
    assert "GPU0 is lost: the driver no longer lists it" in cell.stderr


def test_instances_are_recreated(here: Here) -> None:
    """The number of a MIG instance means the instance that has it now."""
    here.write(mig("MIG-1111", "MIG-2222"))
    shell = here.shell()
    shell.run("%reserve_gpu 0:1")
    here.write(mig("MIG-3333", "MIG-4444", "MIG-5555"))
    cell = shell.run("%reserve_gpu 0:1")
    assert "CUDA_VISIBLE_DEVICES = 'MIG-4444'" in cell.stdout
    assert "reset" not in cell.stderr
    here.write("gpu\n  name NVIDIA A100\n  memory 81920\n  mig on\n")  # and none is left
    assert "GPU0:1 is lost" in shell.run("1").stderr
    assert variables() == {VISIBLE: ""}


def test_a_driver_that_does_not_answer_takes_nothing_away(here: Here) -> None:
    """A driver that does not start, or a reading that fails, releases nothing."""
    here.write(A + B)
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    for trouble in ("fail nvmlInitWithFlags * 18\n", "fail nvmlDeviceGetUUID 1 999\n"):
        here.write(trouble + A + B)
        assert shell.run("1").stderr == ""
        assert (variables()[VISIBLE], held(here)) == ("1", [1])
