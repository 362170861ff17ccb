"""Tests of the stand-in driver, through the official bindings and ctypes."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import threading
import time
from ctypes import byref, c_char, c_uint, c_uint64
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pynvml
import pytest

from tests import driver
from tests.support.forker import Forker
from tests.support.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

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


def compute_memory(handle: Any) -> list[tuple[int, int]]:
    """Return the pid and the memory in MiB of each compute process."""
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return [(process.pid, process.usedGpuMemory >> 20) for process in processes]


# ---- the machine ---------------------------------------------------------------------------


def test_without_a_scenario(forker: Forker) -> None:
    """Without a scenario, NVML reports that no driver is loaded, and CUDA finds no device."""
    codes = forker.ask("[ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2(), cuda.cuInit(0)]", {})
    assert codes == [9, 100]


def test_mistake_ends_the_process(machine: Machine, forker: Forker) -> None:
    """A mistake in the scenario ends the process with its line and the reason."""
    call = "ctypes.CDLL('libnvidia-ml.so.1').nvmlInit_v2()"
    for text, message in (
        ("gpu\n  colour red", "2: unknown word 'colour'"),
        ("# fine\n\ngpu\n  memory lots", "4: 'lots' is not a number from 0 to 2147483647"),
        ("gpu\n  compute 12", "2: the memory in MiB is missing"),
        ("gpu\n" + "  mps 1 1\n" * 2049, "2050: more than 2048 processes"),
    ):
        machine.write(text)
        _, error, stderr, status = forker.run(call, machine.environ())
        assert (error, status) == ("no answer", -signal.SIGABRT)
        assert stderr == f"stand-in driver: {machine.scenario}:{message}\n"


# ---- NVML ----------------------------------------------------------------------------------


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
        ("550.54.15", "_v3", 24),
        ("535.42.01", "_v3", 24),
        ("535.43.02", "_v3", 32),
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


def test_gpu_with_mig_lists_no_processes(nvml: Here) -> None:
    """A GPU with MIG instances lists no processes and reports no utilization."""
    nvml.write("gpu\n mig on\n instance 0\n compute 5 100\n gi 3")
    assert error_code(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu(0)) == 4
    assert error_code(pynvml.nvmlDeviceGetUtilizationRates, gpu(0)) == 3
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(instance(0, 0))
    assert (process.pid, process.gpuInstanceId, process.computeInstanceId) == (5, 3, 0)
    assert used_mib(0) == 100


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


def test_unknown_function(machine: Machine) -> None:
    """A rule for a function that the stand-in driver lacks is an error."""
    machine.write("gpu\nfail nvmlDeviceGetNames * 1")
    with pytest.raises(ValueError, match="has no function nvmlDeviceGetNames"):
        driver.environment(machine.scenario)


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


def ask_cuda(forker: Forker, machine: Machine, code: str, **extra: str) -> Any:
    """Return the value of the last line of code, in a process in which CUDA has not started."""
    return forker.ask(f"{CUDA}\n{dedent(code)}", machine.environ(**extra))


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
        ("two", "-1", []),
        ("two", "0,7,1", [1]),
        ("two", "0,1,0", []),
        ("two", "GPU-aa2,0", [2, 1]),
        ("two", "1,GPU-aa,0", [2]),
        ("prohibited", None, [1]),
        ("mig", None, ["cc11"]),
        ("mig", "MIG-cc3", ["cc33"]),
        ("mig", "0,MIG-cc33", ["cc33"]),
        ("mig", "MIG-cc33,MIG-cc11", ["cc33"]),
        ("new mig", "MIG-cc33,MIG-cc11", ["cc33", "cc11"]),
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


def start_cuda(child: Child) -> None:
    assert not child.run(f"import ctypes; cuda = ctypes.CDLL('libcuda.so.1')\n{CUDA}").error
    assert child.run("cuda.cuInit(0)").value == 0


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


# ---- building and running ------------------------------------------------------------------


def run_python(code: str, *arguments: str, **environ: str) -> str:
    """Return the output of the code, run in a new Python process."""
    command = [sys.executable, "-c", dedent(code), *arguments]
    return subprocess.check_output(command, cwd=ROOT, env=environ, text=True)


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


def test_scenarios_are_valid(here: Here) -> None:
    """Every scenario in the folder can be read."""
    pynvml.nvmlInit()
    for scenario in SCENARIOS:
        here.use(scenario)
        assert pynvml.nvmlDeviceGetCount() > 0, scenario
    pynvml.nvmlShutdown()
