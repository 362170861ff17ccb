"""Tests of the stand-in driver, through the official bindings and ctypes."""

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

SCENARIOS = sorted(path.stem for path in driver.SCENARIOS.glob("*.txt"))


@pytest.fixture
def nvml(here: Here) -> Iterator[Here]:
    """Initialize NVML on the simulated machine."""
    pynvml.nvmlInit()
    yield here
    pynvml.nvmlShutdown()


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Start a process that runs code in its forks."""
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


def gpu(index: int) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def instance(index: int, slot: int) -> Any:
    return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu(index), slot)


def error_code(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the code of the NVML error that the call raises, or 0."""
    try:
        function(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def name(handle: Any) -> Any:
    return pynvml.nvmlDeviceGetName(handle)


def mib(memory: Any, *fields: str) -> list[int]:
    return [getattr(memory, field) >> 20 for field in fields]


def used_mib(index: int) -> int:
    (used,) = mib(pynvml.nvmlDeviceGetMemoryInfo(gpu(index)), "used")
    return used


def compute_pids(handle: Any) -> list[int]:
    return [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def compute_memory(handle: Any) -> list[tuple[int, int]]:
    """Return the pid and the memory in MiB of each compute process."""
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [(process.pid, process.usedGpuMemory >> 20) for process in processes]


# ---- the machine ---------------------------------------------------------------------------


def test_without_a_scenario(forker: Forker) -> None:
    """Without a scenario, NVML reports that no driver is loaded, and CUDA finds no device."""
    codes = forker.ask("[ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2(), cuda.cuInit(0)]", {})
    assert codes == [9, 100]


def test_scenario_changes_at_runtime(nvml: Here) -> None:
    """A running process sees a changed scenario; a deleted scenario changes nothing."""
    nvml.write("gpu\ngpu\ngpu\n  name Third")
    assert pynvml.nvmlDeviceGetCount() == 3
    third = gpu(2)
    assert name(third) == "Third"
    nvml.write("gpu")
    assert (error_code(name, third), error_code(gpu, 2)) == (15, 2)
    nvml.scenario.unlink()
    assert pynvml.nvmlDeviceGetCount() == 1
    nvml.use("two")


def test_threads_survive_a_changing_scenario(nvml: Here) -> None:
    """Calls from several threads see the old or the new machine, never a mixture."""
    names, stop = set[str](), threading.Event()
    texts = [f"gpu\n  name {letter * 60}" for letter in "AB"]
    nvml.write(texts[0])
    handle = gpu(0)

    def read_names() -> None:
        while not stop.is_set():
            names.add(name(handle))

    threads = [threading.Thread(target=read_names) for _ in range(4)]
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


def test_calls_leak_no_memory(machine: Machine) -> None:
    """Ten thousand calls do not increase the memory of the process."""
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
    assert int(run_python(code, **environ)) < 1024


def test_mistake_ends_the_process(machine: Machine, forker: Forker) -> None:
    """A mistake in the scenario ends the process with its line and the reason."""
    call = "ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2()"
    for text, message in (
        ("gpu\n  colour red", "2: unknown word 'colour'"),
        ("  name Nothing", "1: 'name' before any gpu"),
        ("# fine\n\ngpu\n  memory lots", "4: 'lots' is not a number from 0 to 2147483647"),
        ("gpu\n  gi 7", "2: 'gi' belongs to an instance"),
        ("gpu\n  compute 12", "2: the memory in MiB is missing"),
        ("gpu\n  bus 3", "2: '3' is not like 0000:03:00.0"),
        ("gpu\n" * 65, "65: more than 64 GPUs"),
        ("gpu\n" + "  mps 1 1\n" * 2049, "2050: more than 2048 processes"),
    ):
        machine.write(text)
        _, error, stderr, status = forker.run(call, machine.environ())
        assert (error, status) == ("no answer", -signal.SIGABRT)
        assert stderr == f"stand-in driver: {machine.scenario}:{message}\n"


# ---- NVML ----------------------------------------------------------------------------------


def test_initializations_are_counted(here: Here) -> None:
    """Each initialization needs its own shutdown; without one, calls fail."""
    library = driver.load()
    pynvml.nvmlInit()
    pynvml.nvmlInit()
    assert [library.nvmlShutdown() for _ in range(3)] == [0, 0, 1]
    assert error_code(pynvml.nvmlDeviceGetCount) == 1


def test_bad_arguments(nvml: Here) -> None:
    """A null pointer, an invalid handle and an index out of range are invalid arguments."""
    library, room = driver.load(), byref(c_uint())
    assert {
        library.nvmlDeviceGetCount_v2(None),
        library.nvmlDeviceGetName(gpu(0), None, 96),
        library.nvmlDeviceGetName(None, room, 96),
        library.nvmlDeviceGetName(c_void_p(4711), room, 96),
        library.nvmlDeviceGetMemoryInfo(gpu(0), None),
        library.nvmlDeviceGetPciInfo_v3(gpu(0), None),
        library.nvmlDeviceGetComputeRunningProcesses_v3(gpu(0), None, None),
        library.nvmlDeviceGetHandleByUUID(None, byref(c_void_p())),
        library.nvmlDeviceGetHandleByIndex_v2(0, None),
        library.nvmlDeviceGetHandleByIndex_v2(2, byref(c_void_p())),
    } == {2}


def test_structs_have_the_size_of_the_bindings(nvml: Here) -> None:
    """A call writes exactly as many bytes as the bindings' struct has."""
    for function, struct in (
        ("nvmlDeviceGetMemoryInfo", "c_nvmlMemory_t"),
        ("nvmlDeviceGetMemoryInfo_v2", "c_nvmlMemory_v2_t"),
        ("nvmlDeviceGetPciInfo_v2", "nvmlPciInfo_v2_t"),
        ("nvmlDeviceGetPciInfo_v3", "nvmlPciInfo_t"),
        ("nvmlDeviceGetUtilizationRates", "c_nvmlUtilization_t"),
        ("nvmlDeviceGetBAR1MemoryInfo", "c_nvmlBAR1Memory_t"),
    ):
        room = bytearray(b"\xaa" * 4096)
        raw = (c_char * 4096).from_buffer(room)
        room[:4] = pynvml.nvmlMemory_v2.to_bytes(4, "little")
        assert getattr(driver.load(), function)(gpu(0), raw) == 0
        assert len(bytes(room).rstrip(b"\xaa")) == ctypes.sizeof(getattr(pynvml, struct))


@pytest.mark.parametrize(
    ("version", "suffix", "size"),
    [
        ("550.54.15", "", 16),
        ("550.54.15", "_v2", 24),
        ("550.54.15", "_v3", 24),
        ("535.42.01", "_v3", 24),
        ("535.43.02", "_v3", 32),
        ("535.98", "_v2", 24),
        ("535.97", "_v3", 32),
        ("535.98", "_v3", 24),
    ],
)
def test_process_structs(nvml: Here, version: str, suffix: str, size: int) -> None:
    """A process fills 16 bytes in version 1, else 24, and 32 in drivers 535.43 to 535.98."""
    for kind, word in (("Compute", "compute"), ("Graphics", "graphics"), ("MPSCompute", "mps")):
        nvml.write(f"driver {version}\ngpu\n  {word} 11 1\n  {word} 22 2")
        room, count = (c_uint64 * 64)(*[0xAAAA] * 64), c_uint(9)
        function = getattr(driver.load(), f"nvmlDeviceGet{kind}RunningProcesses{suffix}")
        assert function(gpu(0), byref(count), room) == 0
        assert count.value == 2
        at = size // 8
        assert [room[i] % 2**32 for i in (0, at)] == [11, 22]
        assert [room[i] >> 20 for i in (1, at + 1)] == [1, 2]
        assert room[2 * at] == 0xAAAA


def test_memory(nvml: Here) -> None:
    """The reserve is used memory in version 1 and separate in version 2."""
    nvml.write(
        "gpu\n memory 4000\n reserved 300\n used 10\n compute 1 500\n graphics 2 20\n compute 3 -"
    )
    read = pynvml.nvmlDeviceGetMemoryInfo
    assert mib(read(gpu(0)), "total", "used", "free") == [4000, 830, 3170]
    v2 = read(gpu(0), pynvml.nvmlMemory_v2)
    assert mib(v2, "total", "reserved", "used", "free") == [4000, 300, 530, 3170]
    unknown = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu(0))[1]
    assert (unknown.pid, unknown.usedGpuMemory) == (3, None)
    assert error_code(read, gpu(0), 0x01000028) == 25
    nvml.write("gpu\n memory none")
    assert [error_code(read, gpu(0), *more) for more in ((), (pynvml.nvmlMemory_v2,))] == [3, 3]


def test_managed_memory_is_in_no_process_size(nvml: Here) -> None:
    """Managed memory is in use, but the driver lists neither its size nor its process."""
    nvml.write("gpu\n compute 11 300\n managed 11 2000\n graphics 11 300\n managed 22 500")
    assert used_mib(0) == 2800
    assert compute_memory(gpu(0)) == [(11, 300)]


def test_query_without_room_counts_the_processes(nvml: Here) -> None:
    """A query without room for processes returns their number, and an error if there are any."""
    nvml.write("gpu\n compute 1 1\n compute 2 1\ngpu")

    def query(index: int, room: int) -> tuple[int, int]:
        count = c_uint(room)
        function = driver.load().nvmlDeviceGetComputeRunningProcesses_v3
        return function(gpu(index), byref(count), None), count.value

    assert [query(0, 0), query(0, 1), query(1, 0)] == [(7, 2), (7, 2), (0, 0)]


def test_large_machine(nvml: Here) -> None:
    """Each of 64 GPUs and its instance list their own processes, a thousand in all."""
    counts = [20] * 50 + [0] * 14
    parts = ["gpu" + "\n  compute 7 1" * count for count in counts]
    part = "\n  mig on\n  graphics 9 1\n  instance 3" + "\n    compute 8 1" * 5
    nvml.write("\n".join(parts) + part)
    assert [len(compute_pids(gpu(index))) for index in range(63)] == counts[:63]
    assert compute_pids(instance(63, 3)) == [8] * 5
    assert used_mib(63) == 6


def test_process_until_dead(nvml: Here) -> None:
    """A process marked `until-dead` is listed until it ends, even as a zombie."""
    guest = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    nvml.write(f"gpu\n compute {guest.pid} 500 until-dead")
    assert (compute_pids(gpu(0)), used_mib(0)) == ([guest.pid], 500)
    guest.kill()
    os.waitid(os.P_PID, guest.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert (compute_pids(gpu(0)), used_mib(0)) == ([], 0)
    guest.communicate()
    assert compute_pids(gpu(0)) == []


def test_mig_instances(nvml: Here) -> None:
    """An instance is at its slot, and has its own values and the index of its GPU."""
    nvml.use("mig")
    assert [pynvml.nvmlDeviceGetMigMode(gpu(i))[0] for i in range(3)] == [0, 1, 1]
    assert [pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu(i)) for i in range(3)] == [0, 7, 7]
    assert (error_code(instance, 1, 1), error_code(instance, 1, 7)) == (6, 2)
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


def test_gpu_with_mig_lists_no_processes(nvml: Here) -> None:
    """A GPU with MIG instances lists no processes and reports no utilization."""
    nvml.write("gpu\n mig on\n instance 0\n compute 5 100\n gi 3")
    assert error_code(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu(0)) == 4
    assert error_code(pynvml.nvmlDeviceGetUtilizationRates, gpu(0)) == 3
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(instance(0, 0))
    assert (process.pid, process.gpuInstanceId, process.computeInstanceId) == (5, 3, 0)
    assert used_mib(0) == 100


def test_confidential_computing(nvml: Here) -> None:
    """The mode and the ready state are reported; without the feature, both are unsupported."""

    def settings() -> tuple[int, int]:
        read = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
        assert pynvml.nvmlSystemGetConfComputeSettings(byref(read)) == 0
        return read.ccFeature, read.multiGpuMode

    state = pynvml.nvmlSystemGetConfComputeState
    ready = pynvml.nvmlSystemGetConfComputeGpusReadyState
    assert (error_code(state), error_code(ready)) == (3, 3)
    assert driver.load().nvmlSystemGetConfComputeSettings(None) == 3
    nvml.write("conf-compute on\ngpu\n memory 4000")
    assert (state().ccFeature, settings(), ready()) == (1, (1, 0), 0)
    memory = pynvml.nvmlDeviceGetConfComputeMemSizeInfo
    assert memory(gpu(0)).protectedMemSizeKib == 4000 << 10
    nvml.write("conf-compute protected-pcie\nconf-compute-ready 1\ngpu")
    assert (state().ccFeature, settings(), ready()) == (0, (0, 1), 1)
    assert memory(gpu(0)).protectedMemSizeKib == 0
    assert driver.load().nvmlSystemGetConfComputeSettings((c_uint * 5)(7)) == 25


def test_cuda_waits_for_the_ready_state(machine: Machine, forker: Forker) -> None:
    """In a confidential mode, `cuInit` fails until the GPUs are ready."""
    for mode, answer in (("on", 802), ("protected-pcie", 802), ("off", 0), ("none", 0)):
        for ready in (0, 1):
            machine.write(f"conf-compute {mode}\nconf-compute-ready {ready}\ngpu")
            expected = 0 if ready else answer
            assert ask_cuda(forker, machine, "cuda.cuInit(0)") == expected, mode


def test_topology(nvml: Here) -> None:
    """Links are symmetric; GPUs without a link are in the same node, or only the same system."""

    def level(one: int, other: int) -> Any:
        return pynvml.nvmlDeviceGetTopologyCommonAncestor(gpu(one), gpu(other))

    nvml.use("eight")
    assert [level(0, other) for other in (0, 1, 3, 4)] == [0, 40, 40, 50]
    pairs = ((0, 1), (1, 0), (1, 2))
    assert [pynvml.nvmlDeviceGetP2PStatus(gpu(a), gpu(b), 2) for a, b in pairs] == [0, 0, 5]
    assert [pynvml.nvmlDeviceGetNvLinkState(gpu(0), link) for link in (0, 1)] == [1, 0]
    assert pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), 0).bus == 2
    nvml.write("gpu\n link 1 switch\n link 2 host\ngpu\ngpu\n link 1 switches")
    assert (level(1, 0), level(2, 0), level(1, 2)) == (10, 30, 20)
    assert error_code(pynvml.nvmlDeviceGetNvLinkState, gpu(0), 0) == 3


# ---- failures and delays -------------------------------------------------------------------


def test_failures(nvml: Here) -> None:
    """A rule fails one function for one GPU, one instance or all devices."""
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
    assert error_code(name, gpu(0)) == 999
    assert name(gpu(1)) == "NVIDIA Stand-in"
    assert pynvml.nvmlDeviceGetUUID(gpu(1)).startswith("GPU-")
    assert error_code(pynvml.nvmlDeviceGetUUID, instance(1, 1)) == 4
    assert error_code(pynvml.nvmlDeviceGetMinorNumber, gpu(1)) == 3
    assert error_code(instance, 1, 0) == 15
    assert error_code(pynvml.nvmlInit) == 18


def test_delay_survives_signals(machine: Machine, forker: Forker) -> None:
    """Signals do not shorten a delayed call."""
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


def test_delay_blocks_one_thread(nvml: Here) -> None:
    """A delay blocks only its own thread, until the scenario file is deleted."""
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
    """`delay-first` delays only the first call of a process for each device."""
    rule = "delay-first nvmlDeviceGetHandleByIndex_v2"
    nvml.write(f"gpu\ngpu\n{rule} * 0.1")
    start = time.monotonic()
    gpu(0)
    gpu(1)
    assert time.monotonic() - start >= 0.2
    nvml.write(f"gpu\ngpu\n{rule} * 3600")
    assert gpu(0)


def test_missing_function(machine: Machine) -> None:
    """A missing function is absent from the library, unlike its other versions."""
    machine.write("gpu\nmissing nvmlDeviceGetComputeRunningProcesses_v3")
    with machine.child() as child:
        child.run("import pynvml; pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByIndex(0)")
        missing = child.run("pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu)")
        assert missing.error == "NVMLError_FunctionNotFound"
        assert child.run("pynvml.nvmlDeviceGetComputeRunningProcesses_v2(gpu)").value == []


def test_unknown_function(machine: Machine) -> None:
    """A rule for a function that the stand-in driver lacks is an error."""
    machine.write("gpu\nfail nvmlDeviceGetNames * 1")
    with pytest.raises(ValueError, match="has no function nvmlDeviceGetNames"):
        driver.environment(machine.scenario)


def test_log(machine: Machine, forker: Forker) -> None:
    """The log has the process, the function and the device of each call."""
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


def test_cuda_calls_before_init(machine: Machine, forker: Forker) -> None:
    """Before cuInit, only the query for the version succeeds."""
    machine.write("cuda 12080\ngpu")
    before, version, started, after = ask_cuda(forker, machine, BEFORE_INIT)
    assert (before, after) == ([3] * 4, [0] * 4)
    assert (version, started) == (12080, 0)


def test_failed_init_can_be_tried_again(machine: Machine, forker: Forker) -> None:
    """A failed cuInit can be repeated with other variables; a successful one is final."""
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
    """Every CUDA call fails in a forked child of a process that has started CUDA."""
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
        ("two", "1,0", [2, 1]),
        ("two", " 1", [2]),
        ("two", "1gpu2", [2]),
        ("two", "-1", []),
        ("two", "1,-1,0", [2]),
        ("two", "1,,0", [2]),
        ("two", "0,7,1", [1]),
        ("two", "NoDevFiles", []),
        ("two", "0,1,0", []),
        ("two", "0,GPU-aa11", []),
        ("two", "GPU-aa22", [2]),
        ("two", "GPU-aa2,0", [2, 1]),
        ("two", "1,GPU-aa,0", [2]),
        ("two", "99999999999999999999", []),
        ("prohibited", None, [1]),
        ("prohibited", "1", []),
        ("mig", None, ["cc11"]),
        ("mig", "0", [1]),
        ("mig", "1", ["cc11"]),
        ("mig", "2", []),
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
    """CUDA_VISIBLE_DEVICES selects devices as CUDA's documentation describes."""
    machine.write(MACHINES[kind])
    extra = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert ask_cuda(forker, machine, VISIBLE, **extra) == (expected or 100)


def test_device_order(machine: Machine, forker: Forker) -> None:
    """CUDA numbers the fastest GPU first, or by the bus."""
    machine.use("mixed")
    assert ask_cuda(forker, machine, VISIBLE) == [4, 2, 1, 3]
    for order, expected in (("FASTEST_FIRST", [4, 2, 1, 3]), ("PCI_BUS_ID", [1, 2, 3, 4])):
        assert ask_cuda(forker, machine, VISIBLE, CUDA_DEVICE_ORDER=order) == expected


def test_memory_round_trip(machine: Machine, forker: Forker) -> None:
    """Data survive a copy to the device and back; too much memory is refused."""
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


def start_cuda(child: Child) -> None:
    assert not child.run(f"import ctypes; cuda = ctypes.CDLL('libcuda.so.1')\n{CUDA}").error
    assert child.run("cuda.cuInit(0)").value == 0


def test_nvml_lists_cuda_contexts(nvml: Here) -> None:
    """NVML lists a process with a CUDA context and its memory until the process dies."""
    (nvml.folder / "contexts").mkdir()
    nvml.write("contexts contexts\ngpu\ngpu")
    with nvml.child(CUDA_VISIBLE_DEVICES="1") as child:
        start_cuda(child)
        assert compute_memory(gpu(1)) == []
        child.run("context = c_void_p(); cuda.cuCtxCreate_v2(byref(context), 0, 0)")
        assert compute_memory(gpu(1)) == [(child.pid, 300)]
        child.run("there = c_uint64(ask('cuMemAlloc_v2', c_size_t(64 << 20), type=c_uint64))")
        assert compute_memory(gpu(1)) == [(child.pid, 364)]
        assert compute_memory(gpu(0)) == []
        assert used_mib(1) == 364
    assert compute_memory(gpu(1)) == []


def open_context(child: Child) -> int | None:
    """Start CUDA with a context on its first device; return the code of the call."""
    start_cuda(child)
    code: int | None = child.run("cuda.cuCtxCreate_v2(byref(c_void_p()), 0, 0)").value
    return code


def test_managed_cuda_memory(nvml: Here) -> None:
    """Managed memory counts in the GPU's memory use, but not in the size of its process."""
    nvml.write(f"contexts {nvml.folder}\ncontext 518\ngpu")
    with nvml.child() as child:
        assert open_context(child) == 0
        size = "c_size_t(1024 << 20)"
        child.run(f"managed = c_uint64(ask('cuMemAllocManaged', {size}, 1, type=c_uint64))")
        assert child.run(f"cuda.cuMemsetD8_v2(managed, 7, {size})").value == 0
        assert compute_memory(gpu(0)) == [(child.pid, 518)]
        assert used_mib(0) == 518 + 1024
        assert child.run("left()").value == [8192 - 518 - 1024, 8192]
    assert used_mib(0) == 0


@pytest.mark.parametrize(("way", "listed"), [("gradually", "listed"), ("at-once", "unlisted")])
def test_delayed_release_of_memory(nvml: Here, way: str, listed: str) -> None:
    """With `freeing`, the memory of a killed process is freed gradually or at once."""
    (nvml.folder / "contexts").mkdir()
    scenario = "contexts contexts\nfreeing {} {} {}\ngpu\ngpu"
    nvml.write(scenario.format(60, way, listed))
    with nvml.child() as child:
        assert open_context(child) == 0
        assert used_mib(0) == 300
    assert compute_pids(gpu(0)) == ([child.pid] if listed == "listed" else [])
    if way == "gradually":
        wait_for(lambda: 0 < used_mib(0) < 300)
    else:
        assert used_mib(0) == 300
    assert used_mib(1) == 0
    nvml.write(scenario.format(0, way, listed))
    assert (compute_pids(gpu(0)), used_mib(0)) == ([], 0)


def test_memory_is_shared_by_all_processes(nvml: Here) -> None:
    """Processes share the memory, and NVML and cuMemGetInfo report the same."""
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
        assert sorted(compute_memory(gpu(0))) == sorted(
            [(4321000, 20), (one.pid, 300), (two.pid, 401)]
        )


def test_memory_of_instances(nvml: Here) -> None:
    """A MIG instance has its own memory, which NVML counts as used memory of the GPU."""
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
        assert used_mib(0) == 1800


def test_simultaneous_allocations(nvml: Here) -> None:
    """Simultaneous allocations never exceed the memory."""
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
    """The builder knows exactly the names that the libraries export."""
    if not shutil.which("nm"):
        pytest.skip("no nm here to read the libraries with")
    names = set[str]()
    for soname in driver.LIBRARIES:
        listing = subprocess.check_output(
            ["nm", "-D", "--defined-only", str(driver.build() / soname)], text=True
        )
        names |= {line.split()[-1] for line in listing.splitlines()}
    assert names == driver.exports()


def run_python(code: str, *arguments: str, **environ: str) -> str:
    """Return the output of the code, run in a new Python process."""
    command = [sys.executable, "-c", dedent(code), *arguments]
    return subprocess.check_output(command, cwd=ROOT, env=environ, text=True)


def test_loaded_library_is_found_by_name() -> None:
    """A library that is loaded by its path is also found by its name."""
    code = """
        import ctypes, os, sys
        for path in sys.argv[1:]:
            loaded = ctypes.CDLL(path)
            print(ctypes.CDLL(os.path.basename(path), os.RTLD_NOLOAD)._handle == loaded._handle)
    """
    paths = [str(driver.build() / soname) for soname in driver.LIBRARIES]
    assert run_python(code, *paths) == "True\nTrue\n"


def test_simultaneous_builds(tmp_path: Path) -> None:
    """Simultaneous builds produce one complete folder and no other file."""
    code = """
        import sys
        from pathlib import Path
        from tests.driver import build
        print(build(Path(sys.argv[1])))
    """
    with ThreadPoolExecutor() as pool:
        builds = [
            pool.submit(run_python, code, str(tmp_path), PATH=os.environ["PATH"]) for _ in range(4)
        ]
    [built] = tmp_path.iterdir()
    assert {build.result() for build in builds} == {f"{built}\n"}
    assert {path.name for path in built.glob("*.so.1")} == set(driver.LIBRARIES)


@pytest.mark.needs("compiler")
def test_build_with_ziglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cc, the compiler of the ziglang package builds the libraries."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = driver.build(tmp_path / "cache", missing=["nvmlDeviceGetName"])
    code = """
        import ctypes
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        print(nvml.nvmlInit_v2(), hasattr(nvml, "nvmlDeviceGetName"))
    """
    assert run_python(code, LD_LIBRARY_PATH=str(built)) == "9 False\n"


def run_driver(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.driver", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_line() -> None:
    """A command runs on the machine of a scenario and keeps its exit status."""
    result = run_driver("two", "--", "sh", "-c", "echo $STAND_IN_SCENARIO; exit 7")
    assert (result.returncode, result.stderr) == (7, "")
    assert result.stdout == f"{driver.SCENARIOS / 'two.txt'}\n"


def test_command_line_lists_scenarios() -> None:
    """Without arguments, the program lists the scenarios and their first comments."""
    listing = run_driver().stdout
    assert listing == run_driver("--list").stdout
    assert [line.split()[0] for line in listing.splitlines()] == SCENARIOS
    assert "Two GTX 1050 Ti, both idle." in listing


def test_command_line_mistakes() -> None:
    """A mistake produces one line of text and exit status 2."""
    for arguments, message in (
        (["two"], "usage: "),
        (["twelve", "--", "true"], "no scenario 'twelve'"),
        (["two", "--", "no-such-command"], "no-such-command: No such file"),
    ):
        result = run_driver(*arguments)
        assert result.returncode == 2
        assert result.stderr.startswith(message)
        assert result.stderr.count("\n") == 1


def test_scenarios_are_valid(here: Here) -> None:
    """Every scenario in the folder can be read."""
    pynvml.nvmlInit()
    for scenario in SCENARIOS:
        here.use(scenario)
        assert pynvml.nvmlDeviceGetCount() > 0, scenario
    pynvml.nvmlShutdown()


def other_tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.mark.needs("benchmarks")
def test_gpustat_sees_the_machine() -> None:
    """Gpustat shows the processes, and a lost GPU."""
    tool = other_tool("gpustat")
    busy = run_driver("busy", "--", tool, "--no-color")
    assert (busy.returncode, busy.stderr) == (0, "")
    assert "3500 /  4038 MB" in busy.stdout
    lost = run_driver("lost", "--", tool, "--no-color")
    assert "GPU is lost" in lost.stdout


@pytest.mark.needs("benchmarks")
def test_nvitop_sees_the_machine() -> None:
    """Nvitop shows GPUs, instances and processes without an error."""
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
