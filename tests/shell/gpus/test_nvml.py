"""Tests of the readings of a simulated driver, through the real bindings."""

from __future__ import annotations

import _thread
import importlib
import os
import signal
import site
import sys
import time
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

import reserve_gpu
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
from tests.support.machine import LIMIT_S
from tests.support.reserving import got, of_gpu, refused, variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.here import Here


QUERIES = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]
NO_MEMORY_V2 = "missing nvmlDeviceGetMemoryInfo_v2\n"
NO_MEMORY = "fail nvmlDeviceGetMemoryInfo 0 4\nfail nvmlDeviceGetMemoryInfo_v2 0 4\n"
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
    "the reserve, counted as used memory": f"{NO_MEMORY_V2}gpu\n memory 4096\n reserved 600",
    "graphics processes of unknown memory": "gpu\n graphics 1100 -\n graphics 1101 -",
    "process lists unknown, as under WSL2": f"{processes_fail(999)}gpu",
    "no recovery action": "gpu\n recovery none",
}

NOT_IDLE = {
    "many workers that render and compute a little": (
        "gpu\n memory 24576\n" + "".join(
            f" graphics {pid} 900\n compute {pid} 900\n" for pid in range(7000, 7020)
        ),
        State.BUSY,
    ),
    "memory of no process next to the reserve": (
        f"{NO_MEMORY_V2}gpu\n memory 4096\n reserved 600\n used 200", State.BUSY,
    ),
    "memory outside of a limited control group": (
        "gpu\n memory 81920\n limit 10240\n used 2000", State.BUSY,
    ),
    "neither processes nor memory": (f"{processes_fail(3)}{NO_MEMORY}gpu", State.UNKNOWN),
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


# -- readings --------------------------------------------------------------------------------------


def test_device(here: Here) -> None:
    """A device has a name, bus ID, VBIOS, link width and memory."""
    here.write("gpu\n name Tesla T4\n bus 0001:3b:00.0\n vbios 90.04\n width 8\n memory 15360\n")
    (device,) = walk()
    assert device == Device(
        0, here.uuid("0"), "Tesla T4", "0001:3B:00.0", 15360, "90.04", 8, reserve_mib=0
    )


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


def test_processes(here: Here) -> None:
    """Graphics processes are listed only if a desktop needs less."""
    here.write("gpu\n memory 24576\n graphics 1 300\n graphics 2 9000\n graphics 3 3900")
    with Nvml() as nvml:
        (device,) = devices_of(nvml)
        processes = nvml.processes(device)
    assert {process.pid: process.memory_mib for process in processes} == {2: 9000, 3: 3900}


def gauges() -> list[Gauges]:
    """Return the gauges of each device, all of which must be free."""
    rows = reserve_gpu.status().rows
    assert {row.state for row in rows} == {State.FREE}
    return [Gauges(*(getattr(row, name) for name in Gauges._fields)) for row in rows]


def test_gauges(here: Here) -> None:
    """Temperature and power are read, and None if they are not reported."""
    here.write(
        "gpu\n utilisation 97\n temperature 71\n power 318\n power-limit 400\n"
        "gpu\n utilisation none\n temperature none\n power none\n power-limit none\n"
    )
    assert gauges() == [Gauges(97, 71, 318.0, 400.0), Gauges(None, None, None, None)]


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


LINKS = {
    "nvlink": Link.NVLINK, "switches": Link.SWITCH, "host": Link.SOCKET,
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


def test_a_sandbox_that_blocks_the_mig_mode(here: Here) -> None:
    """A GPU whose MIG mode can't be read is used if it can't have instances."""
    here.write("gpu\nfail nvmlDeviceGetMigMode * 17")
    assert got("0") == "0"
    reserve_gpu.release()
    here.write("gpu\n slots 7\nfail nvmlDeviceGetMigMode * 17")
    assert "operating system" in of_gpu(refused())


@pytest.mark.parametrize(
    ("code", "state"), [(999, "broken"), (17, "unknown"), (4, "no permission")]
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


def test_a_hanging_initialisation(here: Here) -> None:
    """A hanging initialisation is an error after the time limit."""
    here.add("delay nvmlInitWithFlags * 1000")
    with Nvml(HANGING_S) as nvml, pytest.raises(DriverError, match="hangs"):
        nvml.count()


# -- several GPUs at once --------------------------------------------------------------------------


def accessed(here: Here) -> set[str]:
    """Return the indices of the GPUs that were accessed."""
    return {call.partition(" ")[2] for call in here.calls()} - {""}


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


@pytest.mark.parametrize("slow", ["", "delay-first nvmlDeviceGetHandleByIndex_v2 0 0.1"])
def test_a_gpu_that_looks_busy_is_not_locked_first(here: Here, slow: str) -> None:
    """GPUs whose memory is in use are neither locked nor read again if a later GPU is free."""
    here.write(LOOKS_BUSY * 3 + "gpu\n" * 5 + slow)
    assert got() == "3"
    assert accessed(here) == {*"0123"}
    assert [call for call in here.calls() if "ComputeMode" in call] == [
        "nvmlDeviceGetComputeMode 3"
    ]
    locked = {path.name.partition(".")[0] for path in here.locks.glob("GPU-*")}
    assert locked == {here.uuid("3")}


def test_an_idle_gpu_with_memory_in_use_comes_first(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU does not look busy because of memory within the user's limit."""
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", "7000MiB")
    here.write("gpu\n used 6000\ngpu\n")
    assert got() == "0"
    assert accessed(here) == {"0"}


def test_a_free_gpu_is_reserved_while_a_later_one_hangs(here: Here) -> None:
    """A hanging reading of a later GPU delays no reservation."""
    usual = "gpu\n" * 8
    here.write(f"{usual}delay nvmlDeviceGetComputeMode 5 1000")
    with here.rival("0"), here.rival("1"), here.rival("2"), here.rival("3"):
        assert got() == "4"
        assert here.calls().count("nvmlDeviceGetComputeMode 5") == 1  # read together with GPU4
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


# -- interrupted imports ---------------------------------------------------------------------------


def exit_after_reset(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise SystemExit(frame is None)


class Handler:
    def __call__(self, *_: object) -> None:
        raise ImportError("mine")


HANDLERS: list[tuple[Any, type[BaseException]]] = [
    (signal.default_int_handler, KeyboardInterrupt),
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
@pytest.mark.parametrize("code", [IN_THE_MODULE, AT_ITS_END], ids=["in the module", "at its end"])
def test_a_signal_during_the_import_of_the_bindings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, handler: Any, kind: type[BaseException],
    code: str,
) -> None:  # fmt: skip
    """The exception of a signal handler reaches the caller, and the next call works."""
    (tmp_path / "pynvml.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    before, usual = variables(), signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(kind) as caught:
            reserve_gpu.reserve()
        assert type(caught.value) is kind
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert variables() == before
    assert reserve_gpu.current() is None
    sys.path.remove(str(tmp_path))
    assert got() == "0"


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
    here.write("gpu\nfail nvmlDeviceGetUUID 0 15")

    def invalid_text(_self: object) -> str:
        return b"\xff".decode()

    monkeypatch.setattr(pynvml.NVMLError, "__str__", invalid_text)
    assert "error 15 (nvmlDeviceGetUUID)" in of_gpu(refused("0"))


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


DESKTOP = "gpu\n memory 8192\n screen 1\n compute 4321 20\n graphics 4321 20\n graphics 99 300\n"


def test_the_gpu_with_the_screen_comes_last(here: Here) -> None:
    """A GPU that draws the screen is chosen only if it is named or no other is free."""
    here.write(DESKTOP + "gpu\n memory 8192\n")
    assert got() == "1"
    assert got("0") == "0"
    assert got(count=2) == "0,1"
    reserve_gpu.release()
    with here.rival("1"):
        assert got() == "0"


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
    assert device["memory_used_mib"] == 5040


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


def test_use_that_ended_before_the_period_does_not_count(here: Here) -> None:
    """A process that was active 5 s ago was active in the last 8 s, but not in the last 2 s."""
    here.write(f"gpu\nsamples boot\nuse-ended 5\ncompute {os.getpid()} 500")
    with Nvml() as nvml:
        (device,) = devices_of(nvml)
        assert nvml.recent_use(device, procfs.now().later(-2.0)) == {}
        assert set(nvml.recent_use(device, procfs.now().later(-8.0)) or ()) == {os.getpid()}
        assert nvml.recent_use(device, procfs.now().later(-60.0)) == {os.getpid(): 66}  # 10 of 15 s


GB10 = "gpu\n name NVIDIA GB10\n memory none\n width 1\n"
# The link width and the VBIOS version that the driver reports, and those of the device.
BOARDS = {
    "a GB10": (f"{GB10} vbios 9A.0B.16.00.00", None, "9A.0B.16.00.00"),
    "a GH200, which is a NUMA node with a PCIe link": (
        "gpu\n numa 1\n width 1\n vbios none", 1, None,
    ),
    "a placeholder": ("gpu\n vbios 00.00.00.00.00", 16, None),
    "a MIG instance": ("gpu\n mig on\n width 8\n vbios empty\n instance 0", 8, None),
}  # fmt: skip


@pytest.mark.parametrize(("gpu", "width", "vbios"), BOARDS.values(), ids=BOARDS)
def test_link_width_and_vbios(here: Here, gpu: str, width: int | None, vbios: str | None) -> None:
    """A GPU that is not a PCIe card has no link width, and a placeholder is not a version."""
    here.write(gpu)
    (device,) = walk()
    assert isinstance(device, Device)
    assert (device.link_width, device.vbios) == (width, vbios)
