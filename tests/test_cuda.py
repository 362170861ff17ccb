"""The three variables, and whether CUDA has started: asked of a real process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu import cuda
from reserve_gpu.device import Device

if TYPE_CHECKING:
    from tests.machine import Machine

STARTED = "from reserve_gpu import cuda\ncuda.started()"
LOAD = "import ctypes; library = ctypes.CDLL('libcuda.so.1')"
LOADED = "'libcuda' in open('/proc/self/maps').read()"
IN_FORK = """
def forked():
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.write(writing, b'yes' if cuda.started() else b'no')
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(reading, 9).decode()
forked()
"""

WHOLE = Device(2, "GPU-a", memory_mib=4038)
OTHER = Device(0, "GPU-b", memory_mib=81920)
UNMEASURED = Device(1, "GPU-c")
INSTANCE = Device(1, "MIG-d", memory_mib=4864, instance=0)


def test_not_loaded_is_not_started(machine: Machine) -> None:
    """Without the driver library CUDA has not started, and asking does not load it."""
    with machine.child() as child:
        assert child.run(STARTED).value is False
        assert child.run(LOADED).value is False
    assert machine.calls() == []


def test_loaded_is_not_started(machine: Machine) -> None:
    """A loaded library, as after `import torch`, is not a started one; asking starts nothing."""
    with machine.child() as child:
        child.run(LOAD)
        assert child.run(LOADED).value is True
        assert [child.run(STARTED).value for _ in range(2)] == [False, False]
    assert not any(call.startswith("cuInit") for call in machine.calls())


def test_initialised_is_started(machine: Machine) -> None:
    """After cuInit CUDA has started, whoever called it and from wherever it was loaded."""
    with machine.child() as child:
        assert child.run(f"{LOAD}\nlibrary.cuInit(0)").value == 0
        assert child.run(STARTED).value is True


def test_failed_initialisation_is_not_started(machine: Machine) -> None:
    """A cuInit that found no device has not started CUDA."""
    with machine.child(CUDA_VISIBLE_DEVICES="") as child:
        assert child.run(f"{LOAD}\nlibrary.cuInit(0)").value == 100
        assert child.run(STARTED).value is False


@pytest.mark.parametrize(("start", "answer"), [("0", "no"), ("library.cuInit(0)", "yes")])
def test_forked_child_remembers(machine: Machine, start: str, answer: str) -> None:
    """A child forked after CUDA has started counts as started: the driver can't be asked there."""
    with machine.child() as child:
        child.run(f"{STARTED}\ncuda.remember_over_fork()\n{LOAD}\n{start}")
        assert child.run(IN_FORK).value == answer


@pytest.mark.parametrize(
    ("devices", "visible", "memory"),
    [
        ([WHOLE], "2", "4038"),
        ([WHOLE, OTHER], "2,0", "4038,81920"),
        ([OTHER, WHOLE], "0,2", "81920,4038"),
        ([INSTANCE], "MIG-d", "4864"),
        ([WHOLE, INSTANCE], "2,MIG-d", "4038,4864"),
        ([UNMEASURED], "1", None),
        ([WHOLE, UNMEASURED], "2,1", None),
    ],
)
def test_variables(devices: list[Device], visible: str, memory: str | None) -> None:
    """Whole GPUs go by index, instances by UUID; memory is in the same order or not set at all."""
    assert cuda.variables(devices) == {
        "CUDA_DEVICE_MEMORY": memory,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": visible,
    }
