"""What the driver says, through the real bindings, and what becomes of it."""

from __future__ import annotations

import _thread
import importlib
import os
import signal
import site
import sys
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

import reserve_gpu
from reserve_gpu.allocation.attempt import READINGS_LIMIT_S
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Link, Nvml
from reserve_gpu.model.devices import ComputeMode, Device, Fault, Gauges, State
from reserve_gpu.model.errors import DriverError, NoDriverError, NoFreeDeviceError, RequestError
from reserve_gpu.system import procfs
from reserve_gpu.system.executor import wait_for
from tests import driver
from tests.support.here import Without
from tests.support.locked import locked
from tests.support.machine import LIMIT_S
from tests.support.reserving import got, of_gpu, refused, variables

if TYPE_CHECKING:
    import ctypes.util
    from collections.abc import Iterator, Sequence

    from tests.support.here import Here

from tests.support.nvml import NO_V2, NO_V3

QUERIES = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]
NO_MEMORY_V2 = "missing nvmlDeviceGetMemoryInfo_v2\n"
NO_MEMORY = "fail nvmlDeviceGetMemoryInfo 0 4\nfail nvmlDeviceGetMemoryInfo_v2 0 4\n"
CORPUS = Path(__file__).parents[2] / "machines"
HANGING_S = 0.1  # a call that takes longer hangs


def processes_fail(code: int) -> str:
    """Let all process queries of all GPUs answer this error."""
    return "".join(
        f"fail {query}{version} * {code}\n" for query in QUERIES for version in ("", "_v2", "_v3")
    )


def walk(limit_s: float = 20.0) -> list[Device | Fault]:
    """Return all devices of the machine, in a conversation of its own."""
    with Nvml(limit_s) as nvml:
        return list(nvml.walk())


def labels(devices: Sequence[Device | Fault]) -> list[str]:
    return [device.label for device in devices]


# -- idle or not -----------------------------------------------------------------------------------

IDLE = {
    "nothing on it": "gpu",
    "a little memory": "gpu\n memory 4096\n used 200",
    "1000 MiB of a large card": "gpu\n memory 81920\n used 1000",
    "the driver's own reserve": "gpu\n memory 4096\n reserved 600",
    "the reserve, in a reading without it": f"{NO_MEMORY_V2}gpu\n memory 4096\n reserved 600",
    "Xorg on a small card": "gpu\n memory 2048\n graphics 1100 4",
    "a desktop's 2 GB": "gpu\n memory 10240\n graphics 1100 350\n graphics 1300 1650",
    "a desktop's 2 GB on a small card": "gpu\n memory 4096\n graphics 1100 2000",
    "a large desktop on a large card": "gpu\n memory 24576\n graphics 1100 1500\n graphics 1 2500",
    "graphics processes of unknown memory": "gpu\n graphics 1100 -\n graphics 1101 -",
    "a desktop, in a reading without the reserve": (
        f"{NO_MEMORY_V2}gpu\n memory 10240\n reserved 250\n graphics 1100 2000"
    ),
    "exclusive process without a process": "gpu\n mode exclusive_process",
    "exclusive thread without a process": "gpu\n mode exclusive_thread",
    "a driver before 510": f"{NO_V3}gpu",
    "a driver before 450": f"{NO_V3}{NO_V2}gpu",
    "process lists not supported": f"{processes_fail(3)}gpu",
    "process lists without permission": f"{processes_fail(4)}gpu",
    "process lists unknown, as under WSL2": f"{processes_fail(999)}gpu",
    "no compute mode": "fail nvmlDeviceGetComputeMode * 3\ngpu",
    "no MIG mode": "gpu\n mig none",
    "no name, VBIOS or width": (
        "fail nvmlDeviceGetName * 999\nfail nvmlDeviceGetVbiosVersion * 3\n"
        "fail nvmlDeviceGetCurrPcieLinkWidth * 3\ngpu"
    ),
}

# With the state that it is refused for, and what must be said of it.
BUSY = {
    "a compute process": ("gpu\n compute 4321000 3500", State.BUSY, "pid 4321000"),
    "a compute process of unknown memory": ("gpu\n compute 4321000 -", State.BUSY, "pid 4321000"),
    "a compute process beside a desktop": (
        "gpu\n memory 10240\n graphics 1 2000\n compute 4321000 10", State.BUSY, "pid 4321000",
    ),
    "a compute process, before 510": (
        f"{NO_V3}gpu\n compute 4321000 10", State.BUSY, "pid 4321000",
    ),
    "a compute process, before 450": (
        f"{NO_V3}{NO_V2}gpu\n compute 4321000 10", State.BUSY, "1 compute process",
    ),
    "an MPS client": ("gpu\n mps 777 100", State.BUSY, "777"),
    "a renderer": (
        "gpu\n memory 24576\n graphics 4321000 22000\n graphics 1 300", State.BUSY,
        "no reservation: pid 4321000, graphics",
    ),
    "a renderer on a small card": (
        "gpu\n memory 6144\n graphics 4321000 3200", State.BUSY, "pid 4321000, graphics",
    ),
    "many workers that render": (
        "gpu\n memory 24576\n" + "".join(f" graphics {pid} 900\n" for pid in range(7000, 7020)),
        State.BUSY, ", graphics, 0.9 GiB; ",
    ),
    "many workers that render and compute a little": (
        "gpu\n memory 24576\n" + "".join(
            f" graphics {pid} 900\n compute {pid} 900\n" for pid in range(7000, 7020)
        ),
        State.BUSY, ", graphics, 0.9 GiB; ",
    ),
    "memory of nobody": (
        "gpu\n memory 81920\n used 1100", State.BUSY, "1.1 GiB in use by no visible process",
    ),
    "memory of nobody on a small card": (
        "gpu\n memory 4096\n used 210", State.BUSY, "0.2 GiB in use by no",
    ),
    "memory of nobody beside a desktop": (
        "gpu\n memory 81920\n graphics 1 2000\n used 1100", State.BUSY,
        "1.1 GiB in use by no visible process",
    ),
    "memory of nobody beside the reserve": (
        f"{NO_MEMORY_V2}gpu\n memory 4096\n reserved 600\n used 200", State.BUSY,
        "in use by no visible process",
    ),
    "memory of nobody, process lists unknown": (
        f"{processes_fail(999)}gpu\n memory 8192\n used 3000", State.BUSY,
        "2.9 GiB in use by no visible process",
    ),
    "memory outside of a limited control group": (
        "gpu\n memory 81920\n limit 10240\n used 2000", State.BUSY, "2.0 GiB in use by no visible",
    ),
    "prohibited": ("gpu\n mode prohibited", State.PROHIBITED, "prohibited"),
    "prohibited and in use": (
        "gpu\n mode prohibited\n compute 4321000 5", State.PROHIBITED, "prohibited",
    ),
    "exclusive process with a process": (
        "gpu\n mode exclusive_process\n compute 4321000 5", State.BUSY, "4321000",
    ),
    "neither processes nor memory": (
        f"{processes_fail(3)}{NO_MEMORY}gpu", State.UNKNOWN, "neither",
    ),
    "neither processes nor memory but the host's": (
        f"{processes_fail(3)}gpu\n memory none", State.UNKNOWN, "it shares the host's memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("scenario", IDLE.values(), ids=IDLE.keys())
def test_idle(here: Here, scenario: str) -> None:
    """A GPU without a sign of use, by a reading that can be trusted, is idle."""
    here.write(scenario)
    assert got() == "0"


@pytest.mark.parametrize(("scenario", "state", "words"), BUSY.values(), ids=BUSY.keys())
def test_not_idle(here: Here, scenario: str, state: State, words: str) -> None:
    """A GPU with a sign of use, or without a reading, is not taken, and why is said."""
    here.write(scenario)
    with pytest.raises(NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    assert words in of_gpu(str(caught.value))
    assert [row.state for row in caught.value.rows] == [state]
    here.add("gpu")
    assert got() == "1"


def test_without_a_memory_reading(here: Here) -> None:
    """Without a memory reading the processes decide, if all can be seen; else it is unknown."""
    here.write(f"{NO_MEMORY}gpu")
    if procfs.sees_all_processes():
        assert got() == "0"
    else:  # in a container, an empty process list proves nothing
        assert "unknown" in of_gpu(refused())


@pytest.mark.parametrize("use", ["mode prohibited", "mode exclusive_process\n compute 4321000 5"])
def test_named_but_unusable(here: Here, use: str) -> None:
    """A GPU that CUDA would not let us onto is refused also if it is named."""
    here.write(f"gpu\n {use}\ngpu")
    assert "mode" in of_gpu(refused("0"))


SIZES = [("", True), ("299", False), ("301MiB", True), ("0.5GB", True), ("0", False)]


@pytest.mark.parametrize(("size", "is_idle"), SIZES)
def test_threshold_is_configurable(
    here: Here, monkeypatch: pytest.MonkeyPatch, size: str, *, is_idle: bool
) -> None:
    """$RESERVE_GPU_IDLE_MEMORY moves the threshold both ways."""
    here.write("gpu\n memory 8192\n used 300")
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", size)
    assert got() == "0" if is_idle else "0.3 GiB" in of_gpu(refused())


def test_threshold_that_is_no_size(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A $RESERVE_GPU_IDLE_MEMORY that is no size is refused by its name, and changes nothing."""
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", "much")
    with pytest.raises(RequestError, match="RESERVE_GPU_IDLE_MEMORY"):
        reserve_gpu.reserve()
    assert variables() == {}


# -- what is read ----------------------------------------------------------------------------------


def test_what_is_known_of_a_gpu(here: Here) -> None:
    """A GPU has its name, bus id, VBIOS, lanes and memory; None for what is not reported."""
    here.write(
        "gpu\n name Tesla T4\n bus 0001:3b:00.0\n vbios 90.04\n width 8\n memory 15360\n"
        "gpu\n width none\nfail nvmlDeviceGetName 1 3\n"
        "fail nvmlDeviceGetMemoryInfo_v2 1 4\nfail nvmlDeviceGetMemoryInfo 1 4\n"
    )
    first, second = walk()
    assert first == Device(
        0, here.uuid("0"), "Tesla T4", "0001:3B:00.0", 15360, "90.04", 8, reserve_mib=0
    )
    assert isinstance(second, Device)
    assert (second.name, second.memory_mib, second.link_width) == (None, None, None)


def test_usage(here: Here) -> None:
    """A reading has the numbers of processes, memory with and without graphics, and the mode."""
    here.write(
        "gpu\n memory 4096\n reserved 90\n used 10\n mode exclusive_process\n"
        " compute 1 100\n compute 2 -\n graphics 3 20\n mps 4 5"
    )
    with Nvml() as nvml:
        (device,) = nvml.walk()
        assert isinstance(device, Device)
        usage = nvml.usage(device)
    assert (usage.compute, usage.mps, usage.mode) == (2, 1, ComputeMode.EXCLUSIVE_PROCESS)
    assert (usage.total_mib, usage.used_mib, usage.graphics_mib) == (4096, 135, 20)
    assert usage.unexplained_mib == 115
    assert usage.reserve_known
    assert usage.sees_all is procfs.sees_all_processes()


def test_processes_that_render(here: Here) -> None:
    """Graphics processes are listed as use, the largest first, until a desktop's memory is left."""
    here.write("gpu\n memory 24576\n graphics 1 300\n graphics 2 9000\n graphics 3 3900\n")
    with Nvml() as nvml:
        (device,) = nvml.walk()
        assert isinstance(device, Device)
        assert [process.pid for process in nvml.processes(device)] == [2, 3]


def test_processes(here: Here) -> None:
    """Compute processes and MPS clients are listed once each, with their memory; a desktop not."""
    here.write("gpu\n compute 1 100\n compute 2 -\n graphics 3 20\n mps 4 5\n mps 1 100")
    with Nvml() as nvml:
        (device,) = nvml.walk()
        assert isinstance(device, Device)
        listed = [(process.pid, process.memory_mib) for process in nvml.processes(device)]
    assert sorted(listed, key=str) == [(1, 100), (2, None), (4, 5)]


def test_utilisation(here: Here) -> None:
    """How busy a GPU was is a percentage, None where that is not reported or fails."""
    here.write("gpu\n utilisation 97\ngpu\n utilisation none\ngpu")
    here.add("fail nvmlDeviceGetUtilizationRates 2 999")
    with Nvml() as nvml:
        devices = [device for device in nvml.walk() if isinstance(device, Device)]
        assert [nvml.read_all(device)[1].utilisation for device in devices] == [97, None, None]


GAUGES = {
    "nvmlDeviceGetUtilizationRates": "utilisation",
    "nvmlDeviceGetPowerUsage": "power_w",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_w",
}


def gauges() -> list[Gauges]:
    """Return the gauges of each device; each must be free."""
    rows = reserve_gpu.status().rows
    assert {row.state for row in rows} == {State.FREE}
    return [Gauges(*(getattr(row, name) for name in Gauges._fields)) for row in rows]


def test_gauges(here: Here) -> None:
    """A GPU's temperature and power are read; what is not reported is None, never zero."""
    here.write(
        "gpu\n temperature 71\n power 318\n power-limit 400\n"
        "gpu\n temperature none\n power none\n power-limit none\ngpu\n temperature 0\n power 0\n"
    )
    assert gauges() == [
        Gauges(0, 71, 318.0, 400.0),
        Gauges(0, None, None, None),
        Gauges(0, 0, 0.0, 250.0),
    ]


def test_gauges_of_an_instance(here: Here) -> None:
    """The temperature and the power of an instance are its GPU's: it has none of its own."""
    here.write("gpu\n mig on\n temperature 50\n power 90\n instance 0\n instance 1")
    assert gauges() == [Gauges(None, 50, 90.0, 250.0)] * 2


@pytest.mark.parametrize("lost", ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"])
def test_temperature_of_old_and_new_drivers(here: Here, lost: str) -> None:
    """Where the driver has only one of NVML's two functions for the temperature, that one is read.

    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
    """
    here.write(f"missing {lost}\ngpu\n temperature 66")
    assert [each.temperature_c for each in gauges()] == [66]


@pytest.mark.parametrize("code", [1, 3, 4, 13, 15, 16, 24, 555, 999])
def test_a_gauge_that_fails(here: Here, code: int) -> None:
    """A gauge that fails is None; the other gauges are there, and the GPU is free."""
    whole = Gauges(0, 40, 30.0, 250.0)
    for function, name in GAUGES.items():
        here.write(f"gpu\nfail {function} 0 {code}")
        assert gauges() == [whole._replace(**{name: None})]
    both = "".join(f"fail nvmlDeviceGetTemperature{v} 0 {code}\n" for v in ("", "V"))
    here.write(f"gpu\n{both}")
    assert gauges() == [whole._replace(temperature_c=None)]
    here.write(f"gpu\n{both}fail nvmlDeviceGetComputeMode 0 15")
    (row,) = reserve_gpu.status().rows
    assert (row.state, row.power_w) == (State.BROKEN, None)


def test_driver_version(here: Here) -> None:
    """The driver's version is text, None where it does not say."""
    with Nvml() as nvml:
        assert nvml.driver_version() == "470.57.02"
        here.add("fail nvmlSystemGetDriverVersion * 999")
        assert nvml.driver_version() is None


LINKS = {
    "nvlink": Link.NVLINK, "switch": Link.SWITCH, "switches": Link.SWITCH, "host": Link.SOCKET,
    "node": Link.SOCKET, "system": Link.SYSTEM,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "link"), LINKS.items())
def test_links(here: Here, kind: str, link: int) -> None:
    """How two GPUs are linked is one of four distances; what the driver does not say is far."""
    here.write(f"gpu\n link 1 {kind}\ngpu")
    with Nvml() as nvml:
        one, other = nvml.walk()
        assert isinstance(one, Device)
        assert isinstance(other, Device)
        assert nvml.link(one, other) == nvml.link(other, one) == link
        here.add("fail nvmlDeviceGetP2PStatus * 3\nfail nvmlDeviceGetTopologyCommonAncestor * 999")
        assert nvml.link(one, other) == Link.SYSTEM


@pytest.mark.parametrize(
    ("level", "link"), [(0, Link.SWITCH), (40, Link.SOCKET), (77, Link.SYSTEM)]
)
def test_links_by_what_is_common(
    here: Here, monkeypatch: pytest.MonkeyPatch, level: int, link: int
) -> None:
    """GPUs on one board are as close as by a switch; a level that is not known yet is far."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor", lambda *_gpus: level)
    with Nvml() as nvml:
        one, other = nvml.walk()
        assert isinstance(one, Device)
        assert isinstance(other, Device)
        assert nvml.link(one, other) == link


def test_mode_of_the_future(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compute mode whose number is not known yet is no obstacle."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", lambda _handle: 77)
    assert got() == "0"


# -- MIG -------------------------------------------------------------------------------------------


def test_mig_instances(here: Here) -> None:
    """Each MIG instance is a device with its own lock and memory, gaps or not; its GPU is none."""
    here.use("mig")
    devices = walk()
    assert labels(devices) == ["GPU0", "GPU1:0", "GPU1:2", "GPU1:5", "GPU2"]
    parts = [device for device in devices[1:4] if isinstance(device, Device)]
    assert all(part.uuid.startswith("MIG-") for part in parts)
    assert {part.gpu_uuid for part in parts} == {here.uuid("1")}
    assert [part.old_name for part in parts] == [
        f"MIG-{here.uuid('1')}/{gpu_instance}/0" for gpu_instance in (7, 3, 1)
    ]
    with here.rival("1:0"):
        assert "rival.ipynb" in of_gpu(refused("1:0"), "1:0")
        assert got("1:2") == parts[1].uuid
    assert os.environ["CUDA_DEVICE_MEMORY"] == "9856"
    for name in ("1", "1:1", "1:9"):  # the GPU, a gap, beyond the last
        with pytest.raises(RequestError, match="1:0, 1:2, 1:5"):
            reserve_gpu.reserve(name)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == parts[1].uuid


def test_mig_instance_is_busy_by_itself(here: Here) -> None:
    """A process on one instance makes that one busy, not its neighbours."""
    here.write("gpu\n mig on\n instance 1\n compute 4321000 500\n instance 4\ngpu")
    assert got() == here.uuid("0:4")


def test_mig_without_instances(here: Here) -> None:
    """A GPU with MIG on and no instance is skipped, and that is said."""
    here.write("gpu\n mig on")
    assert "MIG" in of_gpu(refused())
    here.add("gpu")
    assert got() == "1"


def test_instance_in_trouble(here: Here) -> None:
    """An instance that can't be read is a fault of its own, with its number; the others serve."""
    here.write("gpu\n mig on\n instance 1\n instance 4")
    here.add("fail nvmlDeviceGetUUID 0:1 999")
    fault, device = walk()
    assert isinstance(fault, Fault)
    assert (fault.label, fault.index, fault.instance) == ("GPU0:1", 0, 1)
    assert "Unknown Error" in fault.reason
    assert got() == here.uuid("0:4") == getattr(device, "uuid", None)


# -- lazily ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("0",), ("GPU0",)])
def test_nothing_is_touched_needlessly(here: Here, arguments: tuple[str, ...]) -> None:
    """With the first GPU idle, or named by its index, no other is touched."""
    assert got(*arguments) == "0"
    assert {call.partition(" ")[2] for call in here.calls()} == {"", "0"}


def test_calls_do_not_grow_with_the_gpus(here: Here) -> None:
    """With the first GPU idle, eight GPUs take the calls that two take, and one initialisation."""
    calls = []
    for count in (2, 8):
        here.write("gpu\n" * count)
        here.log.unlink(missing_ok=True)
        assert got() == "0"
        calls.append(here.calls())
        reserve_gpu.release()
    assert calls[0] == calls[1]
    assert sum(call.startswith("nvmlInit") for call in calls[0]) == 1
    assert sum(call.startswith("nvmlShutdown") for call in calls[0]) == 1
    assert sum(call.startswith("nvmlDeviceGetHandleByIndex") for call in calls[0]) == 1


def touches(here: Here, index: int) -> int:
    return here.calls().count(f"nvmlDeviceGetHandleByIndex_v2 {index}")


def test_a_fault_is_asked_again_a_device_is_not(here: Here) -> None:
    """A GPU that failed is asked again at the next call, as it may be back; a known one is not."""
    here.add("fail nvmlDeviceGetUUID 0 999")
    with Nvml() as nvml:
        assert [type(device) for device in nvml.walk()] == [Fault, Device]
        assert [type(device) for device in nvml.walk()] == [Fault, Device]
        here.use("two")
        assert [type(device) for device in nvml.walk()] == [Device, Device]
        assert [type(device) for device in nvml.walk()] == [Device, Device]
    assert (touches(here, 0), touches(here, 1)) == (3, 1)


def test_the_instances_beside_a_fault_stay_the_same(here: Here) -> None:
    """Where a GPU is asked again for the fault of one instance, the others are as they were."""
    here.write("gpu\n mig on\n instance 0\n instance 1")
    plain = here.scenario.read_text()
    here.add("fail nvmlDeviceGetUUID 0:1 999")
    with Nvml() as nvml:
        first, fault = nvml.devices(0)
        here.write(plain)
        again, back = nvml.devices(0)
    assert again is first
    assert isinstance(fault, Fault)
    assert isinstance(back, Device)


def test_a_device_of_an_earlier_conversation(here: Here) -> None:
    """What one conversation has found can be asked about in the next; what is gone is an error."""
    one, other = walk()
    assert isinstance(one, Device)
    assert isinstance(other, Device)
    here.write("gpu\n compute 4321000 9")
    with Nvml() as nvml:
        assert nvml.usage(one).compute == 1
        assert [process.pid for process in nvml.processes(one)] == [4321000]
        for read in (nvml.usage, nvml.read_all):
            with pytest.raises(DeviceError):
                read(other)
        assert nvml.processes(other) == []
        assert nvml.link(one, other) == Link.SYSTEM


class Counting(Without):
    """A library that lacks some of its functions, and counts how often they are looked up."""

    def __init__(self, missing: frozenset[str], library: ctypes.CDLL) -> None:
        super().__init__(missing, library)
        self.lookups: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.lookups[name] += 1
        return super().__getattr__(name)


def test_a_missing_function_is_looked_up_once(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that the driver's library lacks is looked up for the first GPU only."""
    here.write("gpu\n" * 4)
    single = "nvmlDeviceGetNumaNodeId", "nvmlDeviceGetMemoryInfo_v2"
    versions = [f"nvmlDeviceGetComputeRunningProcesses{version}" for version in ("", "_v2", "_v3")]
    library = Counting(frozenset((*single, *versions)), driver.load())
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    for _ in range(2):
        pynvml._nvmlGetFunctionPointer_cache.clear()
        library.lookups.clear()
        rows = reserve_gpu.status().rows
        assert [row.state for row in rows] == [State.FREE] * 4
        assert [row.usage and row.usage.compute for row in rows] == [None] * 4
        assert {library.lookups[name] for name in single} == {1}
        assert {library.lookups[name] for name in versions} <= {1, 2}  # the number, and the list


def test_a_function_that_fails_on_one_gpu_is_called_for_the_next(here: Here) -> None:
    """A GPU for which a function reports that it is missing does not hide the next GPU's MIG."""
    here.write("gpu\ngpu\n mig on\n instance 0\nfail nvmlDeviceGetMigMode 0 13")
    assert labels(walk()) == ["GPU0", "GPU1:0"]


# -- no driver, or one in trouble ------------------------------------------------------------------


def check_no_driver(*words: str) -> None:
    """Check that reserve() says it in one line, and changes nothing."""
    before = variables()
    with pytest.raises(DriverError) as caught:
        reserve_gpu.reserve()
    text = str(caught.value)
    assert all(word in text.lower() for word in words), text
    assert "\n" not in text
    assert variables() == before


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (4, "administrator"),
        (9, "kernel module"),
        (12, "no nvidia driver"),
        (17, "--gpus all"),
        (18, "reboot"),
        (999, "container"),
        (1, "driver"),
        (13, "update"),
        (15, "driver"),
        (998, "driver"),
    ],
)
def test_driver_that_does_not_start(
    here: Here, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    """Whatever error initialisation answers, one line names a remedy and no variable is changed."""
    here.add(f"fail nvmlInitWithFlags * {code}")
    monkeypatch.setenv("CUDA_DEVICE_MEMORY", "7")
    check_no_driver(remedy, "(nvmlinit)")


def test_driver_without_gpus(here: Here) -> None:
    """A driver that shows no GPU, or can't count them, is said in one line."""
    here.write("count 0\ngpu")
    check_no_driver("no gpu")
    here.write("gpu\nfail nvmlDeviceGetCount_v2 * 999")
    check_no_driver("count")


# -- one GPU in trouble ----------------------------------------------------------------------------

# With the cause that must be said.
TROUBLE = {
    "nvmlDeviceGetHandleByIndex_v2 0 15": "lost",
    "nvmlDeviceGetHandleByIndex_v2 0 4": "Permission",
    "nvmlDeviceGetHandleByIndex_v2 0 8": "Power",
    "nvmlDeviceGetHandleByIndex_v2 0 11": "Interrupt",
    "nvmlDeviceGetHandleByIndex_v2 0 999": "Unknown",
    "nvmlDeviceGetHandleByIndex_v2 0 998": "Unknown",
    "nvmlDeviceGetUUID 0 999": "Unknown",
    "nvmlDeviceGetMigMode 0 15": "lost",
    "nvmlDeviceGetMemoryInfo_v2 0 15": "lost",
    "nvmlDeviceGetComputeRunningProcesses_v3 0 15": "lost",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3 0 15": "lost",
    "nvmlDeviceGetComputeMode 0 15": "lost",
}


@pytest.mark.parametrize(("fault", "cause"), TROUBLE.items(), ids=TROUBLE.keys())
def test_gpu_in_trouble_is_skipped(here: Here, fault: str, cause: str) -> None:
    """A GPU that fails is skipped, the next one served; where it is wanted the cause is said."""
    here.add(f"fail {fault}")
    for wanted in ({"count": 2}, {"devices": "0"}):
        assert cause in of_gpu(refused(**wanted))
    assert got() == "1"


def test_a_sandbox_that_blocks_the_mig_mode(here: Here) -> None:
    """A GPU that can have no instances is used though its MIG mode can't be read."""
    here.write("gpu\nfail nvmlDeviceGetMigMode * 17")
    assert got("0") == "0"
    reserve_gpu.release()
    here.write("gpu\n slots 7\nfail nvmlDeviceGetMigMode * 17")
    assert "operating system" in of_gpu(refused())


@pytest.mark.parametrize(
    ("code", "state"),
    [(15, "broken"), (28, "broken"), (999, "broken"), (17, "unknown"), (555, "unknown"),
     (4, "no permission")],
)  # fmt: skip
def test_the_state_of_a_gpu_that_gives_an_error(here: Here, code: int, state: str) -> None:
    """Only a code that says so makes a GPU broken; any other leaves its state unknown."""
    here.write(f"gpu\nfail nvmlDeviceGetUUID 0 {code}")
    assert reserve_gpu.status().to_dict()["devices"][0]["state"] == state
    assert of_gpu(refused()).startswith(f"{state}: ")


@pytest.mark.parametrize("code", [2, 10, 14, 17, 19, 27, 555])
def test_a_blocked_memory_reading(here: Here, code: int) -> None:
    """Without a memory reading a GPU is not reserved by itself in a sandbox, whatever the code."""
    here.write(f"gpu\n compute 4321000 10\nfail nvmlDeviceGetMemoryInfo * {code}")
    here.add(f"fail nvmlDeviceGetMemoryInfo_v2 * {code}\n{processes_fail(17)}")
    assert of_gpu(refused()).startswith("unknown: ")


def test_gpus_beyond_those_described(here: Here) -> None:
    """GPUs that are counted but refuse their handle are skipped."""
    here.write("count 3\ngpu\n compute 4321000 10")
    text = refused()
    assert all(of_gpu(text, number) for number in "012")


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo_v2"]
)
def test_call_that_hangs(here: Here, function: str) -> None:
    """A GPU whose call hangs is marked as faulty after the limit, and the next one is read."""
    here.add(f"delay {function} 0 1000")
    fault, device = walk(HANGING_S)
    assert isinstance(device, Device)
    assert isinstance(fault, Fault)
    assert "the driver hangs: no answer within 0.1 s" in fault.reason


def ask(nvml: Nvml, device: Device, limit_s: float | None = None) -> object:
    try:
        return nvml.usage(device, limit_s).mode
    except DeviceError as error:
        return str(error)


def test_a_call_that_hangs_is_not_made_again_until_it_ends(here: Here) -> None:
    """However often a reading is asked for, one thread hangs with it, and all others go on."""
    with Nvml(HANGING_S) as nvml:
        one, other = nvml.walk()
        assert isinstance(one, Device)
        assert isinstance(other, Device)
        before = _thread._count()
        usual = here.scenario.read_text()
        here.add("delay nvmlDeviceGetComputeMode 0 1000")
        reason = "the driver hangs: no answer within 0.1 s (nvmlDeviceGetComputeMode)"
        assert {ask(nvml, one) for _ in range(9)} == {reason}
        assert here.calls().count("nvmlDeviceGetComputeMode 0") == 1
        assert ask(nvml, other, 20) is ComputeMode.DEFAULT
        assert _thread._count() - before == 1
        here.scenario.unlink()  # ends the delay
        while ask(nvml, one) == reason:
            time.sleep(0.001)
        here.write(usual)
        assert ask(nvml, one) is ComputeMode.DEFAULT


def test_a_reading_may_have_a_limit_of_its_own(here: Here) -> None:
    """A reading that was given less time counts as hanging after that."""
    with Nvml() as nvml:
        device = next(nvml.walk())
        assert isinstance(device, Device)
        here.add("delay nvmlDeviceGetMemoryInfo_v2 0 1000")
        assert "no answer within 0.05 s" in str(ask(nvml, device, 0.05))


def test_initialisation_that_hangs(here: Here) -> None:
    """A driver that hangs at once is an error, not a wait without end."""
    here.add("delay nvmlInitWithFlags * 1000")
    with Nvml(HANGING_S) as nvml, pytest.raises(DriverError, match="hangs"):
        nvml.count()


# -- several GPUs at once --------------------------------------------------------------------------


def touched(here: Here) -> set[str]:
    """Return the indices of the GPUs that the driver was asked about."""
    return {call.partition(" ")[2] for call in here.calls()} - {""}


def test_a_hanging_gpu_among_many_is_named(here: Here) -> None:
    """If eight GPUs are read together and the fifth hangs, only the fifth is faulty."""
    here.write("gpu\n" * 8 + "delay nvmlDeviceGetUUID 4 1000")
    devices = walk(HANGING_S)
    assert [device.index for device in devices] == [*range(8)]
    (fault,) = (device for device in devices if isinstance(device, Fault))
    assert fault.index == 4
    assert fault.reason == "the driver hangs: no answer within 0.1 s (nvmlDeviceGetUUID)"


def test_a_reading_that_hangs_among_many_is_named(here: Here) -> None:
    """Only the hanging reading fails, and each of the others is made once."""
    here.write("gpu\n" * 8)
    with Nvml(HANGING_S) as nvml:
        devices = [device for device in nvml.walk() if isinstance(device, Device)]
        here.add("delay nvmlDeviceGetComputeMode 4 1000")
        readings = list(nvml.usages(devices))
    failed = [index for index, reading in enumerate(readings) if isinstance(reading, DeviceError)]
    assert failed == [4]
    assert str(readings[4]).endswith("no answer within 0.1 s (nvmlDeviceGetComputeMode)")
    assert [here.calls().count(f"nvmlDeviceGetComputeMode {index}") for index in range(8)] == [
        1
    ] * 8


def test_a_slow_reading_does_not_delay_the_results_before_it(here: Here) -> None:
    """While a GPU hangs, the results before it are available; if they suffice, no other is read."""
    here.write("gpu\n" * 4)
    with Nvml() as nvml:
        devices = [device for device in nvml.walk() if isinstance(device, Device)]
        threads = _thread._count()
        here.add("delay nvmlDeviceGetComputeMode 2 1000")
        readings = nvml.usages(devices)
        assert not any(isinstance(next(readings), DeviceError) for _ in range(2))
        readings.close()
        assert ask(nvml, devices[3]) is ComputeMode.DEFAULT
        here.scenario.unlink()  # ends the delay
        assert wait_for(lambda: _thread._count() == threads, LIMIT_S, 0.001)
        assert here.calls().count("nvmlDeviceGetComputeMode 3") == 1
        here.write("gpu\n" * 4)


def test_all_results_of_a_driver_that_is_always_slow(here: Here) -> None:
    """If every reading is slow but none hangs, all results are returned in order."""
    here.write("gpu\n" * 4)
    with Nvml() as nvml:
        devices = [device for device in nvml.walk() if isinstance(device, Device)]
        here.add("delay nvmlDeviceGetComputeMode * 0.05")
        readings = nvml.readings(devices)
    assert [*readings] == devices
    assert not any(isinstance(reading, DeviceError) for reading in readings.values())


def test_only_the_gpus_that_are_needed_are_initialized(here: Here) -> None:
    """If reserved GPUs come first, at most as many others are read as were reserved so far."""
    here.write("gpu\n" * 8)
    with here.rival("0"):
        assert got() == "1"
        assert touched(here) == {"0", "1", "2"}


def test_no_gpu_is_initialized_after_a_slow_one(here: Here) -> None:
    """A free GPU that takes long to initialize is reserved before the next one is accessed."""
    here.write("gpu\n" * 8 + "delay-first nvmlDeviceGetHandleByIndex_v2 1 0.1")
    with here.rival("0"):
        assert got() == "1"
        assert touched(here) == {"0", "1"}


def test_gpus_that_do_not_match_are_read_together(here: Here) -> None:
    """GPUs of another model do not count as GPUs that might be reserved."""
    here.write("gpu\n name A\n" * 5 + "gpu\n name B\n" + "gpu\n name A\n" * 2)
    assert got(name="B") == "5"
    assert touched(here) == {*"012345"}


LOOKS_BUSY = "gpu\n used 6000\n"


def test_a_gpu_that_looks_busy_is_not_locked_first(here: Here) -> None:
    """GPUs whose memory is in use are neither locked nor read again if a later GPU is free."""
    here.write(LOOKS_BUSY * 3 + "gpu\n" * 5)
    assert got() == "3"
    assert touched(here) == {*"0123"}
    assert [call for call in here.calls() if "ComputeMode" in call] == [
        "nvmlDeviceGetComputeMode 3"
    ]
    locked = {path.name.partition(".")[0] for path in here.locks.glob("GPU-*")}
    assert locked == {here.uuid("3")}


def test_a_gpu_that_looks_busy_is_examined_last(here: Here) -> None:
    """If no other GPU is free, busy ones are examined under their locks, and listed in order."""
    here.write(f"gpu\n{LOOKS_BUSY}gpu\n")
    with here.rival("0"), here.rival("2"):
        text = refused()
    assert "nvmlDeviceGetComputeMode 1" in here.calls()
    assert of_gpu(text, "1").startswith("busy: ")
    assert text.index("\n0 ") < text.index("\n1 ") < text.index("\n2 ")


def test_a_large_desktop_does_not_look_busy(here: Here) -> None:
    """An idle GPU comes first even if a desktop is using most of its memory."""
    here.write("gpu\n graphics 1100 3000\n graphics 1101 1000\ngpu\n")
    assert got() == "0"
    assert touched(here) == {"0"}


def test_a_gpu_within_the_users_limit_does_not_look_busy(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's limit for the memory in use on an idle GPU also applies to the order."""
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", "7000MiB")
    here.write(f"{LOOKS_BUSY}gpu\n")
    assert got() == "0"
    assert touched(here) == {"0"}


def test_a_free_gpu_is_reserved_while_a_later_one_hangs(here: Here) -> None:
    """The reading of a later GPU does not delay the first free GPU, even if both are locked."""
    here.write("gpu\n" * 8 + "delay nvmlDeviceGetComputeMode 5 1000")
    with ExitStack() as rivals:
        for number in "0123":
            rivals.enter_context(here.rival(number))
        start = time.monotonic()
        assert got() == "4"
        assert time.monotonic() - start < READINGS_LIMIT_S
        assert "nvmlDeviceGetComputeMode 5" in here.calls()  # they are read together
        assert locked(here.locks) >= {f"{here.uuid('4')}.lock"}
        assert f"{here.uuid('5')}.lock" not in locked(here.locks)


def test_repeated_reservations_while_a_later_gpu_hangs_leave_one_thread(here: Here) -> None:
    """A reservation does not wait for a reading that has been hanging since an earlier one."""
    usual = "gpu\n" * 8
    here.write(f"{usual}delay nvmlDeviceGetComputeMode 5 1000")
    with ExitStack() as rivals:
        for number in "0123":
            rivals.enter_context(here.rival(number))
        before = _thread._count()
        for _ in range(3):
            assert got() == "4"
            reserve_gpu.release()
        assert here.calls().count("nvmlDeviceGetComputeMode 5") == 1
        assert wait_for(lambda: _thread._count() - before <= 1, LIMIT_S, 0.01)
        here.write(usual)  # ends the delay


def test_a_reading_that_was_not_awaited_does_not_delay_others(here: Here) -> None:
    """A session that no longer needs a reading that hangs in another session reads other GPUs."""
    usual = "gpu\n" * 4
    here.write(usual)
    with Nvml(HANGING_S) as one, Nvml() as other:
        devices = [device for device in one.walk() if isinstance(device, Device)]
        assert len(list(other.walk())) == len(devices)
        here.add("delay nvmlDeviceGetComputeMode 2 1000")
        list(one.usages(devices))
        usages = other.usages(devices)
        next(usages)
        next(usages)
        usages.close()
        assert ask(other, devices[3]) is ComputeMode.DEFAULT
        here.write(usual)  # ends the delay


# -- other people's bindings and bytes -------------------------------------------------------------


def test_memory_function_replaced(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory function as gpustat leaves it, without `version`, is used as it is."""
    here.write("gpu\n memory 4096\n reserved 600\ngpu\n memory 4096")
    original = pynvml.nvmlDeviceGetMemoryInfo

    def replacement(handle: Any) -> Any:
        return original(handle, version=pynvml.nvmlMemory_v2)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", replacement)
    assert got() == "0"
    assert os.environ["CUDA_DEVICE_MEMORY"] == "4096"


MODULES = {
    "another one": "def nvmlInit(): pass",
    "none": "raise ImportError('not here')",
    "one of Python 2": "print 'hello'",
    "a broken one": "1 / 0",
    "one that ends the process": "raise SystemExit(3)",
    "one that imports itself": "import pynvml; pynvml.nvmlInit()",
}


@pytest.fixture
def _without_bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the next reservation import the bindings again."""
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "pynvml")
    yield
    sys.modules.pop("pynvml", None)


@pytest.mark.usefixtures("here", "_without_bindings")
@pytest.mark.parametrize("source", MODULES.values(), ids=MODULES.keys())
@pytest.mark.parametrize("name", ["pynvml.py", "pynvml/__init__.py"])
def test_a_file_that_takes_the_place_of_the_bindings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, name: str
) -> None:
    """A file that Python finds before the installed bindings is named."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DriverError) as caught:
        reserve_gpu.reserve()
    assert str(tmp_path / "pynvml") in str(caught.value)
    assert "work in another folder" in str(caught.value)
    assert "install" not in str(caught.value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(DriverError, match="from PYTHONPATH"):
        reserve_gpu.reserve()
    sys.path.remove(str(tmp_path))  # as if the file had another name
    assert got() == "0"


@pytest.mark.usefixtures("here", "_without_bindings")
def test_a_file_that_keeps_the_bindings_from_being_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file in the place of a module that the bindings import is named."""
    (tmp_path / "string.py").write_text("raise ValueError('mine')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "string")
    with pytest.raises(DriverError, match=f"because of {tmp_path}/string.py .mine.*Rename it"):
        reserve_gpu.reserve()


@pytest.mark.usefixtures("here", "_without_bindings")
@pytest.mark.parametrize("source", MODULES.values(), ids=MODULES.keys())
def test_wrong_bindings_that_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    """If the wrong module is an installed package, the command that replaces it is named."""
    (tmp_path / "pynvml.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    with pytest.raises(DriverError, match=r"Run: .* install.* nvidia-ml-py$"):
        reserve_gpu.reserve()


@pytest.mark.usefixtures("here", "_without_bindings")
def test_a_module_that_the_user_has_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A module in place of the bindings that other code has imported stays imported."""
    (tmp_path / "pynvml.py").write_text("mine = True")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("pynvml")
    with pytest.raises(DriverError, match="Then restart this process"):
        reserve_gpu.reserve()
    assert sys.modules["pynvml"] is mine


# -- an import that is interrupted -----------------------------------------------------------------


def raise_timeout(*_: object) -> None:
    raise TimeoutError("mine")


def exit_after_reset(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise SystemExit(frame is None)


class Handler:
    def __call__(self, *_: object) -> None:
        raise ImportError("mine")


HANDLERS: list[tuple[Any, type[BaseException]]] = [
    (signal.default_int_handler, KeyboardInterrupt),
    (raise_timeout, TimeoutError),
    (exit_after_reset, SystemExit),
    (partial(raise_timeout, 1), TimeoutError),
    (Handler(), ImportError),
]


IN_THE_MODULE = "import signal; signal.raise_signal(signal.SIGUSR1); 1 / 0  # not reached"
# Python handles a signal after a call, not after a subscript: so here after the module's last line.
AT_ITS_END = """\
import ctypes, functools, signal
raise_signal = getattr(ctypes.CDLL(None), "raise")
raise_signal.argtypes = ctypes.c_int, ctypes.py_object
class Subscript:
    __getitem__ = functools.partial(raise_signal, signal.SIGUSR1)
Subscript()[None]
"""


@pytest.mark.usefixtures("here", "_without_bindings")
@pytest.mark.parametrize(("handler", "kind"), HANDLERS)
@pytest.mark.parametrize("way", ["reserve", "status"])
@pytest.mark.parametrize("code", [IN_THE_MODULE, AT_ITS_END], ids=["in the module", "at its end"])
def test_a_signal_during_the_import_of_the_bindings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, handler: Any, kind: type[BaseException],
    way: str, code: str,
) -> None:  # fmt: skip
    """The exception of a signal handler reaches the caller, and the next call works."""
    (tmp_path / "pynvml.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    before, usual = variables(), signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(kind) as caught:
            getattr(reserve_gpu, way)()
        assert type(caught.value) is kind
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert variables() == before
    assert reserve_gpu.current() is None
    sys.path.remove(str(tmp_path))
    assert got() == "0"


def test_bytes_that_are_no_text(here: Here) -> None:
    """A name or VBIOS that is not UTF-8 is no obstacle, and what is printed of it is text."""
    here.scenario.write_bytes(b"gpu\n name Ge\xff\xfeForce\n vbios \x80\x81\n")
    reservation = reserve_gpu.reserve()
    assert str(reservation).splitlines()[0] == "Reserving GPU0: 0000:01:00.0 16x"


def test_escape_sequences_in_a_name(here: Here) -> None:
    """What a driver calls its GPUs can't control a terminal, in whatever is said of them."""
    here.write("gpu\n name Ge\x1b[31mForce\n vbios 1\x072\n uuid GPU-a\x1bb\n")
    reservation = reserve_gpu.reserve()
    status = reserve_gpu.status()
    texts = (str(reservation), repr(reservation), status.picture().to_text(), status._repr_html_())
    for text in texts:
        assert all(line.isprintable() for line in text.splitlines()), text
    assert "Ge\N{REPLACEMENT CHARACTER}[31mForce" in str(reservation)
    reserve_gpu.release()
    here.add("compute 4321000 9000")
    wishes: list[dict[str, Any]] = [{}, {"name": "H100"}, {"devices": "GPU-b"}]
    for wanted in wishes:
        with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
            reserve_gpu.reserve(**wanted)
        assert all(line.isprintable() for line in str(caught.value).splitlines())


def test_words_of_the_driver(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error's text is shown in one bounded line, also where the driver's words are no text."""
    words = "\x1b[31mbad\nworse" + "x" * 1000
    monkeypatch.setattr(pynvml.NVMLError, "__str__", lambda _self: words)
    here.add("fail nvmlDeviceGetUUID 0 15")
    line = of_gpu(refused("0"))
    assert line.isprintable()
    assert 200 < len(line) < 400
    here.write("gpu\nfail nvmlInitWithFlags * 18")
    with pytest.raises(DriverError) as caught:
        reserve_gpu.reserve()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    here.write("gpu\nfail nvmlDeviceGetUUID 0 15")

    def no_words(_self: object) -> str:
        return b"\xff".decode()

    monkeypatch.setattr(pynvml.NVMLError, "__str__", no_words)
    assert of_gpu(refused("0")) == "broken: error 15 (nvmlDeviceGetUUID)"


def test_no_driver_is_an_error_of_its_own(here: Here) -> None:
    """Who wants to go on without a GPU can tell that there is no driver from one in trouble."""
    for code, kind in ((9, NoDriverError), (12, NoDriverError), (18, DriverError)):
        here.write(f"gpu\nfail nvmlInitWithFlags * {code}")
        with pytest.raises(DriverError) as caught:
            reserve_gpu.reserve()
        assert type(caught.value) is kind


def test_two_gpus_with_one_uuid(here: Here) -> None:
    """Of two GPUs that the driver gives one UUID, as some virtual ones have, the first is used."""
    uuid = "GPU-12345678-0000-4000-8000-000000000000"
    here.write(f"gpu\n uuid {uuid}\ngpu\n uuid {uuid}\n")
    assert got() == "0"
    first, second = reserve_gpu.status().rows
    assert first.is_mine
    assert second.state is State.BROKEN
    assert second.reason == "it has the same UUID as GPU0, so only GPU0 is used"
    with pytest.raises(NoFreeDeviceError):
        reserve_gpu.reserve("0,1")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "remap-failed 1",
            "its memory has failed and can't be repaired: the GPU must be replaced",
        ),
        ("recovery 1", "it has a fault: the driver requests a GPU reset"),
        ("recovery 2", "it has a fault: the driver requests a reboot"),
    ],
)
@pytest.mark.parametrize("mig", ["", "mig on\n instance 0\n"])
def test_a_gpu_with_a_fault_is_broken(here: Here, line: str, reason: str, mig: str) -> None:
    """It is passed over with the reason, and so are its instances."""
    here.write(f"gpu\n {line}\n {mig}gpu\n")
    assert got() == "1"
    row = reserve_gpu.status().rows[0]
    assert (row.state, row.reason) == (State.BROKEN, reason)


@pytest.mark.parametrize("line", ["remap-pending none", "recovery none"])
def test_a_gpu_whose_faults_are_not_reported_is_used(here: Here, line: str) -> None:
    """A GPU is healthy if its driver reports no remapped rows, or no recovery action."""
    here.write(f"gpu\n {line}\n")
    assert got() == "0"


@pytest.mark.parametrize("line", ["remap-pending 1", "recovery 4"])
def test_memory_that_waits_for_a_reset_takes_no_gpu_away(here: Here, line: str) -> None:
    """A GPU of whose memory some is out of use until a reset can be had, and that is said."""
    here.write(f"gpu\n {line}\n")
    fault = "some of its memory has failed; the next reset of the GPU will repair it"
    (row,) = reserve_gpu.status().rows
    assert row.state is State.FREE
    assert fault in str(reserve_gpu.status())
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=f"GPU0 can be used, but {fault}"):
        assert got() == "0"


DESKTOP = (
    "gpu\n memory 8192\n screen 1\n compute 4321 {mib}\n graphics 4321 {mib}\n graphics 99 300\n"
)


@pytest.mark.parametrize(
    ("mib", "state"), [(20, State.FREE), (596, State.FREE), (4096, State.BUSY), ("-", State.BUSY)]
)
def test_a_desktop_that_computes_is_no_job(here: Here, mib: float | str, state: State) -> None:
    """A process in both of NVML's lists is a desktop's where it has little memory, else a job."""
    here.write(DESKTOP.format(mib=mib))
    (row,) = reserve_gpu.status().rows
    assert row.state is state
    if state is State.FREE:
        assert (len(row.processes), len(row.background)) == (0, 2)
        assert got() == "0"


def test_the_gpu_with_the_screen_comes_last(here: Here) -> None:
    """Who names no GPU gets the one that draws the screen only where no other is free."""
    here.write(DESKTOP.format(mib=20) + "gpu\n memory 8192\n")
    assert got() == "1"
    assert got("0") == "0"
    assert got(count=2) == "0,1"
    reserve_gpu.release()
    with here.rival("1"):
        assert got() == "0"
        reserve_gpu.release()
    with here.rival("0"), here.rival("1"):
        text = refused()
        assert text.index("\n0 ") < text.index("\n1 ")


HOST_MIB = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
# Of GPUs with the host's memory: how NVML tells of it, with 20 GB in use, and how much there is.
HOSTS_MEMORY = {
    "a NUMA node of the host": ("gpu\n memory 98304\n used 20000\n numa 1\n", 98304),
    "not supported": ("gpu\n memory none\n used 20000\n", HOST_MIB),
    "the host's total": (f"gpu\n memory {HOST_MIB}\n used 20000\n addressing 2\n", HOST_MIB),
}


@pytest.mark.skipif(not procfs.sees_all_processes(), reason="in a container they can't be seen")
@pytest.mark.parametrize(("gpu", "total_mib"), HOSTS_MEMORY.values(), ids=HOSTS_MEMORY.keys())
def test_the_hosts_memory(here: Here, gpu: str, total_mib: int) -> None:
    """Where a GPU has the host's memory processes decide, and what they hold is what is in use."""
    here.write(gpu)
    (row,) = reserve_gpu.status().rows
    assert (row.state, row.promisable_mib) == (State.FREE, total_mib)
    assert got(memory="90%") == "0"
    reserve_gpu.release()
    here.write(f"{gpu} compute 4321 5000\n graphics 99 40\n")
    (device,) = reserve_gpu.status().to_dict()["devices"]
    assert (device["state"], device["memory_total_mib"]) == ("busy", total_mib)
    assert device["memory_used_mib"] == 5040
    assert f" 4.9 of {total_mib / 1024:.1f} GiB " in refused()
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="which other processes are using"):
        assert got(memory=f"{total_mib - 5040}MiB") == "0"
    reserve_gpu.release()
    assert refused(memory=f"{total_mib - 5039}MiB")


def test_the_hosts_memory_where_a_process_does_not_say_how_much(here: Here) -> None:
    """Beside a process of unknown size no part of the host's memory is promised."""
    here.write("gpu\n memory none\n compute 4321 -\n")
    assert f" ? of {HOST_MIB / 1024:.1f} GiB " in refused()
    assert "it shares the host's memory, and some of its" in of_gpu(refused(memory=1000))


@pytest.mark.parametrize(
    ("gpu", "state"),
    [
        (f"memory {HOST_MIB}\n used 5000", State.BUSY),  # as much as the host, on a card
        (f"memory {HOST_MIB // 2}\n used 5000\n addressing 2", State.BUSY),
        (f"memory {HOST_MIB}\n used 5000\n addressing 1", State.BUSY),
        (f"memory none\n addressing 2\n{processes_fail(3)}", State.UNKNOWN),
    ],
)
def test_memory_that_is_not_the_hosts(here: Here, gpu: str, state: State) -> None:
    """Memory in use makes a card busy that has as much as its host; what is unread is unknown."""
    here.write(f"gpu\n {gpu}\n")
    (row,) = reserve_gpu.status().rows
    assert row.state is state


def test_an_mps_client_is_counted_once(here: Here) -> None:
    """An MPS client that is in both lists, as on driver 580, is not a compute process as well."""
    here.write("gpu\n memory 8192\n compute 777 30\n compute 888 530\n mps 888 530")
    with Nvml() as nvml:
        (device,) = nvml.walk()
        assert isinstance(device, Device)
        usage = nvml.usage(device)
    assert (usage.compute, usage.mps, usage.listed_mib) == (1, 1, 560.0)


@pytest.mark.parametrize("clock", ["epoch", "boot", "monotonic"])
def test_use_that_ended_before_the_period_does_not_count(here: Here, clock: str) -> None:
    """A process that worked 5 s ago has used the GPU in the last 8 s, but not in the last 2 s."""
    here.write(f"gpu\nsamples {clock}\nuse-ended 5\ncompute {os.getpid()} 500")
    with Nvml() as nvml:
        (device,) = nvml.walk()
        assert isinstance(device, Device)
        assert nvml.recent_use(device, procfs.now().later(-2.0)) == {}
        assert set(nvml.recent_use(device, procfs.now().later(-8.0)) or ()) == {os.getpid()}
        assert nvml.recent_use(device, procfs.now().later(-60.0)) == {os.getpid(): 66}  # 10 of 15 s


def test_use_on_an_unknown_clock_counts_for_any_period(here: Here) -> None:
    """If the clock of the samples is unknown, the use that they show might be in the period."""
    here.write(f"gpu\nsamples strange\nuse-ended 5\ncompute {os.getpid()} 500")
    with Nvml() as nvml:
        (device,) = nvml.walk()
        assert isinstance(device, Device)
        assert nvml.recent_use(device, procfs.now().later(-2.0)) == {os.getpid(): None}


def test_a_status_reads_each_list_of_processes_once(here: Here) -> None:
    """Where processes compute and draw, the status asks for the list of each kind once."""
    here.write("gpu\n memory 8192\n compute 4321 20\n graphics 4321 20\n mps 777 100\n")
    with Nvml() as nvml:
        (device,) = nvml.walk()
        assert isinstance(device, Device)
        nvml.read_all(device)
    once = 2  # calls: how many there are, and then who
    for query in QUERIES:
        assert here.calls().count(f"{query}_v2 0") == once, query


GB10 = "gpu\n name NVIDIA GB10\n bus 000F:01:00.0\n memory none\n width 1\n"
# The link width and the VBIOS version that the driver reports, and the first line's description.
DESCRIBED = {
    "a GB10": (f"{GB10} vbios 9A.0B.16.00.00", "000F:01:00.0 NVIDIA GB10 (VBIOS 9A.0B.16.00.00)"),
    "a GB10 without a width": (
        f"{GB10} width none\n vbios none", "000F:01:00.0 NVIDIA GB10",
    ),
    "a GB10 with the host's total": (
        f"{GB10} memory {HOST_MIB}\n addressing 2\n vbios none", "000F:01:00.0 NVIDIA GB10",
    ),
    "a GH200, which is a NUMA node with a PCIe link": (
        "gpu\n name NVIDIA GH200 480GB\n numa 1\n width 1\n vbios none",
        "0000:01:00.0 1x NVIDIA GH200 480GB",
    ),
    "a card in a slot with one lane": (
        "gpu\n width 1\n vbios none", "0000:01:00.0 1x NVIDIA Stand-in",
    ),
    "a virtual machine's GPU": (
        "gpu\n width none\n vbios none", "0000:01:00.0 NVIDIA Stand-in",
    ),
    **{
        f"the VBIOS version {version!r}": (
            f"gpu\n vbios {version}", "0000:01:00.0 16x NVIDIA Stand-in",
        )
        for version in ("empty", "00.00.00.00.00", "N/A", "[N/A]", "None", "[Unknown]", "0")
    },
    "a real VBIOS version": (
        "gpu\n vbios 00.00.10.00.00", "0000:01:00.0 16x NVIDIA Stand-in (VBIOS 00.00.10.00.00)",
    ),
}  # fmt: skip


@pytest.mark.skipif(not procfs.sees_all_processes(), reason="in a container they can't be seen")
@pytest.mark.parametrize(("gpu", "description"), DESCRIBED.values(), ids=DESCRIBED.keys())
def test_the_first_line_leaves_out_what_is_unknown(here: Here, gpu: str, description: str) -> None:
    """The first line has no link width of a GPU that is not a PCIe card, and no empty VBIOS."""
    here.write(gpu)
    assert str(reserve_gpu.reserve()).splitlines()[0] == f"Reserving GPU0: {description}"


@pytest.mark.parametrize(
    "name", [*(path.name for kind in ("gb10", "thor", "orin") for path in CORPUS.glob(f"{kind}*"))]
)
def test_posted_machines_without_a_pcie_link(here: Here, name: str) -> None:
    """The posted GB10, Thor and Orin have no link width."""
    here.write((CORPUS / name).read_text())
    (device,) = walk()
    assert isinstance(device, Device)
    assert device.link_width is None


def test_a_mig_instance_has_its_gpus_link_width(here: Here) -> None:
    """A MIG instance shows the width and the VBIOS version of its GPU's PCIe link."""
    here.write("gpu\n mig on\n width 8\n vbios empty\n instance 0")
    (device,) = walk()
    assert isinstance(device, Device)
    assert (device.link_width, device.vbios) == (8, None)


def test_a_slow_reading_that_nobody_waits_for_keeps_no_session_open(here: Here) -> None:
    """A GPU that answers slowly after the request is granted does not keep NVML initialized."""
    here.write("gpu\n" * 8 + "delay nvmlDeviceGetComputeMode 5 0.3")
    with ExitStack() as stack:
        for index in range(4):
            stack.enter_context(here.rival(str(index)))
        assert got() == "4"
        reserve_gpu.release()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            calls = here.calls()
            counts = [sum(c.startswith(name) for c in calls) for name in ("nvmlInit", "nvmlShut")]
            if counts[0] == counts[1]:
                return
            time.sleep(0.05)
    pytest.fail(f"{counts[0]} calls of nvmlInit, {counts[1]} of nvmlShutdown")
