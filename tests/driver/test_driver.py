"""What the stand-in driver does: the official bindings and plain ctypes, here and in processes."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from ctypes import byref, c_char, c_uint, c_uint64, c_void_p
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from tests import driver
from tests.support.forker import Forker
from tests.support.machine import ROOT
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.here import Here
    from tests.support.machine import Child, Machine

pytestmark = pytest.mark.full

SCENARIOS = sorted(path.stem for path in driver.SCENARIOS.glob("*.txt"))


@pytest.fixture
def nvml(here: Here) -> Iterator[Here]:
    """Return the machine, with NVML initialised."""
    pynvml.nvmlInit()
    yield here
    pynvml.nvmlShutdown()


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


def gpu(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def instance(index: int, slot: int) -> Any:
    return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(index), slot)


def code(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the number of the error that a call of the bindings ends with, 0 for none."""
    try:
        function(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def name(handle: Any) -> Any:
    return pynvml.nvmlDeviceGetName(handle)


def mib(memory: Any, *parts: str) -> list[int]:
    return [getattr(memory, part) >> 20 for part in parts]


def used_mib(index: int) -> int:
    (used,) = mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(index)), "used")
    return used


def computing(handle: Any) -> list[int]:
    """Return the pids of the compute processes."""
    return [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]


# ---- the machine ---------------------------------------------------------------------------


def test_without_a_scenario_there_is_no_driver(forker: Forker) -> None:
    """Without a scenario NVML answers that no driver is loaded and CUDA that there is no device."""
    codes = forker.ask("[ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2(), cuda.cuInit(0)]", {})
    assert codes == [9, 100]


def test_scenario_is_read_again(nvml: Here) -> None:
    """A running process sees the machine change."""
    assert pynvml.nvmlDeviceGetCount() == 2
    nvml.write("gpu\ngpu\ngpu\n  name Third")
    assert pynvml.nvmlDeviceGetCount() == 3
    assert name(gpu(2)) == "Third"


def test_gpu_that_goes_away_is_lost(nvml: Here) -> None:
    """The handle of a GPU that is no longer described answers that the GPU is lost."""
    kept = gpu(1)
    nvml.write("gpu")
    assert code(name, kept) == 15
    assert code(gpu, 1) == 2


def test_unreadable_scenario_keeps_the_machine(nvml: Here) -> None:
    """A scenario that is gone for a moment leaves the machine as it was."""
    assert pynvml.nvmlDeviceGetCount() == 2
    nvml.scenario.unlink()
    assert pynvml.nvmlDeviceGetCount() == 2
    nvml.use("two")


def test_threads_survive_a_changing_scenario(nvml: Here) -> None:
    """Calls from many threads see the old or the new machine, never a mixture."""
    texts = [f"gpu\n  name {letter * 60}" for letter in "AB"]
    nvml.write(texts[0])
    names, stop, handle = set[str](), threading.Event(), gpu(0)

    def look() -> None:
        while not stop.is_set():
            names.add(name(handle))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    turn = 0
    while turn < 60 or len(names) < 2:
        nvml.write(texts[turn % 2])
        turn += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert names == {"A" * 60, "B" * 60}


def test_calls_do_not_use_up_memory(machine: Machine) -> None:
    """Ten thousand calls and re-reads leave the process as big as it was."""
    machine.write("gpu\n  compute 1 1")
    code = """
        import os, resource
        from pynvml import *
        def use(times):
            for _ in range(times):
                nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetHandleByIndex(0))
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        nvmlInit()
        before = use(1000)
        os.utime(os.environ["STAND_IN_SCENARIO"])
        print(use(10000) - before)
    """
    environ = machine.environ()
    del environ["STAND_IN_LOG"]
    done = subprocess.check_output([sys.executable, "-c", dedent(code)], env=environ, text=True)
    assert int(done) < 1024


MISTAKES = [
    ("gpu\n  colour red", "2: unknown word 'colour'"),
    ("  name Nothing", "1: 'name' before any gpu"),
    ("# fine\n\ngpu\n  memory lots", "4: 'lots' is not a number from 0 to 2147483647"),
    ("gpu\n  gi 7", "2: 'gi' belongs to an instance"),
    ("gpu\n  mode lazy", "2: unknown word 'lazy'"),
    ("gpu\n  compute 12", "2: the memory in MiB is missing"),
    ("gpu\n  bus 3", "2: '3' is not like 0000:03:00.0"),
    ("gpu\n  name", "2: text is missing"),
    ("gpu\n" * 65, "65: more than 64 GPUs"),
    ("gpu\n" + "  mps 1 1\n" * 2049, "2050: more than 2048 processes"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistake_ends_the_process(
    machine: Machine, forker: Forker, text: str, message: str
) -> None:
    """A mistake in the scenario ends the process with the place and the reason."""
    machine.write(text)
    call = "ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2()"
    _, error, stderr, status = forker.run(call, machine.environ())
    assert (error, status) == ("no answer", -signal.SIGABRT)
    assert stderr == f"stand-in driver: {machine.scenario}:{message}\n"


# ---- NVML ----------------------------------------------------------------------------------


def test_initialisations_are_counted(here: Here) -> None:
    """Each initialisation wants its own shutdown; before and after nothing else works."""
    library = driver.load()
    pynvml.nvmlInit()
    pynvml.nvmlInit()
    assert [library.nvmlShutdown() for _ in range(3)] == [0, 0, 1]
    assert code(pynvml.nvmlDeviceGetCount) == 1


BAD: dict[str, Callable[[Any], int]] = {
    "no room for the count": lambda nvml: nvml.nvmlDeviceGetCount_v2(None),
    "no room for the name": lambda nvml: nvml.nvmlDeviceGetName(gpu(0), None, 96),
    "no handle": lambda nvml: nvml.nvmlDeviceGetName(None, byref(c_uint()), 96),
    "a bad handle": lambda nvml: nvml.nvmlDeviceGetName(c_void_p(4711), byref(c_uint()), 96),
    "no room for memory": lambda nvml: nvml.nvmlDeviceGetMemoryInfo(gpu(0), None),
    "no room for the bus id": lambda nvml: nvml.nvmlDeviceGetPciInfo_v3(gpu(0), None),
    "no room for processes": lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses_v3(
        gpu(0), None, None
    ),
    "no UUID": lambda nvml: nvml.nvmlDeviceGetHandleByUUID(None, byref(c_void_p())),
    "no room for the handle": lambda nvml: nvml.nvmlDeviceGetHandleByIndex_v2(0, None),
    "beyond the last": lambda nvml: nvml.nvmlDeviceGetHandleByIndex_v2(2, byref(c_void_p())),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD.keys())
def test_bad_arguments(nvml: Here, call: Callable[[Any], int]) -> None:
    """A null pointer, a bad handle and an index out of range are invalid arguments."""
    assert call(driver.load()) == 2


@pytest.mark.parametrize(
    ("function", "struct"),
    [
        ("nvmlDeviceGetMemoryInfo", "c_nvmlMemory_t"),
        ("nvmlDeviceGetMemoryInfo_v2", "c_nvmlMemory_v2_t"),
        ("nvmlDeviceGetPciInfo_v2", "nvmlPciInfo_v2_t"),
        ("nvmlDeviceGetPciInfo_v3", "nvmlPciInfo_t"),
        ("nvmlDeviceGetUtilizationRates", "c_nvmlUtilization_t"),
        ("nvmlDeviceGetBAR1MemoryInfo", "c_nvmlBAR1Memory_t"),
    ],
)
def test_structs_have_the_size_of_the_bindings(nvml: Here, function: str, struct: str) -> None:
    """A call writes as many bytes as the struct of the official bindings has, and no more."""
    room = bytearray(b"\xaa" * 4096)
    raw = (c_char * 4096).from_buffer(room)
    room[:4] = pynvml.nvmlMemory_v2.to_bytes(4, "little")
    assert getattr(driver.load(), function)(gpu(0), raw) == 0
    assert len(bytes(room).rstrip(b"\xaa")) == ctypes.sizeof(getattr(pynvml, struct))


def test_board_gauges(nvml: Here) -> None:
    """Both calls answer the temperature, as the bindings ask for it; power is in mW."""
    nvml.write(
        "gpu\n temperature 66\n power 42\n power-limit 300\ngpu\n temperature none\n power none"
    )
    calls = pynvml.nvmlDeviceGetTemperature, pynvml.nvmlDeviceGetTemperatureV
    assert [call(gpu(0), 0) for call in calls] == [66, 66]
    assert [code(call, gpu(1), 0) for call in calls] == [3, 3]
    assert [code(call, gpu(0), 1) for call in calls] == [2, 2]
    assert pynvml.nvmlDeviceGetPowerUsage(gpu(0)) == 42000
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu(0)) == 300_000
    assert code(pynvml.nvmlDeviceGetPowerUsage, gpu(1)) == 3
    assert driver.load().nvmlDeviceGetTemperatureV(gpu(0), (c_uint * 3)(1)) == 25


@pytest.mark.parametrize("kind", ["Compute", "Graphics", "MPSCompute"])
@pytest.mark.parametrize(("suffix", "size"), [("", 16), ("_v2", 24), ("_v3", 24)])
def test_process_structs(nvml: Here, kind: str, suffix: str, size: int) -> None:
    """Processes come in 16 bytes in the first version and in 24 in the others."""
    word = {"Compute": "compute", "Graphics": "graphics", "MPSCompute": "mps"}[kind]
    nvml.write(f"gpu\n  {word} 11 1\n  {word} 22 2")
    room, count = (c_uint64 * 64)(*[0xAAAA] * 64), c_uint(9)
    function = getattr(driver.load(), f"nvmlDeviceGet{kind}RunningProcesses{suffix}")
    assert function(gpu(0), byref(count), room) == 0
    assert count.value == 2
    at = size // 8
    assert [room[i] % 2**32 for i in (0, at)] == [11, 22]
    assert [room[i] >> 20 for i in (1, at + 1)] == [1, 2]
    assert room[2 * at] == 0xAAAA


@pytest.mark.parametrize(
    ("version", "size"),
    [
        ("535.42.01", 24),
        ("535.43.02", 32),
        ("535.86.10", 32),
        ("535.98", 24),
        ("535.104.05", 24),
        ("545.23.06", 24),
    ],
)
def test_some_drivers_use_larger_process_structs(nvml: Here, version: str, size: int) -> None:
    """Drivers 535.43 to 535.98 use 32 bytes for each process in version 3, and 24 in version 2."""
    nvml.write(f"driver {version}\ngpu\n compute 11 1\n compute 22 2")
    for suffix, expected in (("_v2", 24), ("_v3", size)):
        room, count = (c_uint64 * 64)(), c_uint(9)
        function = getattr(driver.load(), f"nvmlDeviceGetComputeRunningProcesses{suffix}")
        assert function(gpu(0), byref(count), room) == 0
        assert [room[at // 8] % 2**32 for at in (0, expected)] == [11, 22]
        assert not any(room[2 * expected // 8 :])


def test_process_details(nvml: Here) -> None:
    """Hopper and newer GPUs list each process with its protected memory; older ones do not."""
    nvml.write("gpu\n capability 9.0\n compute 11 1\n compute 22 2\n graphics 33 3\ngpu")
    version = pynvml.nvmlProcessDetailList_v1
    details = pynvml.nvmlDeviceGetRunningProcessDetailList
    listed = [
        [(each.pid, each.usedGpuMemory) for each in details(gpu(0), version, mode)]
        for mode in (pynvml.NVML_PROCESS_MODE_COMPUTE, pynvml.NVML_PROCESS_MODE_GRAPHICS)
    ]
    assert listed == [[(11, 1 << 20), (22, 2 << 20)], [(33, 3 << 20)]]
    assert code(details, gpu(1), version, 0) == 3
    assert code(details, gpu(0), 0x1000010, 0) == 25


def test_memory(nvml: Here) -> None:
    """Version 1 counts the reserve as used, version 2 apart; listed processes count in both."""
    nvml.write(
        "gpu\n memory 4000\n reserved 300\n used 10\n compute 1 500\n graphics 2 20\n compute 3 -"
    )
    read = pynvml.nvmlDeviceGetMemoryInfo
    assert mib(read(gpu(0)), "total", "used", "free") == [4000, 830, 3170]
    v2 = read(gpu(0), pynvml.nvmlMemory_v2)
    assert mib(v2, "total", "reserved", "used", "free") == [4000, 300, 530, 3170]
    assert code(read, gpu(0), 0x01000028) == 25
    nvml.write("gpu\n memory none")
    assert (code(read, gpu(0)), code(read, gpu(0), pynvml.nvmlMemory_v2)) == (3, 3)


def test_count_only_query(nvml: Here) -> None:
    """A process query without room answers how many there are, or success where there is none."""
    nvml.write("gpu\n compute 1 1\n compute 2 1\ngpu")

    def ask(index: int, room: int) -> tuple[int, int]:
        count = c_uint(room)
        function = driver.load().nvmlDeviceGetComputeRunningProcesses_v3
        return function(gpu(index), byref(count), None), count.value

    assert [ask(0, 0), ask(0, 1), ask(1, 0)] == [(7, 2), (7, 2), (0, 0)]


def test_big_machine(nvml: Here) -> None:
    """Each of 64 GPUs lists its own processes, a thousand in all, and an instance its own."""
    counts = [20] * 50 + [0] * 14
    parts = ["gpu" + "\n  compute 7 1" * count for count in counts]
    part = "\n  mig on\n  graphics 9 1\n  instance 3" + "\n    compute 8 1" * 5
    nvml.write("\n".join(parts) + part)
    assert [len(computing(gpu(index))) for index in range(63)] == counts[:63]
    assert computing(instance(63, 3)) == [8] * 5
    assert mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(63)), "used") == [6]


def test_memory_of_a_process_may_be_unknown(nvml: Here) -> None:
    """A process's memory given as `-` is not available."""
    nvml.write("gpu\n compute 12 -")
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu(0))
    assert (process.pid, process.usedGpuMemory) == (12, None)


def test_managed_memory_is_in_no_process_size(nvml: Here) -> None:
    """Managed memory is in use, but the driver lists neither its size nor its process."""
    nvml.write("gpu\n compute 11 300\n managed 11 2000\n graphics 11 300\n managed 22 500")
    assert mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(0)), "used") == [2800]
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu(0))
    assert [(each.pid, each.usedGpuMemory >> 20) for each in processes] == [(11, 300)]


def test_vbios_versions(nvml: Here) -> None:
    """A VBIOS version is text, empty, or not reported."""
    nvml.write("gpu\n vbios N/A\ngpu\n vbios empty\ngpu\n vbios none\ngpu")
    read = pynvml.nvmlDeviceGetVbiosVersion
    assert [read(gpu(index)) for index in (0, 1, 3)] == ["N/A", "", "86.07.22.00.A8"]
    assert code(read, gpu(2)) == 3


def test_process_until_dead(nvml: Here) -> None:
    """A process marked `until-dead` is listed, and its memory counted, while it lives."""
    guest = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    nvml.write(f"gpu\n compute {guest.pid} 500 until-dead")

    def seen() -> tuple[list[int], list[int]]:
        return computing(gpu(0)), mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(0)), "used")

    assert seen() == ([guest.pid], [500])
    guest.kill()
    os.waitid(os.P_PID, guest.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet buried
    assert seen() == ([], [0])
    guest.communicate()
    assert seen() == ([], [0])


def test_finding_a_gpu(nvml: Here) -> None:
    """A GPU is found by its UUID and by its bus id in either form."""
    nvml.write("gpu\ngpu\n bus 0001:3b:00.0\n uuid GPU-abc")
    by_uuid, by_bus = pynvml.nvmlDeviceGetHandleByUUID, pynvml.nvmlDeviceGetHandleByPciBusId
    handles = [by_uuid("GPU-abc"), by_bus("00000001:3B:00.0"), by_bus("0001:3b:00")]
    assert [pynvml.nvmlDeviceGetIndex(handle) for handle in handles] == [1, 1, 1]
    assert (code(by_uuid, "GPU-ab"), code(by_bus, "0000:3b:00.0")) == (6, 6)
    pci = pynvml.nvmlDeviceGetPciInfo(gpu(1))
    assert (pci.busIdLegacy, pci.busId) == ("0001:3B:00.0", "00000001:3B:00.0")


def test_count_may_lie(nvml: Here) -> None:
    """GPUs counted beyond those described may not be opened, those beyond the count not named."""
    nvml.write("count 3\ngpu")
    assert pynvml.nvmlDeviceGetCount() == 3
    assert code(gpu, 2) == 4
    nvml.write("count 1\ngpu\ngpu")
    assert code(gpu, 1) == 2


def test_mig(nvml: Here) -> None:
    """Instances lie at their slots, answer for themselves, and have their GPU's index."""
    nvml.use("mig")
    assert [pynvml.nvmlDeviceGetMigMode(gpu(i))[0] for i in range(3)] == [0, 1, 1]
    assert [pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu(i)) for i in range(3)] == [0, 7, 7]
    assert (code(instance, 1, 1), code(instance, 1, 7)) == (6, 2)
    assert name(instance(1, 2)) == "NVIDIA A100-SXM4-40GB MIG 2g.10gb"
    assert mib(pynvml.nvmlDeviceGetMemoryInfo(instance(1, 2)), "total") == [9856]
    last = instance(1, 5)
    assert pynvml.nvmlDeviceGetIndex(last) == 1
    assert pynvml.nvmlDeviceGetGpuInstanceId(last) == 1
    assert pynvml.nvmlDeviceIsMigDeviceHandle(last).value == 1
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(last)
    assert pynvml.nvmlDeviceGetUUID(parent) == pynvml.nvmlDeviceGetUUID(gpu(1))
    uuid = pynvml.nvmlDeviceGetUUID(last)
    assert uuid.startswith("MIG-")
    assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == uuid


def test_mig_parent_says_little(nvml: Here) -> None:
    """A split GPU answers for processes no permission, for utilisation not supported."""
    nvml.write("gpu\n mig on\n instance 0\n compute 5 100\n gi 3\ngpu\n mig none")
    assert code(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu(0)) == 4
    assert code(pynvml.nvmlDeviceGetUtilizationRates, gpu(0)) == 3
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(instance(0, 0))
    assert (process.pid, process.gpuInstanceId, process.computeInstanceId) == (5, 3, 0)
    assert mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(0)), "used") == [100]
    assert code(pynvml.nvmlDeviceGetMigMode, gpu(1)) == 3


def test_a_whole_gpu_has_no_instance_ids(nvml: Here) -> None:
    """A GPU without MIG instances has no instance at any slot, no parent, and no instance ids."""
    nvml.write("gpu\n mig none")
    assert code(pynvml.nvmlDeviceGetMigMode, gpu(0)) == 3
    assert pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu(0)) == 0
    assert code(instance, 0, 0) == 6
    assert code(pynvml.nvmlDeviceGetGpuInstanceId, gpu(0)) == 2
    assert code(pynvml.nvmlDeviceGetComputeInstanceId, gpu(0)) == 2
    assert code(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, gpu(0)) == 2


def test_confidential_computing(nvml: Here) -> None:
    """The mode and the ready state are reported; without the feature, both are unsupported."""

    def settings() -> tuple[int, int]:
        read = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
        assert pynvml.nvmlSystemGetConfComputeSettings(byref(read)) == 0
        return read.ccFeature, read.multiGpuMode

    state = pynvml.nvmlSystemGetConfComputeState
    ready = pynvml.nvmlSystemGetConfComputeGpusReadyState
    assert (code(state), code(ready)) == (3, 3)
    assert driver.load().nvmlSystemGetConfComputeSettings(None) == 3
    nvml.write("conf-compute on\ngpu\n memory 4000")
    assert (state().ccFeature, settings(), ready()) == (1, (1, 0), 0)
    memory = pynvml.nvmlDeviceGetConfComputeMemSizeInfo
    assert memory(gpu(0)).protectedMemSizeKib == 4000 << 10
    nvml.write("conf-compute protected-pcie\nconf-compute-ready 1\ngpu")
    assert (state().ccFeature, settings(), ready()) == (0, (0, 1), 1)
    assert memory(gpu(0)).protectedMemSizeKib == 0
    assert driver.load().nvmlSystemGetConfComputeSettings((c_uint * 5)(7)) == 25


@pytest.mark.parametrize(
    ("mode", "answer"),
    [("on", 802), ("protected-pcie", 802), ("off", 0), ("none", 0)],
)
def test_cuda_waits_for_the_ready_state(
    machine: Machine, forker: Forker, mode: str, answer: int
) -> None:
    """In a confidential mode, `cuInit` fails until the GPUs are ready, and then succeeds."""
    text = f"conf-compute {mode}\nconf-compute-ready %d\ngpu"
    machine.write(text % 0)
    assert ask_cuda(forker, machine, "cuda.cuInit(0)") == answer
    machine.write(text % 1)
    assert ask_cuda(forker, machine, "cuda.cuInit(0)") == 0


def test_an_unknown_field_has_an_error_of_its_own(nvml: Here) -> None:
    """Reading fields succeeds even if none is known; each unknown field has its own error."""
    nvml.write("gpu\n recovery 2\ngpu\n recovery none")
    known, unknown = pynvml.nvmlDeviceGetFieldValues(gpu(0), [230, 4711])
    assert (known.nvmlReturn, known.value.uiVal, unknown.nvmlReturn) == (0, 2, 3)
    (unreported,) = pynvml.nvmlDeviceGetFieldValues(gpu(1), [230])
    assert unreported.nvmlReturn == 3


def level(one: int, other: int) -> Any:
    return pynvml.nvmlDeviceGetTopologyCommonAncestor(gpu(one), gpu(other))


def test_topology(nvml: Here) -> None:
    """Links are symmetric; where none is given, the socket tells node from system."""
    nvml.use("eight")
    assert [level(0, other) for other in (0, 1, 3, 4)] == [0, 40, 40, 50]
    pairs = ((0, 1), (1, 0), (1, 2))
    assert [pynvml.nvmlDeviceGetP2PStatus(gpu(a), gpu(b), 2) for a, b in pairs] == [0, 0, 5]
    assert [pynvml.nvmlDeviceGetNvLinkState(gpu(0), link) for link in (0, 1)] == [1, 0]
    assert pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), 0).bus == 2
    nvml.write("gpu\n link 1 switch\n link 2 host\ngpu\ngpu\n link 1 switches")
    assert (level(1, 0), level(2, 0), level(1, 2)) == (10, 30, 20)
    assert code(pynvml.nvmlDeviceGetNvLinkState, gpu(0), 0) == 3


# ---- failures and delays -------------------------------------------------------------------


def test_failures(nvml: Here) -> None:
    """A rule fails one function for one GPU, one instance or everybody."""
    nvml.write(
        """
        gpu
        gpu
          mig on
          instance 0
          instance 1
        fail nvmlDeviceGetName 0 999
        fail nvmlDeviceGetUUID 1:1 4
        fail nvmlDeviceGetMinorNumber * 3
        fail nvmlDeviceGetMigDeviceHandleByIndex 1:0 15
        fail nvmlInitWithFlags * 18
        """
    )
    assert code(name, gpu(0)) == 999
    assert name(gpu(1)) == "NVIDIA Stand-in"
    assert pynvml.nvmlDeviceGetUUID(gpu(1)).startswith("GPU-")
    assert code(pynvml.nvmlDeviceGetUUID, instance(1, 1)) == 4
    assert code(pynvml.nvmlDeviceGetMinorNumber, gpu(1)) == 3
    assert code(instance, 1, 0) == 15
    assert code(pynvml.nvmlInit) == 18


def test_delay_is_not_cut_short(machine: Machine, forker: Forker) -> None:
    """A delayed call takes its time, whatever signals arrive."""
    machine.write("gpu\ndelay nvmlInitWithFlags * 0.2")
    call = """
import pynvml, signal, time
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
start = time.monotonic()
pynvml.nvmlInit()
time.monotonic() - start
"""
    assert forker.ask(call, machine.environ()) >= 0.2


def test_delay_lets_others_pass(nvml: Here) -> None:
    """While one call waits another thread's is answered; it ends early if the scenario goes."""
    nvml.write("gpu\ndelay nvmlDeviceGetName * 3600")
    handle = gpu(0)
    slow = threading.Thread(target=name, args=[handle], daemon=True)
    slow.start()
    while "nvmlDeviceGetName 0" not in nvml.calls():
        time.sleep(0.001)
    assert pynvml.nvmlDeviceGetIndex(handle) == 0
    assert slow.is_alive()
    nvml.scenario.unlink()
    slow.join(60)
    assert not slow.is_alive()
    nvml.use("two")


def test_first_delay_is_once_for_each_device(nvml: Here) -> None:
    """`delay-first` delays a device's first call in a process, and no other."""
    rule = "delay-first nvmlDeviceGetHandleByIndex_v2"
    nvml.write(f"gpu\ngpu\n{rule} * 0.1")
    start = time.monotonic()
    gpu(0)
    gpu(1)
    assert time.monotonic() - start >= 0.2
    nvml.write(f"gpu\ngpu\n{rule} * 3600")
    assert gpu(0)


def test_missing_function(machine: Machine) -> None:
    """A missing function is not in the library, its other versions are."""
    machine.write("gpu\nmissing nvmlDeviceGetComputeRunningProcesses_v3")
    with machine.child() as child:
        child.run("import pynvml; pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByIndex(0)")
        missing = child.run("pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)")
        assert missing.error == "NVMLError_FunctionNotFound"
        assert child.run("pynvml.nvmlDeviceGetComputeRunningProcesses_v2(gpu)").value == []


def test_function_that_does_not_exist(machine: Machine) -> None:
    """A rule about a function that the stand-in doesn't have is an error, not a silent nothing."""
    machine.write("gpu\nfail nvmlDeviceGetNames * 1")
    with pytest.raises(ValueError, match="has no function nvmlDeviceGetNames"):
        driver.environment(machine.scenario)


def test_log(machine: Machine, forker: Forker) -> None:
    """The log has the process, the function and the device of every call."""
    machine.write("gpu\n mig on\n instance 0")
    code = """
from pynvml import *
nvmlInit()
nvmlDeviceGetName(nvmlDeviceGetMigDeviceHandleByIndex(nvmlDeviceGetHandleByIndex(0), 0))
cuda.cuInit(0)
os.getpid()
"""
    pid = forker.ask(code, machine.environ())
    assert machine.log.read_text().splitlines() == [
        f"{pid} nvmlInitWithFlags",
        f"{pid} nvmlDeviceGetHandleByIndex_v2 0",
        f"{pid} nvmlDeviceGetMigDeviceHandleByIndex 0:0",
        f"{pid} nvmlDeviceGetName 0:0",
        f"{pid} cuInit",
    ]


# ---- CUDA ----------------------------------------------------------------------------------

CUDA = """
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p

def ask(function, *arguments, type=c_int):
    answer = type()
    code = getattr(cuda, function)(byref(answer), *arguments)
    return f"code {code}" if code else answer.value

def allocate(mib):
    return ask("cuMemAlloc_v2", c_size_t(mib << 20), type=c_uint64)

def left():
    free, total = c_size_t(), c_size_t()
    return cuda.cuMemGetInfo_v2(byref(free), byref(total)) or [free.value >> 20, total.value >> 20]
"""
BEFORE_INIT = """
calls = {
    "count": lambda: cuda.cuDeviceGetCount(byref(c_int())),
    "device": lambda: cuda.cuDeviceGet(byref(c_int()), 0),
    "current": lambda: cuda.cuCtxGetCurrent(byref(c_void_p())),
    "context": lambda: cuda.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0),
}
before = [call() for call in calls.values()]
version, started = ask("cuDriverGetVersion"), cuda.cuInit(0)
before, version, started, [call() for call in calls.values()]
"""


def ask_cuda(forker: Forker, machine: Machine, code: str, **extra: str) -> Any:
    """Return the value of the last line of code, in a process in which CUDA has not started."""
    return forker.ask(f"{CUDA}\n{dedent(code)}", machine.environ(**extra))


def test_before_init(machine: Machine, forker: Forker) -> None:
    """Before cuInit every call but that for the version answers 3."""
    machine.write("cuda 12080\ngpu")
    before, version, started, after = ask_cuda(forker, machine, BEFORE_INIT)
    assert (before, after) == ([3] * 4, [0] * 4)
    assert (version, started) == (12080, 0)


def test_failed_init_can_be_tried_again(machine: Machine, forker: Forker) -> None:
    """A failed cuInit leaves CUDA uninitialised and reads afresh next time; a good one is final."""
    code = """
        answers = [[cuda.cuInit(0), cuda.cuDeviceGetCount(byref(c_int()))]]
        for value in ("1", "0,1"):
            os.environ["CUDA_VISIBLE_DEVICES"] = value
            answers.append([cuda.cuInit(0), ask("cuDeviceGetCount")])
        answers
    """
    answers = ask_cuda(forker, machine, code, CUDA_VISIBLE_DEVICES="")
    assert answers == [[100, 3], [0, 1], [0, 1]]


def test_forked_child(machine: Machine, forker: Forker) -> None:
    """The forked child of a process that has started CUDA gets 3 from everything, cuInit too."""
    code = """
        def in_fork(function, *arguments):
            pid = os.fork()
            if not pid:
                os._exit(50 + function(*arguments))
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 50

        before = in_fork(cuda.cuInit, 0)
        cuda.cuInit(0)
        after = [in_fork(cuda.cuInit, 0), in_fork(cuda.cuDeviceGetCount, byref(c_int()))]
        before, after, ask("cuDeviceGetCount")
    """
    assert ask_cuda(forker, machine, code) == [0, [3, 3], 2]


TWO = "gpu\n uuid GPU-aa11\ngpu\n uuid GPU-aa22\n"
MIG = """
gpu
gpu
  mig on
  instance 1
    uuid MIG-cc11
  instance 3
    uuid MIG-cc33
gpu
  mig on
"""
MACHINES = {
    "two": TWO,
    "prohibited": f"{TWO} mode prohibited",
    "mig": MIG,
    "new mig": f"driver 570.86{MIG}",
}
VISIBLE = """
def device(ordinal):
    '''The bus of a GPU, or the start of the UUID of an instance.'''
    raw = (c_char * 16)()
    cuda.cuDeviceGetUuid_v2(raw, ordinal)
    if bytes(raw).hex()[:4] in ("cc11", "cc33"):
        return bytes(raw).hex()[:4]
    cuda.cuDeviceGetPCIBusId(raw, 16, ordinal)
    return int(raw.value[5:7], 16)

cuda.cuInit(0) or [device(ordinal) for ordinal in range(ask("cuDeviceGetCount"))]
"""


@pytest.mark.parametrize(
    ("kind", "visible", "expected"),
    [
        ("two", None, [1, 2]),
        ("two", "", []),
        ("two", "0", [1]),
        ("two", "1,0", [2, 1]),
        ("two", " 1", [2]),
        ("two", "1gpu2", [2]),
        ("two", "-1", []),
        ("two", "1,-1,0", [2]),
        ("two", "1,,0", [2]),
        ("two", "0,7,1", [1]),
        ("two", "NoDevFiles", []),
        ("two", "0,0", []),
        ("two", "0,1,0", []),
        ("two", "0,GPU-aa11", []),
        ("two", "GPU-aa22", [2]),
        ("two", "GPU-aa2,0", [2, 1]),
        ("two", "GPU-aa", []),
        ("two", "1,GPU-aa,0", [2]),
        ("two", "GPU-bb", []),
        ("two", "99999999999999999999", []),
        ("prohibited", None, [1]),
        ("prohibited", "1", []),
        ("mig", None, ["cc11"]),
        ("mig", "0", [1]),
        ("mig", "1", ["cc11"]),
        ("mig", "2", []),
        ("mig", "MIG-cc33", ["cc33"]),
        ("mig", "MIG-cc3", ["cc33"]),
        ("mig", "MIG-cc", []),
        ("mig", "0,MIG-cc33", ["cc33"]),
        ("mig", "MIG-cc33,MIG-cc11", ["cc33"]),
        ("new mig", "MIG-cc33,MIG-cc11", ["cc33", "cc11"]),
        ("new mig", None, ["cc11", "cc33"]),
        ("new mig", "1,MIG-cc11", []),
    ],
)
def test_visible_devices(
    machine: Machine, forker: Forker, kind: str, visible: str | None, expected: list[int | str]
) -> None:
    """CUDA_VISIBLE_DEVICES means what CUDA's documentation says (seen by bus, or instance)."""
    machine.write(MACHINES[kind])
    extra = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert ask_cuda(forker, machine, VISIBLE, **extra) == (expected or 100)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (None, [4, 2, 1, 3]),
        ("FASTEST_FIRST", [4, 2, 1, 3]),
        ("PCI_BUS_ID", [1, 2, 3, 4]),
    ],
)
def test_device_order(
    machine: Machine, forker: Forker, order: str | None, expected: list[int]
) -> None:
    """CUDA counts the fastest first unless told to go by the bus."""
    machine.use("mixed")
    extra = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    assert ask_cuda(forker, machine, VISIBLE, **extra) == expected


def test_cuda_devices_are_those_of_nvml(machine: Machine, forker: Forker) -> None:
    """Name, UUID and memory are the same through CUDA and through NVML."""
    code = """
        import pynvml
        pynvml.nvmlInit()
        cuda.cuInit(0)
        name, raw = (c_char * 100)(), (c_char * 16)()
        cuda.cuDeviceGetName(name, 100, 1)
        cuda.cuDeviceGetUuid_v2(raw, 1)
        uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1))
        attributes = [ask("cuDeviceGetAttribute", which, 1) for which in (75, 76, 33)]
        memory = ask("cuDeviceTotalMem_v2", 1, type=c_size_t) >> 20
        name.value.decode(), uuid.replace("-", "") == "GPU" + bytes(raw).hex(), memory, attributes
    """
    assert ask_cuda(forker, machine, code) == ["GeForce GTX 1050 Ti", True, 4038, [6, 1, 2]]


def test_memory_round_trip(machine: Machine, forker: Forker) -> None:
    """What is copied to the device and back is the same; more than there is can't be had."""
    machine.write("gpu\n memory 400")
    code = """
        cuda.cuInit(0)
        context = c_void_p()
        cuda.cuDevicePrimaryCtxRetain(byref(context), 0)
        before = [allocate(1), cuda.cuCtxSetCurrent(context), allocate(101)]
        there, back = c_uint64(allocate(60)), (c_char * 5)()
        answers = [
            allocate(60),
            cuda.cuMemcpyHtoD_v2(there, b"hello", c_size_t(5)),
            cuda.cuMemcpyDtoH_v2(back, there, c_size_t(5)),
            back.value.decode(),
            cuda.cuMemcpyDtoH_v2(back, there, c_size_t(61 << 20)),
            cuda.cuMemFree_v2(there),
            cuda.cuMemFree_v2(there),
        ]
        before, answers
    """
    before, answers = ask_cuda(forker, machine, code)
    assert before == ["code 201", 0, "code 2"]
    assert answers == ["code 2", 0, 0, "hello", 1, 0, 1]


def listed(handle: Any) -> list[tuple[int, int]]:
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [(process.pid, process.usedGpuMemory >> 20) for process in processes]


def start_cuda(child: Child) -> None:
    assert not child.run(f"import ctypes; cuda = ctypes.CDLL('libcuda.so.1')\n{CUDA}").error
    assert child.run("cuda.cuInit(0)").value == 0


def test_contexts_are_seen_by_everybody(nvml: Here) -> None:
    """A process with a CUDA context shows in NVML with its memory until it dies, if by kill -9."""
    (nvml.folder / "contexts").mkdir()
    nvml.write("contexts contexts\ngpu\ngpu")
    with nvml.child(CUDA_VISIBLE_DEVICES="1") as child:
        start_cuda(child)
        assert listed(gpu(1)) == []
        child.run("context = c_void_p(); cuda.cuCtxCreate_v2(byref(context), 0, 0)")
        assert listed(gpu(1)) == [(child.pid, 300)]
        child.run("there = c_uint64(ask('cuMemAlloc_v2', c_size_t(64 << 20), type=c_uint64))")
        assert listed(gpu(1)) == [(child.pid, 364)]
        assert listed(gpu(0)) == []
        assert mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(1)), "used") == [364]
    assert listed(gpu(1)) == []


def test_managed_memory_is_in_use_but_in_no_process(nvml: Here) -> None:
    """Managed memory counts in the GPU's memory use, but not in the size of its process."""
    nvml.write(f"contexts {nvml.folder}\ncontext 518\ngpu")
    with nvml.child() as child:
        assert open_context(child) == 0
        size = "c_size_t(1024 << 20)"
        child.run(f"managed = c_uint64(ask('cuMemAllocManaged', {size}, 1, type=c_uint64))")
        assert child.run(f"cuda.cuMemsetD8_v2(managed, 7, {size})").value == 0
        assert listed(gpu(0)) == [(child.pid, 518)]
        assert used_mib(0) == 518 + 1024
        assert child.run("left()").value == [8192 - 518 - 1024, 8192]
    assert used_mib(0) == 0


@pytest.mark.parametrize("way", ["gradually", "at-once"])
@pytest.mark.parametrize("listed", ["listed", "unlisted"])
def test_the_memory_of_a_killed_process_is_freed_with_a_delay(
    nvml: Here, way: str, listed: str
) -> None:
    """With `freeing`, a killed process's memory is freed gradually or at once, listed or not."""
    (nvml.folder / "contexts").mkdir()
    scenario = "contexts contexts\nfreeing {} {} {}\ngpu\ngpu"
    nvml.write(scenario.format(60, way, listed))
    with nvml.child() as child:
        assert open_context(child) == 0
        assert used_mib(0) == 300
    assert computing(gpu(0)) == ([child.pid] if listed == "listed" else [])
    if way == "gradually":
        wait_for(lambda: 0 < used_mib(0) < 300)
    assert used_mib(0) == 300 or way == "gradually"
    assert used_mib(1) == 0
    nvml.write(scenario.format(0, way, listed))
    assert computing(gpu(0)) == []
    assert used_mib(0) == 0


def test_released_context_is_gone(nvml: Here) -> None:
    """A context that is released is no longer listed, and a primary one counts its users."""
    nvml.write(f"contexts {nvml.folder}\ngpu")
    with nvml.child() as child:
        start_cuda(child)
        for _ in range(2):
            child.run("cuda.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0)")
            assert listed(gpu(0)) == [(child.pid, 300)]
        release = "cuda.cuDevicePrimaryCtxRelease_v2(0)"
        assert child.run(release).value == 0
        assert listed(gpu(0)) == [(child.pid, 300)]
        assert child.run(release).value == 0
        assert listed(gpu(0)) == []
        assert child.run(release).value == 201


def open_context(child: Child) -> int | None:
    """Start CUDA with a context on the first device that it sees; the code of the answer."""
    start_cuda(child)
    code: int | None = child.run("cuda.cuCtxCreate_v2(byref(c_void_p()), 0, 0)").value
    return code


def test_memory_is_shared_by_all_processes(nvml: Here) -> None:
    """What one process has allocated another can't have, and NVML and cuMemGetInfo say the same."""
    nvml.write(
        f"contexts {nvml.folder}\ngpu\n memory 1000\n reserved 50\n used 30\n compute 4321000 20"
    )
    with nvml.child() as one, nvml.child() as two:
        assert (open_context(one), open_context(two)) == (0, 0)
        assert two.run("left()").value == [300, 1000]
        held = one.run("held = c_uint64(allocate(200)); held.value").value
        assert isinstance(held, int)
        for child in (one, two):
            assert child.run("left()").value == [100, 1000]
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu(0), version=pynvml.nvmlMemory_v2)
        assert mib(memory, "free", "used", "reserved") == [100, 850, 50]
        assert two.run("allocate(101)").value == "code 2"
        assert two.run("left()").value == [100, 1000]
        assert one.run("cuda.cuMemFree_v2(held)").value == 0
        assert mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(0)), "free") == [300]
        assert isinstance(two.run("allocate(101)").value, int)
        assert one.run("left()").value == [199, 1000]
        assert sorted(listed(gpu(0))) == sorted([(4321000, 20), (one.pid, 300), (two.pid, 401)])


def test_memory_of_a_killed_process_is_there_at_once(nvml: Here) -> None:
    """What a process has allocated can be had by others as soon as it is killed with -9."""
    nvml.write(f"contexts {nvml.folder}\ngpu\n memory 1000")
    with nvml.child() as one, nvml.child() as two:
        assert (open_context(one), open_context(two)) == (0, 0)
        one.run("allocate(400)")
        assert two.run("allocate(1)").value == "code 2"
        one.kill()
        assert two.run("left()").value == [700, 1000]
        assert isinstance(two.run("allocate(700)").value, int)
        assert mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(0)), "free") == [0]


def test_a_context_needs_memory(nvml: Here) -> None:
    """Where too little is left for a CUDA context there is none, and what it holds is released."""
    nvml.write(f"contexts {nvml.folder}\ngpu\n memory 500")
    with nvml.child() as one, nvml.child() as two:
        assert (open_context(one), open_context(two)) == (0, 2)
        assert one.run("current = ask('cuCtxGetCurrent', type=c_void_p); left()").value[0] == 200
        assert one.run("cuda.cuCtxDestroy_v2(c_void_p(current))").value == 0
        assert two.run("cuda.cuCtxCreate_v2(byref(c_void_p()), 0, 0)").value == 0


def test_memory_of_instances(nvml: Here) -> None:
    """A MIG instance's memory is its own, and counts as its GPU's in NVML."""
    nvml.write(
        f"contexts {nvml.folder}\ngpu\n memory 4000\n mig on\n instance 0\n  memory 1000\n"
        " instance 1\n  memory 1000\n  used 600"
    )
    uuids = [nvml.uuid(f"0:{slot}") for slot in range(2)]
    children = [nvml.child(CUDA_VISIBLE_DEVICES=uuid) for uuid in uuids]
    with children[0] as one, children[1] as two:
        assert (open_context(one), open_context(two)) == (0, 0)
        assert isinstance(one.run("allocate(600)").value, int)
        assert two.run("left()").value == [100, 1000]
        assert two.run("allocate(101)").value == "code 2"
        assert mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(0)), "used") == [1800]


def test_memory_goes_to_one_of_those_who_want_it_at_once(nvml: Here) -> None:
    """Of processes that allocate at the same moment no more get it than there is memory for."""
    nvml.write(f"contexts {nvml.folder}\ngpu\n memory 3000")
    with ExitStack() as stack:
        children = [stack.enter_context(nvml.child()) for _ in range(4)]
        assert [open_context(child) for child in children] == [0] * 4
        for child in children:
            child.send("len([1 for _ in range(100) if isinstance(allocate(10), int)])")
        assert sum(child.answer().value for child in children) == 180
        assert mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(0)), "free") == [0]


# ---- building and running ------------------------------------------------------------------


def test_exports_are_those_of_the_libraries() -> None:
    """The names that the builder knows are exactly those that the libraries export."""
    if not shutil.which("nm"):
        pytest.skip("no nm here to read the libraries with")
    names = set[str]()
    for soname in driver.LIBRARIES:
        listing = subprocess.check_output(
            ["nm", "-D", "--defined-only", str(driver.build() / soname)], text=True
        )
        names |= {line.split()[-1] for line in listing.splitlines()}
    assert names == driver.exports()


def python(code: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-c", dedent(code), *arguments]
    return subprocess.check_output(command, cwd=ROOT, env=variables, text=True)


@pytest.mark.parametrize("soname", driver.LIBRARIES)
def test_loaded_library_is_found_by_name(soname: str) -> None:
    """A library that was loaded by its path is found again by its name."""
    code = """
        import ctypes, os, sys
        path, soname = sys.argv[1:]
        loaded = ctypes.CDLL(path)
        print(ctypes.CDLL(soname, os.RTLD_NOLOAD)._handle == loaded._handle)
    """
    assert python(code, str(driver.build() / soname), soname) == "True\n"


def test_several_may_build_at_once(tmp_path: Path) -> None:
    """Builders that start together end with the same whole libraries, and leave nothing else."""
    code = """
        import sys
        from pathlib import Path
        from tests.driver import build
        print(build(Path(sys.argv[1])))
    """
    with ThreadPoolExecutor() as pool:
        builds = [
            pool.submit(python, code, str(tmp_path), PATH=os.environ["PATH"]) for _ in range(4)
        ]
    [built] = tmp_path.iterdir()
    assert {build.result() for build in builds} == {f"{built}\n"}
    assert {path.name for path in built.glob("*.so.1")} == set(driver.LIBRARIES)


@pytest.mark.needs("compiler")
def test_build_without_a_compiler_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no cc, the compiler of the ziglang package builds the same."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = driver.build(tmp_path / "cache", missing=["nvmlDeviceGetName"])
    code = """
        import ctypes
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        print(nvml.nvmlInit_v2(), hasattr(nvml, "nvmlDeviceGetName"))
    """
    assert python(code, LD_LIBRARY_PATH=str(built)) == "9 False\n"


def run_driver(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.driver", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_line() -> None:
    """A command runs on a scenario's machine; its exit status is its own."""
    result = run_driver("two", "--", "sh", "-c", "echo $STAND_IN_SCENARIO; exit 7")
    assert (result.returncode, result.stderr) == (7, "")
    assert result.stdout == f"{driver.SCENARIOS / 'two.txt'}\n"


def test_command_line_lists_scenarios() -> None:
    """Without arguments the scenarios are listed, each with its first comment."""
    listing = run_driver().stdout
    assert listing == run_driver("--list").stdout
    assert [line.split()[0] for line in listing.splitlines()] == SCENARIOS
    assert "Two GTX 1050 Ti, both idle." in listing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["two"], "usage: "),
        (["twelve", "--", "true"], "no scenario 'twelve'"),
        (["two", "--", "no-such-command"], "no-such-command: No such file"),
    ],
)
def test_command_line_mistakes(arguments: list[str], message: str) -> None:
    """A mistake is one line and exit status 2."""
    result = run_driver(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_are_valid(here: Here, scenario: str) -> None:
    """Every scenario at hand can be read."""
    here.use(scenario)
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() > 0
    pynvml.nvmlShutdown()


def other_tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.mark.needs("benchmarks")
def test_gpustat_sees_the_machine() -> None:
    """Gpustat shows the processes, and a lost card as one."""
    tool = other_tool("gpustat")
    busy = run_driver("busy", "--", tool, "--no-color")
    assert (busy.returncode, busy.stderr) == (0, "")
    assert "3500 /  4038 MB" in busy.stdout
    lost = run_driver("lost", "--", tool, "--no-color")
    assert "GPU is lost" in lost.stdout


@pytest.mark.needs("benchmarks")
def test_nvitop_sees_the_machine() -> None:
    """Nvitop shows GPUs, instances and processes without a complaint."""
    tool = other_tool("nvitop")
    for name, shown in [("busy", "3500MiB"), ("mig", "GI/CI: 7/0"), ("lost", "GPU is Lost")]:
        result = run_driver(name, "--", tool, "--once")
        assert (result.returncode, result.stderr) == (0, "")
        assert shown in result.stdout


@pytest.mark.needs("benchmarks")
def test_nvitop_recognizes_larger_process_structs(tmp_path: Path) -> None:
    """Nvitop lists the right processes of a driver that uses larger structs."""
    text = "driver 535.86.10\nmissing nvmlDeviceGetRunningProcessDetailList\ngpu"
    scenario = tmp_path / "r535.txt"
    scenario.write_text(f"{text}\n  compute 4321000 1500\n  compute 4321001 2500\n")
    result = run_driver(str(scenario), "--", other_tool("nvitop"), "--once")
    assert (result.returncode, result.stderr) == (0, "")
    assert [size in result.stdout for size in ("1500MiB", "2500MiB")] == [True, True]
