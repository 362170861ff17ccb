"""Tests of the readings of a simulated driver, through the real bindings."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

import reserve_gpu
from reserve_gpu.allocation.attempt import READINGS_LIMIT_S
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Link, Nvml
from reserve_gpu.model.devices import ComputeMode, Device, Fault, Gauges, State
from reserve_gpu.model.errors import (
    DriverError,
    NoDeviceError,
    NoDriverError,
    NoFreeDeviceError,
    RequestError,
)
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
HANGING_S = 0.1  # a call that takes longer is hanging


def processes_fail(code: int) -> str:
    """Return lines that make all process queries of all GPUs fail with this code."""
    return "".join(
        f"fail {query}{version} * {code}\n" for query in QUERIES for version in ("", "_v2", "_v3")
    )


def walk(limit_s: float = 20.0) -> list[Device | Fault]:
    """Return all devices and faults of the machine, read in a session of its own."""
    with Nvml(limit_s) as nvml:
        return list(nvml.walk())


def devices_of(nvml: Nvml) -> list[Device]:
    """Return all devices of the machine, without faults."""
    return [device for device in nvml.walk() if isinstance(device, Device)]


def labels(devices: Sequence[Device | Fault]) -> list[str]:
    """Return the labels of devices and faults."""
    return [device.label for device in devices]


# -- idle or not -----------------------------------------------------------------------------------

IDLE = {
    "nothing on it": "gpu",
    "the driver's reserve": "gpu\n memory 4096\n reserved 600",
    "the reserve, counted as used memory": f"{NO_MEMORY_V2}gpu\n memory 4096\n reserved 600",
    "a desktop's 2 GB": "gpu\n memory 10240\n graphics 1100 350\n graphics 1300 1650",
    "a large desktop on a large card": "gpu\n memory 24576\n graphics 1100 1500\n graphics 1 2500",
    "graphics processes of unknown memory": "gpu\n graphics 1100 -\n graphics 1101 -",
    "a desktop, with the reserve counted as used memory": (
        f"{NO_MEMORY_V2}gpu\n memory 10240\n reserved 250\n graphics 1100 2000"
    ),
    "exclusive process without a process": "gpu\n mode exclusive_process",
    "a driver before 510": f"{NO_V3}gpu",
    "a driver before 450": f"{NO_V3}{NO_V2}gpu",
    "process lists not supported": f"{processes_fail(3)}gpu",
    "process lists without permission": f"{processes_fail(4)}gpu",
    "process lists unknown, as under WSL2": f"{processes_fail(999)}gpu",
    "no compute mode": "fail nvmlDeviceGetComputeMode * 3\ngpu",
    "no MIG mode": "gpu\n mig none",
    "no remapped rows": "gpu\n remap-pending none",
    "no recovery action": "gpu\n recovery none",
    "no name, VBIOS or width": (
        "fail nvmlDeviceGetName * 999\nfail nvmlDeviceGetVbiosVersion * 3\n"
        "fail nvmlDeviceGetCurrPcieLinkWidth * 3\ngpu"
    ),
}

NOT_IDLE = {
    "a compute process of unknown memory": ("gpu\n compute 4321000 -", State.BUSY),
    "a compute process, before 510": (f"{NO_V3}gpu\n compute 4321000 10", State.BUSY),
    "a compute process, before 450": (f"{NO_V3}{NO_V2}gpu\n compute 4321000 10", State.BUSY),
    "an MPS client": ("gpu\n mps 777 100", State.BUSY),
    "a renderer on a small card": ("gpu\n memory 6144\n graphics 4321000 3200", State.BUSY),
    "many workers that render": (
        "gpu\n memory 24576\n" + "".join(f" graphics {pid} 900\n" for pid in range(7000, 7020)),
        State.BUSY,
    ),
    "many workers that render and compute a little": (
        "gpu\n memory 24576\n" + "".join(
            f" graphics {pid} 900\n compute {pid} 900\n" for pid in range(7000, 7020)
        ),
        State.BUSY,
    ),
    "memory of no process on a small card": ("gpu\n memory 4096\n used 210", State.BUSY),
    "memory of no process next to a desktop": (
        "gpu\n memory 81920\n graphics 1 2000\n used 1100", State.BUSY,
    ),
    "memory of no process next to the reserve": (
        f"{NO_MEMORY_V2}gpu\n memory 4096\n reserved 600\n used 200", State.BUSY,
    ),
    "memory of no process, process lists unknown": (
        f"{processes_fail(999)}gpu\n memory 8192\n used 3000", State.BUSY,
    ),
    "memory outside of a limited control group": (
        "gpu\n memory 81920\n limit 10240\n used 2000", State.BUSY,
    ),
    "prohibited and in use": ("gpu\n mode prohibited\n compute 4321000 5", State.PROHIBITED),
    "exclusive process with a process": (
        "gpu\n mode exclusive_process\n compute 4321000 5", State.BUSY,
    ),
    "neither processes nor memory": (f"{processes_fail(3)}{NO_MEMORY}gpu", State.UNKNOWN),
    "neither processes nor memory but the host's": (
        f"{processes_fail(3)}gpu\n memory none", State.UNKNOWN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("scenario", IDLE.values(), ids=IDLE)
def test_idle(here: Here, scenario: str) -> None:
    """A GPU is idle if one reliable reading exists and no reading shows use."""
    here.write(scenario)
    assert got() == "0"


@pytest.mark.parametrize(("scenario", "state"), NOT_IDLE.values(), ids=NOT_IDLE)
def test_not_idle(here: Here, scenario: str, state: State) -> None:
    """A GPU that is in use or unreadable is skipped, and a refusal contains its state."""
    here.write(scenario)
    with pytest.raises(NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    assert [row.state for row in caught.value.rows] == [state]
    here.add("gpu")
    assert got() == "1"


def test_without_a_memory_reading(here: Here) -> None:
    """Without a memory reading, the processes decide if all of them are visible."""
    here.write(f"{NO_MEMORY}gpu")
    if procfs.sees_all_processes():
        assert got() == "0"
    else:  # in a container, an empty list is not reliable
        assert "unknown" in of_gpu(refused())


@pytest.mark.parametrize("use", ["mode prohibited", "mode exclusive_process\n compute 4321000 5"])
def test_a_named_gpu_that_cuda_would_refuse(here: Here, use: str) -> None:
    """A GPU whose compute mode keeps this process off is refused even if it is named."""
    here.write(f"gpu\n {use}\ngpu")
    assert "mode" in of_gpu(refused("0"))


@pytest.mark.parametrize(
    ("size", "is_idle"), [("", True), ("299", False), ("300MiB", True), ("0", False)]
)
def test_the_idle_limit_is_configurable(
    here: Here, monkeypatch: pytest.MonkeyPatch, size: str, *, is_idle: bool
) -> None:
    """$RESERVE_GPU_IDLE_MEMORY raises or lowers the limit for memory in use."""
    here.write("gpu\n memory 8192\n used 300")
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", size)
    assert got() == "0" if is_idle else of_gpu(refused())


def test_an_invalid_idle_limit(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid $RESERVE_GPU_IDLE_MEMORY is refused without any change."""
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", "much")
    with pytest.raises(RequestError, match="RESERVE_GPU_IDLE_MEMORY"):
        reserve_gpu.reserve()
    assert variables() == {}


# -- readings --------------------------------------------------------------------------------------


def test_device(here: Here) -> None:
    """A device has a name, bus ID, VBIOS, link width and memory, which are None if unreported."""
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
    """A reading contains the numbers of processes, the memory in use, and the compute mode."""
    here.write(
        "gpu\n memory 4096\n reserved 90\n used 10\n mode exclusive_process\n"
        " compute 1 100\n compute 2 -\n graphics 3 20\n mps 4 5"
    )
    with Nvml() as nvml:
        (device,) = devices_of(nvml)
        usage = nvml.usage(device)
    assert (usage.compute, usage.mps, usage.mode) == (2, 1, ComputeMode.EXCLUSIVE_PROCESS)
    assert (usage.total_mib, usage.used_mib, usage.graphics_mib) == (4096, 135, 20)
    assert usage.unexplained_mib == 115
    assert usage.reserve_known
    assert usage.sees_all is procfs.sees_all_processes()


@pytest.mark.parametrize(
    ("lines", "listed"),
    [
        (
            "compute 1 100\n compute 2 -\n graphics 3 20\n mps 4 5\n mps 1 100",
            {1: 100, 2: None, 4: 5},
        ),
        ("graphics 1 300\n graphics 2 9000\n graphics 3 3900", {2: 9000, 3: 3900}),
    ],
    ids=["desktop", "renderers"],
)
def test_processes(here: Here, lines: str, listed: dict[int, int | None]) -> None:
    """Processes are listed once each, and graphics processes only if a desktop needs less."""
    here.write(f"gpu\n memory 24576\n {lines}")
    with Nvml() as nvml:
        (device,) = devices_of(nvml)
        processes = nvml.processes(device)
    assert {process.pid: process.memory_mib for process in processes} == listed
    assert len(processes) == len(listed)


def test_utilisation(here: Here) -> None:
    """The utilisation is a percentage, or None if it is not reported or fails."""
    here.write("gpu\n utilisation 97\ngpu\n utilisation none\ngpu")
    here.add("fail nvmlDeviceGetUtilizationRates 2 999")
    with Nvml() as nvml:
        devices = devices_of(nvml)
        assert [nvml.read_all(device)[1].utilisation for device in devices] == [97, None, None]


GAUGES = {
    "nvmlDeviceGetUtilizationRates": "utilisation",
    "nvmlDeviceGetPowerUsage": "power_w",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_w",
}


def gauges() -> list[Gauges]:
    """Return the gauges of each device, all of which must be free."""
    rows = reserve_gpu.status().rows
    assert {row.state for row in rows} == {State.FREE}
    return [Gauges(*(getattr(row, name) for name in Gauges._fields)) for row in rows]


def test_gauges(here: Here) -> None:
    """Temperature and power are read, and None if they are not reported."""
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
    """A MIG instance has the temperature and the power of its GPU."""
    here.write("gpu\n mig on\n temperature 50\n power 90\n instance 0\n instance 1")
    assert gauges() == [Gauges(None, 50, 90.0, 250.0)] * 2


@pytest.mark.parametrize("lost", ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"])
def test_temperature_of_old_and_new_drivers(here: Here, lost: str) -> None:
    """The temperature is read with the function that the driver has.

    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
    """
    here.write(f"missing {lost}\ngpu\n temperature 66")
    assert [each.temperature_c for each in gauges()] == [66]


@pytest.mark.parametrize("code", [3, 15, 999])
def test_a_gauge_that_fails(here: Here, code: int) -> None:
    """A gauge that fails is None, and affects neither the other gauges nor the state."""
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
    """The driver's version is None if it is not reported."""
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
    """The link of two GPUs is one of four distances, and far if the driver does not report it."""
    here.write(f"gpu\n link 1 {kind}\ngpu")
    with Nvml() as nvml:
        one, other = devices_of(nvml)
        assert nvml.link(one, other) == nvml.link(other, one) == link
        here.add("fail nvmlDeviceGetP2PStatus * 3\nfail nvmlDeviceGetTopologyCommonAncestor * 999")
        assert nvml.link(one, other) == Link.SYSTEM


@pytest.mark.parametrize(
    ("level", "link"), [(0, Link.SWITCH), (40, Link.SOCKET), (77, Link.SYSTEM)]
)
def test_links_by_topology_level(
    here: Here, monkeypatch: pytest.MonkeyPatch, level: int, link: int
) -> None:
    """GPUs on one board are as close as behind a switch, and an unknown level is far."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTopologyCommonAncestor", lambda *_gpus: level)
    with Nvml() as nvml:
        one, other = devices_of(nvml)
        assert nvml.link(one, other) == link


def test_an_unknown_compute_mode(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with an unknown compute mode can be reserved."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", lambda _handle: 77)
    assert got() == "0"


# -- MIG -------------------------------------------------------------------------------------------


def test_mig_instances(here: Here) -> None:
    """Each MIG instance is a device with its own lock and memory, but its GPU is not."""
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
    for name in ("1", "1:1", "1:9"):  # the GPU, a gap, and a number above the last
        with pytest.raises(RequestError, match="1:0, 1:2, 1:5"):
            reserve_gpu.reserve(name)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == parts[1].uuid


def test_a_busy_mig_instance(here: Here) -> None:
    """A process on one MIG instance does not make the others busy."""
    here.write("gpu\n mig on\n instance 1\n compute 4321000 500\n instance 4\ngpu")
    assert got() == here.uuid("0:4")


def test_mig_without_instances(here: Here) -> None:
    """A GPU with MIG enabled but without instances is skipped."""
    here.write("gpu\n mig on")
    assert "MIG" in of_gpu(refused())
    here.add("gpu")
    assert got() == "1"


def test_an_unreadable_mig_instance(here: Here) -> None:
    """A MIG instance that can't be read is a fault, and the other instances are available."""
    here.write("gpu\n mig on\n instance 1\n instance 4")
    here.add("fail nvmlDeviceGetUUID 0:1 999")
    fault, device = walk()
    assert isinstance(fault, Fault)
    assert (fault.label, fault.index, fault.instance) == ("GPU0:1", 0, 1)
    assert got() == here.uuid("0:4") == getattr(device, "uuid", None)


# -- numbers of calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("GPU0",)])
def test_only_the_reserved_gpu_is_accessed(here: Here, arguments: tuple[str, ...]) -> None:
    """If the first GPU is idle, or named by its index, no other GPU is accessed."""
    assert got(*arguments) == "0"
    assert {call.partition(" ")[2] for call in here.calls()} == {"", "0"}


def test_calls_do_not_depend_on_the_number_of_gpus(here: Here) -> None:
    """If the first GPU is idle, the number of calls does not depend on the number of GPUs."""
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


def accesses(here: Here, index: int) -> int:
    """Count the requests for the GPU's handle."""
    return here.calls().count(f"nvmlDeviceGetHandleByIndex_v2 {index}")


def test_only_faults_are_read_again(here: Here) -> None:
    """A session reads a GPU again after a fault, because it might be back, but not a device."""
    here.add("fail nvmlDeviceGetUUID 0 999")
    with Nvml() as nvml:
        assert [type(device) for device in nvml.walk()] == [Fault, Device]
        assert [type(device) for device in nvml.walk()] == [Fault, Device]
        here.use("two")
        assert [type(device) for device in nvml.walk()] == [Device, Device]
        assert [type(device) for device in nvml.walk()] == [Device, Device]
    assert (accesses(here, 0), accesses(here, 1)) == (3, 1)


def test_a_device_of_an_earlier_session(here: Here) -> None:
    """A session can read a device that an earlier session found, if it still exists."""
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
    """A library that lacks some functions, and counts their lookups."""

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
        assert {library.lookups[name] for name in versions} <= {1, 2}  # for the count, and the list


def test_a_function_that_fails_on_one_gpu_is_called_for_the_next(here: Here) -> None:
    """A GPU that lacks a function does not hide the MIG instances of the next GPU."""
    here.write("gpu\ngpu\n mig on\n instance 0\nfail nvmlDeviceGetMigMode 0 13")
    assert labels(walk()) == ["GPU0", "GPU1:0"]


# -- errors of the driver --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("gpu\nfail nvmlInitWithFlags * 9", NoDriverError),
        ("gpu\nfail nvmlInitWithFlags * 12", NoDriverError),
        *((f"gpu\nfail nvmlInitWithFlags * {code}", DriverError) for code in (4, 18, 998, 999)),
        ("missing nvmlInitWithFlags\ngpu", DriverError),
        ("count 0\ngpu", NoDeviceError),
        ("gpu\nfail nvmlDeviceGetCount_v2 * 999", DriverError),
    ],
)
def test_a_driver_that_does_not_start(
    here: Here, monkeypatch: pytest.MonkeyPatch, lines: str, error: type[DriverError]
) -> None:
    """The error's class says whether a driver exists, its text is one line, and nothing changes."""
    here.write(lines)
    monkeypatch.setenv("CUDA_DEVICE_MEMORY", "7")
    with pytest.raises(DriverError) as caught:
        reserve_gpu.reserve()
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert variables() == {"CUDA_DEVICE_MEMORY": "7"}


# -- faults of one GPU -----------------------------------------------------------------------------

# Each fault, and a word of its cause.
FAULTS = {
    "nvmlDeviceGetHandleByIndex_v2 0 15": "lost",
    "nvmlDeviceGetHandleByIndex_v2 0 4": "Permission",
    "nvmlDeviceGetHandleByIndex_v2 0 998": "Unknown",
    "nvmlDeviceGetUUID 0 999": "Unknown",
    "nvmlDeviceGetMigMode 0 15": "lost",
    "nvmlDeviceGetMemoryInfo_v2 0 15": "lost",
    "nvmlDeviceGetComputeRunningProcesses_v3 0 15": "lost",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3 0 15": "lost",
    "nvmlDeviceGetComputeMode 0 15": "lost",
}


@pytest.mark.parametrize(("fault", "cause"), FAULTS.items(), ids=FAULTS)
def test_a_faulty_gpu_is_skipped(here: Here, fault: str, cause: str) -> None:
    """A GPU that fails is skipped, and the refusal of a request for it contains the cause."""
    here.add(f"fail {fault}")
    for request in ({"count": 2}, {"devices": "0"}):
        assert cause in of_gpu(refused(**request))
    assert got() == "1"


def test_a_sandbox_that_blocks_the_mig_mode(here: Here) -> None:
    """A GPU whose MIG mode can't be read is used if it can't have instances."""
    here.write("gpu\nfail nvmlDeviceGetMigMode * 17")
    assert got("0") == "0"
    reserve_gpu.release()
    here.write("gpu\n slots 7\nfail nvmlDeviceGetMigMode * 17")
    assert "operating system" in of_gpu(refused())


@pytest.mark.parametrize(
    ("code", "state"),
    [(15, "broken"), (999, "broken"), (17, "unknown"), (555, "unknown"), (4, "no permission")],
)
def test_the_state_of_a_faulty_gpu(here: Here, code: int, state: str) -> None:
    """Only certain error codes mean that a GPU is broken; others leave its state unknown."""
    here.write(f"gpu\nfail nvmlDeviceGetUUID 0 {code}")
    assert reserve_gpu.status().to_dict()["devices"][0]["state"] == state
    assert of_gpu(refused()).startswith(f"{state}: ")


@pytest.mark.parametrize("code", [17, 555])
def test_a_blocked_memory_reading(here: Here, code: int) -> None:
    """A GPU whose memory and processes can't be read in a sandbox is not chosen."""
    here.write(f"gpu\n compute 4321000 10\nfail nvmlDeviceGetMemoryInfo * {code}")
    here.add(f"fail nvmlDeviceGetMemoryInfo_v2 * {code}\n{processes_fail(17)}")
    assert of_gpu(refused()).startswith("unknown: ")


def test_gpus_that_can_not_be_opened(here: Here) -> None:
    """GPUs that are counted but can't be opened are skipped."""
    here.write("count 3\ngpu\n compute 4321000 10")
    with pytest.raises(NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    assert [row.state for row in caught.value.rows] == [State.BUSY, State.DENIED, State.DENIED]


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo_v2"]
)
def test_a_hanging_call(here: Here, function: str) -> None:
    """A GPU whose call hangs is a fault after the time limit, and the next one is read."""
    here.add(f"delay {function} 0 1000")
    fault, device = walk(HANGING_S)
    assert isinstance(device, Device)
    assert isinstance(fault, Fault)
    assert "hangs" in fault.reason
    assert function.removesuffix("_v2") in fault.reason


def mode_or_error(nvml: Nvml, device: Device, limit_s: float | None = None) -> object:
    """Return the device's compute mode, or the text of the error."""
    try:
        return nvml.usage(device, limit_s).mode
    except DeviceError as error:
        return str(error)


def test_a_hanging_call_is_not_repeated(here: Here) -> None:
    """Repeated readings of a hanging GPU leave one thread, and do not affect other GPUs."""
    with Nvml(HANGING_S) as nvml:
        one, other = devices_of(nvml)
        before = _thread._count()
        usual = here.scenario.read_text()
        here.add("delay nvmlDeviceGetComputeMode 0 1000")
        (reason,) = {mode_or_error(nvml, one) for _ in range(9)}
        assert "nvmlDeviceGetComputeMode" in str(reason)
        assert here.calls().count("nvmlDeviceGetComputeMode 0") == 1
        assert mode_or_error(nvml, other, 20) is ComputeMode.DEFAULT
        assert _thread._count() - before == 1
        here.scenario.unlink()  # ends the delay
        while mode_or_error(nvml, one) == reason:
            time.sleep(0.001)
        here.write(usual)
        assert mode_or_error(nvml, one) is ComputeMode.DEFAULT


def test_the_time_limit_of_one_reading(here: Here) -> None:
    """A reading can have a time limit of its own."""
    with Nvml() as nvml:
        device, _ = devices_of(nvml)
        here.add("delay nvmlDeviceGetMemoryInfo_v2 0 1000")
        assert "no answer within 0.05 s" in str(mode_or_error(nvml, device, 0.05))


def test_a_hanging_initialisation(here: Here) -> None:
    """A hanging initialisation is an error after the time limit."""
    here.add("delay nvmlInitWithFlags * 1000")
    with Nvml(HANGING_S) as nvml, pytest.raises(DriverError, match="hangs"):
        nvml.count()


# -- several GPUs at once --------------------------------------------------------------------------


def accessed(here: Here) -> set[str]:
    """Return the indices of the GPUs that were accessed."""
    return {call.partition(" ")[2] for call in here.calls()} - {""}


def test_one_hanging_gpu_of_many(here: Here) -> None:
    """If eight GPUs are read together and the fifth hangs, only the fifth is faulty."""
    here.write("gpu\n" * 8 + "delay nvmlDeviceGetUUID 4 1000")
    devices = walk(HANGING_S)
    assert [device.index for device in devices] == [*range(8)]
    (fault,) = (device for device in devices if isinstance(device, Fault))
    assert fault.index == 4
    assert "nvmlDeviceGetUUID" in fault.reason


def test_one_hanging_reading_of_many(here: Here) -> None:
    """Only the hanging reading fails, and each of the others is made once."""
    here.write("gpu\n" * 8)
    with Nvml(HANGING_S) as nvml:
        devices = devices_of(nvml)
        here.add("delay nvmlDeviceGetComputeMode 4 1000")
        readings = list(nvml.usages(devices))
    failed = [index for index, reading in enumerate(readings) if isinstance(reading, DeviceError)]
    assert failed == [4]
    assert [here.calls().count(f"nvmlDeviceGetComputeMode {index}") for index in range(8)] == [
        1
    ] * 8


def test_a_slow_reading_does_not_delay_the_results_before_it(here: Here) -> None:
    """While a GPU hangs, the results before it are available; if they suffice, no other is read."""
    here.write("gpu\n" * 4)
    with Nvml() as nvml:
        devices = devices_of(nvml)
        threads = _thread._count()
        here.add("delay nvmlDeviceGetComputeMode 2 1000")
        readings = nvml.usages(devices)
        assert not any(isinstance(next(readings), DeviceError) for _ in range(2))
        readings.close()
        assert mode_or_error(nvml, devices[3]) is ComputeMode.DEFAULT
        here.scenario.unlink()  # ends the delay
        assert wait_for(lambda: _thread._count() == threads, LIMIT_S, 0.001)
        assert here.calls().count("nvmlDeviceGetComputeMode 3") == 1
        here.write("gpu\n" * 4)


def test_all_results_of_a_driver_that_is_always_slow(here: Here) -> None:
    """If every reading is slow but none hangs, all results are returned in order."""
    here.write("gpu\n" * 4)
    with Nvml() as nvml:
        devices = devices_of(nvml)
        here.add("delay nvmlDeviceGetComputeMode * 0.05")
        readings = nvml.readings(devices)
    assert [*readings] == devices
    assert not any(isinstance(reading, DeviceError) for reading in readings.values())


def test_no_gpu_is_initialized_after_a_slow_one(here: Here) -> None:
    """A free GPU that takes long to initialize is reserved before the next one is accessed."""
    here.write("gpu\n" * 8 + "delay-first nvmlDeviceGetHandleByIndex_v2 1 0.1")
    with here.rival("0"):
        assert got() == "1"
        assert accessed(here) == {"0", "1"}


def test_gpus_that_do_not_match_are_read_together(here: Here) -> None:
    """GPUs of another model do not count as GPUs that might be reserved."""
    here.write("gpu\n name A\n" * 5 + "gpu\n name B\n" + "gpu\n name A\n" * 2)
    assert got(name="B") == "5"
    assert accessed(here) == {*"012345"}


LOOKS_BUSY = "gpu\n used 6000\n"


def test_a_gpu_that_looks_busy_is_not_locked_first(here: Here) -> None:
    """GPUs whose memory is in use are neither locked nor read again if a later GPU is free."""
    here.write(LOOKS_BUSY * 3 + "gpu\n" * 5)
    assert got() == "3"
    assert accessed(here) == {*"0123"}
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


@pytest.mark.parametrize(
    ("lines", "limit"),
    [("graphics 1100 3000\n graphics 1101 1000", ""), ("used 6000", "7000MiB")],
    ids=["desktop", "user's limit"],
)
def test_an_idle_gpu_with_memory_in_use_comes_first(
    here: Here, monkeypatch: pytest.MonkeyPatch, lines: str, limit: str
) -> None:
    """A GPU does not look busy because of a desktop, or of memory within the user's limit."""
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", limit)
    here.write(f"gpu\n {lines}\ngpu\n")
    assert got() == "0"
    assert accessed(here) == {"0"}


def test_a_free_gpu_is_reserved_while_a_later_one_hangs(here: Here) -> None:
    """A hanging reading of a later GPU delays no reservation, and leaves one thread."""
    usual = "gpu\n" * 8
    here.write(f"{usual}delay nvmlDeviceGetComputeMode 5 1000")
    with ExitStack() as rivals:
        for number in "0123":
            rivals.enter_context(here.rival(number))
        before, start = _thread._count(), time.monotonic()
        assert got() == "4"
        assert time.monotonic() - start < READINGS_LIMIT_S
        assert locked(here.locks) >= {f"{here.uuid('4')}.lock"}
        assert f"{here.uuid('5')}.lock" not in locked(here.locks)
        reserve_gpu.release()
        assert got() == "4"
        assert here.calls().count("nvmlDeviceGetComputeMode 5") == 1  # read together with GPU4
        assert wait_for(lambda: _thread._count() - before <= 1, LIMIT_S, 0.01)
        here.write(usual)  # ends the delay


def test_a_reading_that_was_not_awaited_does_not_delay_others(here: Here) -> None:
    """A session that no longer needs a reading that hangs in another session reads other GPUs."""
    usual = "gpu\n" * 4
    here.write(usual)
    with Nvml(HANGING_S) as one, Nvml() as other:
        devices = devices_of(one)
        assert len(list(other.walk())) == len(devices)
        here.add("delay nvmlDeviceGetComputeMode 2 1000")
        list(one.usages(devices))
        usages = other.usages(devices)
        next(usages)
        next(usages)
        usages.close()
        assert mode_or_error(other, devices[3]) is ComputeMode.DEFAULT
        here.write(usual)  # ends the delay


# -- bindings --------------------------------------------------------------------------------------


def test_a_replaced_memory_function(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory function is used even if gpustat has replaced it by one without `version`."""
    here.write("gpu\n memory 4096\n reserved 600\ngpu\n memory 4096")
    original = pynvml.nvmlDeviceGetMemoryInfo

    def replacement(handle: Any) -> Any:
        return original(handle, version=pynvml.nvmlMemory_v2)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", replacement)
    assert got() == "0"
    assert os.environ["CUDA_DEVICE_MEMORY"] == "4096"


MODULES = {
    "another module": "def nvmlInit(): pass",
    "Python 2": "print 'hello'",
    "error": "1 / 0",
    "exit": "raise SystemExit(3)",
    "imports itself": "import pynvml; pynvml.nvmlInit()",
}


@pytest.fixture
def _without_bindings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the next reservation import the bindings again."""
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "pynvml")
    yield
    sys.modules.pop("pynvml", None)


@pytest.mark.usefixtures("here", "_without_bindings")
@pytest.mark.parametrize("source", MODULES.values(), ids=MODULES)
def test_a_file_that_shadows_the_bindings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    """The error contains the path of a file that Python finds before the installed bindings."""
    name = "pynvml/__init__.py" if "nvmlInit" in source else "pynvml.py"
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DriverError) as caught:
        reserve_gpu.reserve()
    assert str(tmp_path / "pynvml") in str(caught.value)
    assert "install" not in str(caught.value)
    sys.path.remove(str(tmp_path))  # as if the file had another name
    assert got() == "0"


@pytest.mark.usefixtures("here", "_without_bindings")
def test_a_file_that_breaks_the_import_of_the_bindings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error contains the path of a file that shadows a module which the bindings import."""
    (tmp_path / "string.py").write_text("raise ValueError('mine')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "string")
    with pytest.raises(DriverError, match=f"{tmp_path}/string.py .mine"):
        reserve_gpu.reserve()


@pytest.mark.usefixtures("here", "_without_bindings")
@pytest.mark.parametrize("source", MODULES.values(), ids=MODULES)
def test_wrong_bindings_that_are_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    """If the wrong module is an installed package, the error has a command that replaces it."""
    (tmp_path / "pynvml.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    with pytest.raises(DriverError, match=r"Run: .* install.* nvidia-ml-py$"):
        reserve_gpu.reserve()


@pytest.mark.usefixtures("here", "_without_bindings")
def test_a_shadowing_module_that_other_code_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A module that shadows the bindings and that other code imported stays imported."""
    (tmp_path / "pynvml.py").write_text("mine = True")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("pynvml")
    with pytest.raises(DriverError, match="restart"):
        reserve_gpu.reserve()
    assert sys.modules["pynvml"] is mine


# -- interrupted imports ---------------------------------------------------------------------------


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
    (Handler(), ImportError),
]


IN_THE_MODULE = "import signal; signal.raise_signal(signal.SIGUSR1); 1 / 0  # not reached"
# Python runs a signal handler after a call, but not after a subscript, so here it runs after the
# module's last line.
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
@pytest.mark.parametrize("function", ["reserve", "status"])
@pytest.mark.parametrize("code", [IN_THE_MODULE, AT_ITS_END], ids=["in the module", "at its end"])
def test_a_signal_during_the_import_of_the_bindings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, handler: Any, kind: type[BaseException],
    function: str, code: str,
) -> None:  # fmt: skip
    """The exception of a signal handler reaches the caller, and the next call works."""
    (tmp_path / "pynvml.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    before, usual = variables(), signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(kind) as caught:
            getattr(reserve_gpu, function)()
        assert type(caught.value) is kind
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert variables() == before
    assert reserve_gpu.current() is None
    sys.path.remove(str(tmp_path))
    assert got() == "0"


def test_invalid_utf8(here: Here) -> None:
    """A name or VBIOS that is not valid UTF-8 does not prevent a reservation."""
    here.scenario.write_bytes(b"gpu\n name Ge\xff\xfeForce\n vbios \x80\x81\n")
    reservation = reserve_gpu.reserve()
    assert "GPU0" in str(reservation)
    assert str(reservation).splitlines()[0].isprintable()


def test_escape_sequences_in_a_name(here: Here) -> None:
    """Names from the driver can't control a terminal, whichever text contains them."""
    here.write("gpu\n name Ge\x1b[31mForce\n vbios 1\x072\n uuid GPU-a\x1bb\n")
    reservation = reserve_gpu.reserve()
    status = reserve_gpu.status()
    texts = (str(reservation), repr(reservation), status.picture().to_text(), status._repr_html_())
    for text in texts:
        assert all(line.isprintable() for line in text.splitlines()), text
    assert "Ge\N{REPLACEMENT CHARACTER}[31mForce" in str(reservation)
    reserve_gpu.release()
    here.add("compute 4321000 9000")
    requests: list[dict[str, Any]] = [{}, {"name": "H100"}, {"devices": "GPU-b"}]
    for request in requests:
        with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
            reserve_gpu.reserve(**request)
        assert all(line.isprintable() for line in str(caught.value).splitlines())


def test_error_text_of_the_driver(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's error text is shown as one bounded line, even if it is not valid text."""
    text = "\x1b[31mbad\nworse" + "x" * 1000
    monkeypatch.setattr(pynvml.NVMLError, "__str__", lambda _self: text)
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

    def invalid_text(_self: object) -> str:
        return b"\xff".decode()

    monkeypatch.setattr(pynvml.NVMLError, "__str__", invalid_text)
    assert "error 15 (nvmlDeviceGetUUID)" in of_gpu(refused("0"))


def test_two_gpus_with_one_uuid(here: Here) -> None:
    """Only the first of two GPUs with the same UUID, as some virtual GPUs have, is used."""
    uuid = "GPU-12345678-0000-4000-8000-000000000000"
    here.write(f"gpu\n uuid {uuid}\ngpu\n uuid {uuid}\n")
    assert got() == "0"
    first, second = reserve_gpu.status().rows
    assert first.is_mine
    assert second.state is State.BROKEN
    with pytest.raises(NoFreeDeviceError):
        reserve_gpu.reserve("0,1")


@pytest.mark.parametrize("line", ["remap-failed 1", "recovery 1", "recovery 2"])
@pytest.mark.parametrize("mig", ["", "mig on\n instance 0\n"])
def test_a_gpu_that_reports_a_fault_is_broken(here: Here, line: str, mig: str) -> None:
    """A GPU that reports a fault is broken, as are its instances."""
    here.write(f"gpu\n {line}\n {mig}gpu\n")
    assert got() == "1"
    assert reserve_gpu.status().rows[0].state is State.BROKEN


@pytest.mark.parametrize("line", ["remap-pending 1", "recovery 4"])
def test_a_gpu_that_needs_a_reset_can_be_reserved(here: Here, line: str) -> None:
    """A GPU that needs a reset to repair its memory is free, and causes a warning."""
    here.write(f"gpu\n {line}\n")
    (row,) = reserve_gpu.status().rows
    assert row.state is State.FREE
    assert "reset" in str(reserve_gpu.status())
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=r"GPU0 .*reset"):
        assert got() == "0"


DESKTOP = (
    "gpu\n memory 8192\n screen 1\n compute 4321 {mib}\n graphics 4321 {mib}\n graphics 99 300\n"
)


@pytest.mark.parametrize(
    ("mib", "state"), [(20, State.FREE), (596, State.FREE), (4096, State.BUSY), ("-", State.BUSY)]
)
def test_a_desktop_process_that_computes(here: Here, mib: float | str, state: State) -> None:
    """A process in both of NVML's lists belongs to a desktop if it has little memory."""
    here.write(DESKTOP.format(mib=mib))
    (row,) = reserve_gpu.status().rows
    assert row.state is state
    if state is State.FREE:
        assert (len(row.processes), len(row.background)) == (0, 2)
        assert got() == "0"


def test_the_gpu_with_the_screen_comes_last(here: Here) -> None:
    """A GPU that draws the screen is chosen only if it is named or no other is free."""
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
# How NVML reports a GPU that shares the host's memory, and the GPU's total memory in MiB.
HOSTS_MEMORY = {
    "a NUMA node of the host": ("gpu\n memory 98304\n used 20000\n numa 1\n", 98304),
    "not supported": ("gpu\n memory none\n used 20000\n", HOST_MIB),
    "the host's total": (f"gpu\n memory {HOST_MIB}\n used 20000\n addressing 2\n", HOST_MIB),
}


@pytest.mark.skipif(not procfs.sees_all_processes(), reason="in a container they can't be seen")
@pytest.mark.parametrize(("gpu", "total_mib"), HOSTS_MEMORY.values(), ids=HOSTS_MEMORY)
def test_the_hosts_memory(here: Here, gpu: str, total_mib: int) -> None:
    """If a GPU shares the host's memory, only its processes' memory is in use."""
    here.write(gpu)
    (row,) = reserve_gpu.status().rows
    assert (row.state, row.promisable_mib) == (State.FREE, total_mib)
    assert got(memory="90%") == "0"
    reserve_gpu.release()
    here.write(f"{gpu} compute 4321 5000\n graphics 99 40\n")
    (device,) = reserve_gpu.status().to_dict()["devices"]
    assert (device["state"], device["memory_total_mib"]) == ("busy", total_mib)
    assert device["memory_used_mib"] == 5040
    with pytest.warns(reserve_gpu.ReserveGPUWarning):
        assert got(memory=f"{total_mib - 5040}MiB") == "0"
    reserve_gpu.release()
    assert refused(memory=f"{total_mib - 5039}MiB")


def test_the_hosts_memory_with_a_process_of_unknown_size(here: Here) -> None:
    """No part of the host's memory is available next to a process of unknown size."""
    here.write("gpu\n memory none\n compute 4321 -\n")
    (device,) = reserve_gpu.status().to_dict()["devices"]
    assert (device["memory_total_mib"], device["memory_used_mib"]) == (HOST_MIB, None)
    assert of_gpu(refused(memory=1000))


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
    """A card with as much memory as its host is busy if its memory is in use."""
    here.write(f"gpu\n {gpu}\n")
    (row,) = reserve_gpu.status().rows
    assert row.state is state


@pytest.mark.parametrize("clock", ["epoch", "boot", "monotonic"])
def test_use_that_ended_before_the_period_does_not_count(here: Here, clock: str) -> None:
    """A process that was active 5 s ago was active in the last 8 s, but not in the last 2 s."""
    here.write(f"gpu\nsamples {clock}\nuse-ended 5\ncompute {os.getpid()} 500")
    with Nvml() as nvml:
        (device,) = devices_of(nvml)
        assert nvml.recent_use(device, procfs.now().later(-2.0)) == {}
        assert set(nvml.recent_use(device, procfs.now().later(-8.0)) or ()) == {os.getpid()}
        assert nvml.recent_use(device, procfs.now().later(-60.0)) == {os.getpid(): 66}  # 10 of 15 s
    here.write(f"gpu\nsamples strange\nuse-ended 5\ncompute {os.getpid()} 500")
    with Nvml() as nvml:  # the clock is unknown, so the use might be in the period
        (device,) = devices_of(nvml)
        assert nvml.recent_use(device, procfs.now().later(-2.0)) == {os.getpid(): None}


def test_a_status_reads_each_list_of_processes_once(here: Here) -> None:
    """One reading of a GPU requests the list of each kind of process once."""
    here.write("gpu\n memory 8192\n compute 4321 20\n graphics 4321 20\n mps 777 100\n")
    with Nvml() as nvml:
        (device,) = devices_of(nvml)
        nvml.read_all(device)
    once = 2  # one call for the length, and one for the list
    for query in QUERIES:
        assert here.calls().count(f"{query}_v2 0") == once, query


GB10 = "gpu\n name NVIDIA GB10\n memory none\n width 1\n"
# The link width and the VBIOS version that the driver reports, and those of the device.
BOARDS = {
    "a GB10": (f"{GB10} vbios 9A.0B.16.00.00", None, "9A.0B.16.00.00"),
    "a GB10 with the host's total": (
        f"{GB10} memory {HOST_MIB}\n addressing 2\n vbios none", None, None,
    ),
    "a GH200, which is a NUMA node with a PCIe link": (
        "gpu\n numa 1\n width 1\n vbios none", 1, None,
    ),
    "a card in a slot with one lane": ("gpu\n width 1\n vbios none", 1, None),
    "a virtual machine's GPU": ("gpu\n width none\n vbios none", None, None),
    **{
        f"the VBIOS version {version!r}": (f"gpu\n vbios {version}", 16, None)
        for version in ("empty", "00.00.00.00.00", "[N/A]", "None", "[Unknown]")
    },
    "a real VBIOS version": ("gpu\n vbios 00.00.10.00.00", 16, "00.00.10.00.00"),
    "a MIG instance": ("gpu\n mig on\n width 8\n vbios empty\n instance 0", 8, None),
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "width", "vbios"), BOARDS.values(), ids=BOARDS)
def test_link_width_and_vbios(here: Here, gpu: str, width: int | None, vbios: str | None) -> None:
    """A GPU that is not a PCIe card has no link width, and a placeholder is not a version."""
    here.write(gpu)
    (device,) = walk()
    assert isinstance(device, Device)
    assert (device.link_width, device.vbios) == (width, vbios)


@pytest.mark.parametrize(
    "name", [*(path.name for kind in ("gb10", "thor", "orin") for path in CORPUS.glob(f"{kind}*"))]
)
def test_posted_machines_without_a_pcie_link(here: Here, name: str) -> None:
    """The posted readings of GB10, Thor and Orin show no link width."""
    here.write((CORPUS / name).read_text())
    (device,) = walk()
    assert isinstance(device, Device)
    assert device.link_width is None


def test_a_slow_reading_does_not_keep_nvml_initialized(here: Here) -> None:
    """A slow reading that is no longer needed does not keep NVML initialized."""
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
