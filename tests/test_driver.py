"""What the stand-in driver does: real child processes, the official bindings, plain ctypes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent

# A child that answers one line of Python after the other; an NVML error is answered as its code.
CHILD = """
import ctypes, os, signal, sys, threading, time
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pynvml import *
from pynvml import _nvmlGetFunctionPointer as nvml
cuda = ctypes.CDLL("libcuda.so.1")

def gpu(index):
    return nvmlDeviceGetHandleByIndex(index)

def instance(index, slot):
    return nvmlDeviceGetMigDeviceHandleByIndex(gpu(index), slot)

def ask(function, *arguments, type=c_int):
    answer = type()
    code = getattr(cuda, function)(byref(answer), *arguments)
    return f"code {code}" if code else answer.value

def uuid(ordinal):
    raw = (c_char * 16)()
    cuda.cuDeviceGetUuid_v2(raw, ordinal)
    return bytes(raw).hex()

def bus(ordinal):
    raw = (c_char * 16)()
    cuda.cuDeviceGetPCIBusId(raw, 16, ordinal)
    return int(raw.value[5:7], 16)

for line in sys.stdin:
    try:
        try:
            answer = eval(line)
        except SyntaxError:
            answer = exec(line)
    except NVMLError as error:
        answer = f"error {error.value}"
    print(answer, flush=True)
"""


class Session:
    """A child process on the stand-in's machine."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().rstrip("\n")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Machine:
    """A scenario file that can be rewritten, and the children that live on it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "scenario.txt"
        self.log = folder / "log"
        self.sessions: list[Session] = []

    def be(self, text: str) -> Machine:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(dedent(text))
        fresh.rename(self.path)
        return self

    def child(self, **variables: str) -> Session:
        base = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
        made = driver.environment(self.path, log=self.log, base=base | variables)
        self.sessions.append(Session(made))
        return self.sessions[-1]

    def nvml(self) -> Session:
        child = self.child()
        assert child.ask("nvmlInit()") == "None"
        return child


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for session in made.sessions:
        session.end()


def scenario(name: str) -> str:
    return (driver.SCENARIOS / f"{name}.txt").read_text()


# ---- the machine ---------------------------------------------------------------------------


def test_without_a_scenario_there_is_no_driver(machine: Machine) -> None:
    """Without a scenario NVML answers that no driver is loaded and CUDA that there is no device."""
    child = machine.be("").child()
    child.ask("del os.environ['STAND_IN_SCENARIO']")
    assert child.ask("nvmlInit()") == "error 9"
    assert child.ask("cuda.cuInit(0)") == "100"


def test_scenario_is_read_again(machine: Machine) -> None:
    """A running process sees the machine change."""
    child = machine.be("gpu").nvml()
    assert child.ask("nvmlDeviceGetCount()") == "1"
    machine.be("gpu\ngpu\n  name Second")
    assert child.ask("nvmlDeviceGetCount()") == "2"
    assert child.ask("nvmlDeviceGetName(gpu(1))") == "Second"


def test_gpu_that_goes_away_is_lost(machine: Machine) -> None:
    """The handle of a GPU that is no longer described answers that the GPU is lost."""
    child = machine.be("gpu\ngpu").nvml()
    child.ask("kept = gpu(1)")
    machine.be("gpu")
    assert child.ask("nvmlDeviceGetName(kept)") == "error 15"
    assert child.ask("gpu(1)") == "error 2"


def test_unreadable_scenario_keeps_the_machine(machine: Machine) -> None:
    """A scenario that is gone for a moment leaves the machine as it was."""
    child = machine.be("gpu").nvml()
    machine.path.unlink()
    assert child.ask("nvmlDeviceGetCount()") == "1"


def test_threads_survive_a_changing_scenario(machine: Machine) -> None:
    """Calls from many threads see the old or the new machine, never a mixture."""
    texts = [f"gpu\n  name {letter * 60}" for letter in "AB"]
    child = machine.be(texts[0]).nvml()
    child.ask("names, stop, handle = set(), threading.Event(), gpu(0)")
    child.ask("look = lambda: [names.add(nvmlDeviceGetName(handle)) for _ in iter(stop.is_set, 1)]")
    child.ask("threads = [threading.Thread(target=look) for _ in range(4)]")
    child.ask("[thread.start() for thread in threads]")
    for turn in range(200):
        machine.be(texts[turn % 2])
    child.ask("stop.set()")
    child.ask("[thread.join() for thread in threads]")
    assert child.ask("sorted(names)") == str(["A" * 60, "B" * 60])


def test_calls_do_not_use_up_memory(machine: Machine) -> None:
    """Ten thousand calls and re-reads leave the process as big as it was."""
    child = machine.be("gpu\n  compute 1 1").nvml()
    child.ask("import resource; size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss")
    child.ask("del os.environ['STAND_IN_LOG']")
    child.ask("use = lambda n: [nvmlDeviceGetComputeRunningProcesses(gpu(0)) for _ in range(n)]")
    child.ask("(use(1000), None)[1]")
    child.ask("before = size()")
    child.ask("(len(use(1)), [use(1) for _ in range(10000)] and None)[1]")
    assert int(child.ask("size() - before")) < 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
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
    ],
)
def test_mistake_ends_the_process(machine: Machine, text: str, message: str) -> None:
    """A mistake in the scenario ends the process with the place and the reason."""
    code = "import pynvml; pynvml.nvmlInit()"
    made = driver.environment(machine.be(text).path)
    result = subprocess.run(
        [sys.executable, "-c", code], env=made, capture_output=True, text=True, check=False
    )
    assert result.returncode == -signal.SIGABRT
    assert result.stderr == f"stand-in driver: {machine.path}:{message}\n"


# ---- NVML ----------------------------------------------------------------------------------


def test_initialisations_are_counted(machine: Machine) -> None:
    """Each initialisation wants its own shutdown; before and after nothing else works."""
    child = machine.be("gpu").child()
    child.ask("shutdown = lambda: nvml('nvmlShutdown')()")
    child.ask("nvmlInit(); nvmlInit()")
    assert [child.ask("shutdown()") for _ in range(3)] == ["0", "0", "1"]
    assert child.ask("nvmlDeviceGetCount()") == "error 1"


@pytest.mark.parametrize(
    "call",
    [
        "nvml('nvmlDeviceGetCount_v2')(None)",
        "nvml('nvmlDeviceGetName')(gpu(0), None, 96)",
        "nvml('nvmlDeviceGetName')(None, byref(c_uint()), 96)",
        "nvml('nvmlDeviceGetName')(c_void_p(4711), byref(c_uint()), 96)",
        "nvml('nvmlDeviceGetMemoryInfo')(gpu(0), None)",
        "nvml('nvmlDeviceGetPciInfo_v3')(gpu(0), None)",
        "nvml('nvmlDeviceGetComputeRunningProcesses_v3')(gpu(0), None, None)",
        "nvml('nvmlDeviceGetHandleByUUID')(None, byref(c_void_p()))",
        "nvml('nvmlDeviceGetHandleByIndex_v2')(0, None)",
        "nvml('nvmlDeviceGetHandleByIndex_v2')(1, byref(c_void_p()))",
    ],
)
def test_bad_arguments(machine: Machine, call: str) -> None:
    """A null pointer, a bad handle and an index out of range are invalid arguments."""
    assert machine.be("gpu").nvml().ask(call) == "2"


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
def test_structs_have_the_size_of_the_bindings(
    machine: Machine, function: str, struct: str
) -> None:
    """A call writes as many bytes as the struct of the official bindings has, and no more."""
    child = machine.be("gpu").nvml()
    child.ask(f"size = ctypes.sizeof({struct})")
    child.ask("room = bytearray(b'\\xaa' * 4096); raw = (c_char * 4096).from_buffer(room)")
    child.ask("room[:4] = nvmlMemory_v2.to_bytes(4, 'little')")
    assert child.ask(f"nvml('{function}')(gpu(0), raw)") == "0"
    assert child.ask("len(bytes(room).rstrip(b'\\xaa')) == size") == "True"


@pytest.mark.parametrize("kind", ["Compute", "Graphics", "MPSCompute"])
@pytest.mark.parametrize(("suffix", "size"), [("", 16), ("_v2", 24), ("_v3", 24)])
def test_process_structs(machine: Machine, kind: str, suffix: str, size: int) -> None:
    """Processes come in 16 bytes in the first version and in 24 in the others."""
    word = {"Compute": "compute", "Graphics": "graphics", "MPSCompute": "mps"}[kind]
    child = machine.be(f"gpu\n  {word} 11 1\n  {word} 22 2").nvml()
    child.ask("room = (c_uint64 * 64)(*[0xaaaa] * 64); count = c_uint(9)")
    call = f"nvml('nvmlDeviceGet{kind}RunningProcesses{suffix}')(gpu(0), byref(count), room)"
    assert child.ask(call) == "0"
    assert child.ask("count.value") == "2"
    at = size // 8
    assert child.ask(f"[room[i] % 2**32 for i in (0, {at})]") == "[11, 22]"
    assert child.ask(f"[room[i] >> 20 for i in (1, {at + 1})]") == "[1, 2]"
    assert child.ask(f"room[{2 * at}]") == str(0xAAAA)


def test_memory(machine: Machine) -> None:
    """Version 1 counts the reserve as used, version 2 apart; listed processes count in both."""
    child = machine.be(
        "gpu\n memory 4000\n reserved 300\n used 10\n compute 1 500\n graphics 2 20\n compute 3 -"
    ).nvml()
    child.ask("mib = lambda m, *names: [getattr(m, name) >> 20 for name in names]")
    v1 = "mib(nvmlDeviceGetMemoryInfo(gpu(0)), 'total', 'used', 'free')"
    v2 = "mib(nvmlDeviceGetMemoryInfo(gpu(0), nvmlMemory_v2), 'total', 'reserved', 'used', 'free')"
    assert child.ask(v1) == "[4000, 830, 3170]"
    assert child.ask(v2) == "[4000, 300, 530, 3170]"
    assert child.ask("nvmlDeviceGetMemoryInfo(gpu(0), 0x01000028)") == "error 25"
    machine.be("gpu\n memory none")
    assert (child.ask(v1), child.ask(v2)) == ("error 3", "error 3")


def test_count_only_query(machine: Machine) -> None:
    """A process query without room answers how many there are, or success where there is none."""
    child = machine.be("gpu\n compute 1 1\n compute 2 1\ngpu").nvml()
    child.ask(
        "def ask(i, n): c = c_uint(n); return nvml('nvmlDeviceGetComputeRunningProcesses_v3')("
        "gpu(i), byref(c), None), c.value"
    )
    assert child.ask("ask(0, 0)") == "(7, 2)"
    assert child.ask("ask(0, 1)") == "(7, 2)"
    assert child.ask("ask(1, 0)") == "(0, 0)"


def test_big_machine(machine: Machine) -> None:
    """Each of 64 GPUs lists its own processes, a thousand in all, and an instance its own."""
    counts = [20] * 50 + [0] * 14
    parts = ["gpu" + "\n  compute 7 1" * count for count in counts]
    instance = "\n  mig on\n  graphics 9 1\n  instance 3" + "\n    compute 8 1" * 5
    child = machine.be("\n".join(parts) + instance).nvml()
    look = "[len(nvmlDeviceGetComputeRunningProcesses(gpu(i))) for i in range(63)]"
    assert child.ask(look) == str(counts[:63])
    look = "[p.pid for p in nvmlDeviceGetComputeRunningProcesses(instance(63, 3))]"
    assert child.ask(look) == str([8] * 5)
    assert child.ask("nvmlDeviceGetMemoryInfo(gpu(63)).used >> 20") == "6"


def test_memory_of_a_process_may_be_unknown(machine: Machine) -> None:
    """A process's memory given as `-` is not available."""
    child = machine.be("gpu\n compute 12 -").nvml()
    look = "[(p.pid, p.usedGpuMemory) for p in nvmlDeviceGetComputeRunningProcesses(gpu(0))]"
    assert child.ask(look) == "[(12, None)]"


def test_process_until_dead(machine: Machine) -> None:
    """A process marked `until-dead` is listed, and its memory counted, while it lives."""
    guest = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    child = machine.be(f"gpu\n compute {guest.pid} 500 until-dead").nvml()
    look = (
        "(len(nvmlDeviceGetComputeRunningProcesses(gpu(0))), "
        "nvmlDeviceGetMemoryInfo(gpu(0)).used >> 20)"
    )
    assert child.ask(look) == "(1, 500)"
    guest.kill()
    os.waitid(os.P_PID, guest.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet buried
    assert child.ask(look) == "(0, 0)"
    guest.communicate()
    assert child.ask(look) == "(0, 0)"


def test_finding_a_gpu(machine: Machine) -> None:
    """A GPU is found by its UUID and by its bus id in either form."""
    child = machine.be("gpu\ngpu\n bus 0001:3b:00.0\n uuid GPU-abc").nvml()
    child.ask("index = nvmlDeviceGetIndex")
    assert child.ask("index(nvmlDeviceGetHandleByUUID('GPU-abc'))") == "1"
    assert child.ask("index(nvmlDeviceGetHandleByPciBusId('00000001:3B:00.0'))") == "1"
    assert child.ask("index(nvmlDeviceGetHandleByPciBusId('0001:3b:00'))") == "1"
    assert child.ask("nvmlDeviceGetHandleByUUID('GPU-ab')") == "error 6"
    assert child.ask("nvmlDeviceGetHandleByPciBusId('0000:3b:00.0')") == "error 6"
    assert child.ask("nvmlDeviceGetPciInfo(gpu(1)).busIdLegacy") == "0001:3B:00.0"
    assert child.ask("nvmlDeviceGetPciInfo(gpu(1)).busId") == "00000001:3B:00.0"


def test_count_may_lie(machine: Machine) -> None:
    """GPUs counted beyond those described may not be opened, those beyond the count not named."""
    child = machine.be("count 3\ngpu").nvml()
    assert child.ask("nvmlDeviceGetCount()") == "3"
    assert child.ask("gpu(2)") == "error 4"
    machine.be("count 1\ngpu\ngpu")
    assert child.ask("gpu(1)") == "error 2"


def test_mig(machine: Machine) -> None:
    """Instances lie at their slots, answer for themselves, and have their GPU's index."""
    child = machine.be(scenario("mig")).nvml()
    assert child.ask("[nvmlDeviceGetMigMode(gpu(i))[0] for i in range(3)]") == "[0, 1, 1]"
    assert child.ask("[nvmlDeviceGetMaxMigDeviceCount(gpu(i)) for i in range(3)]") == "[0, 7, 7]"
    assert child.ask("instance(1, 1)") == "error 6"
    assert child.ask("instance(1, 7)") == "error 2"
    assert child.ask("nvmlDeviceGetName(instance(1, 2))") == "NVIDIA A100-SXM4-40GB MIG 2g.10gb"
    assert child.ask("nvmlDeviceGetMemoryInfo(instance(1, 2)).total >> 20") == "9856"
    assert child.ask("nvmlDeviceGetIndex(instance(1, 5))") == "1"
    assert child.ask("nvmlDeviceGetGpuInstanceId(instance(1, 5))") == "1"
    assert child.ask("nvmlDeviceIsMigDeviceHandle(instance(1, 5)).value") == "1"
    child.ask("parent = nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance(1, 5))")
    assert child.ask("nvmlDeviceGetUUID(parent) == nvmlDeviceGetUUID(gpu(1))") == "True"
    child.ask("uuid = nvmlDeviceGetUUID(instance(1, 5))")
    assert child.ask("uuid[:4], nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID(uuid)) == uuid") == (
        "('MIG-', True)"
    )


def test_mig_parent_says_little(machine: Machine) -> None:
    """A split GPU answers for processes no permission, for utilisation not supported."""
    child = machine.be("gpu\n mig on\n instance 0\n compute 5 100\n gi 3\ngpu\n mig none").nvml()
    assert child.ask("nvmlDeviceGetComputeRunningProcesses(gpu(0))") == "error 4"
    assert child.ask("nvmlDeviceGetUtilizationRates(gpu(0))") == "error 3"
    child.ask("[p] = nvmlDeviceGetComputeRunningProcesses(instance(0, 0))")
    assert child.ask("p.pid, p.gpuInstanceId, p.computeInstanceId") == "(5, 3, 0)"
    assert child.ask("nvmlDeviceGetMemoryInfo(gpu(0)).used >> 20") == "100"
    assert child.ask("nvmlDeviceGetMigMode(gpu(1))") == "error 3"


def test_topology(machine: Machine) -> None:
    """Links are symmetric; where none is given, the socket tells node from system."""
    child = machine.be(scenario("eight")).nvml()
    child.ask("level = lambda a, b: nvmlDeviceGetTopologyCommonAncestor(gpu(a), gpu(b))")
    child.ask("linked = lambda a, b: nvmlDeviceGetP2PStatus(gpu(a), gpu(b), 2)")
    assert child.ask("[level(0, i) for i in (0, 1, 3, 4)]") == "[0, 40, 40, 50]"
    assert child.ask("[linked(*pair) for pair in ((0, 1), (1, 0), (1, 2))]") == "[0, 0, 5]"
    assert child.ask("[nvmlDeviceGetNvLinkState(gpu(0), link) for link in (0, 1)]") == "[1, 0]"
    assert child.ask("nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), 0).bus") == "2"
    machine.be("gpu\n link 1 switch\n link 2 host\ngpu\ngpu\n link 1 switches")
    assert child.ask("level(1, 0), level(2, 0), level(1, 2)") == "(10, 30, 20)"
    assert child.ask("nvmlDeviceGetNvLinkState(gpu(0), 0)") == "error 3"


# ---- failures and delays -------------------------------------------------------------------


def test_failures(machine: Machine) -> None:
    """A rule fails one function for one GPU, one instance or everybody."""
    child = machine.be(
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
        """
    ).nvml()
    assert child.ask("nvmlDeviceGetName(gpu(0))") == "error 999"
    assert child.ask("nvmlDeviceGetName(gpu(1))") == "NVIDIA Stand-in"
    assert child.ask("nvmlDeviceGetUUID(gpu(1))")[:4] == "GPU-"
    assert child.ask("nvmlDeviceGetUUID(instance(1, 1))") == "error 4"
    assert child.ask("nvmlDeviceGetMinorNumber(gpu(1))") == "error 3"
    assert child.ask("instance(1, 0)") == "error 15"
    machine.be("gpu\nfail nvmlInitWithFlags * 18")
    assert machine.child().ask("nvmlInit()") == "error 18"


def test_delay_is_not_cut_short(machine: Machine) -> None:
    """A delayed call takes its time, whatever signals arrive."""
    child = machine.be("gpu\ndelay nvmlDeviceGetName * 0.3").nvml()
    child.ask("signal.signal(signal.SIGALRM, lambda *_: None)")
    child.ask("signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)")
    child.ask("handle, start = gpu(0), time.monotonic()")
    child.ask("nvmlDeviceGetName(handle)")
    assert float(child.ask("time.monotonic() - start")) >= 0.3


def test_delay_lets_others_pass(machine: Machine) -> None:
    """While one call waits, another thread's call is answered."""
    child = machine.be("gpu\ndelay nvmlDeviceGetName * 3600").nvml()
    child.ask("handle = gpu(0)")
    child.ask("slow = threading.Thread(target=nvmlDeviceGetName, args=[handle])")
    child.ask("slow.start()")
    child.ask("while 'GetName' not in open(os.environ['STAND_IN_LOG']).read(): time.sleep(0.01)")
    assert child.ask("nvmlDeviceGetIndex(handle)") == "0"
    assert child.ask("slow.is_alive()") == "True"


def test_first_delay_is_once_for_each_device(machine: Machine) -> None:
    """`delay-first` delays a device's first call in a process, and no other."""
    rule = "delay-first nvmlDeviceGetHandleByIndex_v2"
    child = machine.be(f"gpu\ngpu\n{rule} * 0.2").nvml()
    child.ask("start = time.monotonic()")
    child.ask("gpu(0)")
    child.ask("gpu(1)")
    assert float(child.ask("time.monotonic() - start")) >= 0.4
    machine.be(f"gpu\ngpu\n{rule} * 3600")
    assert "c_nvmlDevice" in child.ask("gpu(0)")


def test_missing_function(machine: Machine) -> None:
    """A missing function is not in the library, its other versions are."""
    child = machine.be("gpu\nmissing nvmlDeviceGetComputeRunningProcesses_v3").nvml()
    assert child.ask("nvmlDeviceGetComputeRunningProcesses_v3(gpu(0))") == "error 13"
    assert child.ask("nvmlDeviceGetComputeRunningProcesses_v2(gpu(0))") == "[]"


def test_function_that_does_not_exist(machine: Machine) -> None:
    """A rule about a function that the stand-in doesn't have is an error, not a silent nothing."""
    machine.be("gpu\nfail nvmlDeviceGetNames * 1")
    with pytest.raises(ValueError, match="has no function nvmlDeviceGetNames"):
        driver.environment(machine.path)


def test_log(machine: Machine) -> None:
    """The log has the process, the function and the device of every call."""
    child = machine.be("gpu\n mig on\n instance 0").nvml()
    child.ask("nvmlDeviceGetName(instance(0, 0))")
    child.ask("cuda.cuInit(0)")
    pid = child.process.pid
    assert machine.log.read_text().splitlines() == [
        f"{pid} nvmlInitWithFlags",
        f"{pid} nvmlDeviceGetHandleByIndex_v2 0",
        f"{pid} nvmlDeviceGetMigDeviceHandleByIndex 0:0",
        f"{pid} nvmlDeviceGetName 0:0",
        f"{pid} cuInit",
    ]


# ---- CUDA ----------------------------------------------------------------------------------

ALL_BUT_INIT = [
    "cuda.cuDeviceGetCount(byref(c_int()))",
    "cuda.cuDeviceGet(byref(c_int()), 0)",
    "cuda.cuCtxGetCurrent(byref(c_void_p()))",
    "cuda.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0)",
]


@pytest.mark.parametrize("call", ALL_BUT_INIT)
def test_before_init(machine: Machine, call: str) -> None:
    """Before cuInit every call but that for the version answers 3."""
    child = machine.be("cuda 12080\ngpu").child()
    assert child.ask(call) == "3"
    assert child.ask("ask('cuDriverGetVersion')") == "12080"
    child.ask("cuda.cuInit(0)")
    assert child.ask(call) == "0"


def test_failed_init_can_be_tried_again(machine: Machine) -> None:
    """A failed cuInit leaves CUDA uninitialised and reads afresh next time; a good one is final."""
    child = machine.be("gpu\ngpu").child(CUDA_VISIBLE_DEVICES="")
    assert child.ask("cuda.cuInit(0)") == "100"
    assert child.ask("cuda.cuDeviceGetCount(byref(c_int()))") == "3"
    child.ask("os.environ['CUDA_VISIBLE_DEVICES'] = '1'")
    assert child.ask("cuda.cuInit(0), ask('cuDeviceGetCount')") == "(0, 1)"
    child.ask("os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'")
    assert child.ask("cuda.cuInit(0), ask('cuDeviceGetCount')") == "(0, 1)"


def test_forked_child(machine: Machine) -> None:
    """The forked child of a process that has started CUDA gets 3 from everything, cuInit too."""
    child = machine.be("gpu").child()
    fork = "os.waitpid(os.fork() or os._exit({}), 0)[1] >> 8"
    assert child.ask(fork.format("cuda.cuInit(0) + 50")) == "50"
    child.ask("cuda.cuInit(0)")
    assert child.ask(fork.format("cuda.cuInit(0) + 50")) == "53"
    assert child.ask(fork.format("cuda.cuDeviceGetCount(byref(c_int())) + 50")) == "53"
    assert child.ask("ask('cuDeviceGetCount')") == "1"


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


@pytest.mark.parametrize(
    ("name", "visible", "expected"),
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
        ("mig", None, ["MIG-cc11"]),
        ("mig", "0", [1]),
        ("mig", "1", ["MIG-cc11"]),
        ("mig", "2", []),
        ("mig", "MIG-cc33", ["MIG-cc33"]),
        ("mig", "MIG-cc3", ["MIG-cc33"]),
        ("mig", "MIG-cc", []),
        ("mig", "0,MIG-cc33", ["MIG-cc33"]),
        ("mig", "MIG-cc33,MIG-cc11", ["MIG-cc33"]),
        ("new mig", "MIG-cc33,MIG-cc11", ["MIG-cc33", "MIG-cc11"]),
        ("new mig", None, ["MIG-cc11", "MIG-cc33"]),
        ("new mig", "1,MIG-cc11", []),
    ],
)
def test_visible_devices(
    machine: Machine, name: str, visible: str | None, expected: list[int | str]
) -> None:
    """CUDA_VISIBLE_DEVICES means what CUDA's documentation says (seen by bus, or instance)."""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    child = machine.be(MACHINES[name]).child(**variables)
    assert child.ask("cuda.cuInit(0)") == ("0" if expected else "100")
    if expected:
        assert child.ask("ask('cuDeviceGetCount')") == str(len(expected))
    for ordinal, device in enumerate(expected):
        if isinstance(device, int):
            assert child.ask(f"bus({ordinal})") == str(device)
        else:
            assert child.ask(f"uuid({ordinal})")[:4] == device.removeprefix("MIG-")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (None, [4, 2, 1, 3]),
        ("FASTEST_FIRST", [4, 2, 1, 3]),
        ("PCI_BUS_ID", [1, 2, 3, 4]),
    ],
)
def test_device_order(machine: Machine, order: str | None, expected: list[int]) -> None:
    """CUDA counts the fastest first unless told to go by the bus."""
    variables = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    child = machine.be(scenario("mixed")).child(**variables)
    child.ask("cuda.cuInit(0)")
    assert child.ask("[bus(ordinal) for ordinal in range(4)]") == str(expected)


def test_cuda_devices_are_those_of_nvml(machine: Machine) -> None:
    """Name, UUID and memory are the same through CUDA and through NVML."""
    child = machine.be(scenario("two")).nvml()
    child.ask("cuda.cuInit(0)")
    child.ask("name = (c_char * 100)(); cuda.cuDeviceGetName(name, 100, 1)")
    assert child.ask("name.value.decode()") == "GeForce GTX 1050 Ti"
    assert child.ask("nvmlDeviceGetUUID(gpu(1)).replace('-', '') == 'GPU' + uuid(1)") == "True"
    assert child.ask("ask('cuDeviceTotalMem_v2', 1, type=c_size_t) >> 20") == "4038"
    assert child.ask("[ask('cuDeviceGetAttribute', which, 1) for which in (75, 76, 33)]") == (
        "[6, 1, 2]"
    )


def test_memory_round_trip(machine: Machine) -> None:
    """What is copied to the device and back is the same; more than there is can't be had."""
    child = machine.be("gpu\n memory 100").child()
    child.ask("cuda.cuInit(0)")
    child.ask("context = c_void_p(); cuda.cuDevicePrimaryCtxRetain(byref(context), 0)")
    child.ask("allocate = lambda mib: ask('cuMemAlloc_v2', c_size_t(mib << 20), type=c_uint64)")
    assert child.ask("allocate(1)") == "code 201"
    assert child.ask("cuda.cuCtxSetCurrent(context)") == "0"
    assert child.ask("allocate(101)") == "code 2"
    child.ask("there = c_uint64(allocate(60))")
    assert child.ask("allocate(60)") == "code 2"
    assert child.ask("cuda.cuMemcpyHtoD_v2(there, b'hello', c_size_t(5))") == "0"
    child.ask("back = (c_char * 5)()")
    assert child.ask("cuda.cuMemcpyDtoH_v2(back, there, c_size_t(5)), back.value") == (
        "(0, b'hello')"
    )
    assert child.ask("cuda.cuMemcpyDtoH_v2(back, there, c_size_t(61 << 20))") == "1"
    assert child.ask("cuda.cuMemFree_v2(there), cuda.cuMemFree_v2(there)") == "(0, 1)"


LOOK = "[(p.pid, p.usedGpuMemory >> 20) for p in nvmlDeviceGetComputeRunningProcesses(gpu({}))]"


def test_contexts_are_seen_by_everybody(machine: Machine) -> None:
    """A process with a CUDA context shows in NVML with its memory until it dies, if by kill -9."""
    (machine.path.parent / "contexts").mkdir()
    watcher = machine.be("contexts contexts\ngpu\ngpu").nvml()
    child = machine.child(CUDA_VISIBLE_DEVICES="1")
    child.ask("cuda.cuInit(0)")
    assert watcher.ask(LOOK.format(1)) == "[]"
    child.ask("context = c_void_p(); cuda.cuCtxCreate_v2(byref(context), 0, 0)")
    assert watcher.ask(LOOK.format(1)) == f"[({child.process.pid}, 300)]"
    child.ask("there = c_uint64(ask('cuMemAlloc_v2', c_size_t(64 << 20), type=c_uint64))")
    assert watcher.ask(LOOK.format(1)) == f"[({child.process.pid}, 364)]"
    assert watcher.ask(LOOK.format(0)) == "[]"
    assert watcher.ask("nvmlDeviceGetMemoryInfo(gpu(1)).used >> 20") == "364"
    child.end()
    assert watcher.ask(LOOK.format(1)) == "[]"


def test_released_context_is_gone(machine: Machine) -> None:
    """A context that is let go is no longer listed, and a primary one counts its users."""
    child = machine.be(f"contexts {machine.path.parent}\ngpu").nvml()
    child.ask("cuda.cuInit(0)")
    listed = f"[({child.process.pid}, 300)]"
    for _ in range(2):
        child.ask("cuda.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0)")
        assert child.ask(LOOK.format(0)) == listed
    assert child.ask("cuda.cuDevicePrimaryCtxRelease_v2(0)") == "0"
    assert child.ask(LOOK.format(0)) == listed
    assert child.ask("cuda.cuDevicePrimaryCtxRelease_v2(0)") == "0"
    assert child.ask(LOOK.format(0)) == "[]"
    assert child.ask("cuda.cuDevicePrimaryCtxRelease_v2(0)") == "201"


# ---- building and running ------------------------------------------------------------------


def test_exports_are_those_of_the_libraries() -> None:
    """The names that the builder knows are exactly those that the libraries export."""
    if not shutil.which("nm"):
        pytest.skip("no nm here to read the libraries with")
    found = set[str]()
    for soname in driver.LIBRARIES:
        listing = subprocess.check_output(
            ["nm", "-D", "--defined-only", str(driver.build() / soname)], text=True
        )
        found |= {line.split()[-1] for line in listing.splitlines()}
    assert found == driver.exports()


def python(code: str, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-c", dedent(code), *arguments]
    return subprocess.check_output(command, cwd=ROOT, env=variables, text=True)


@pytest.mark.parametrize("soname", driver.LIBRARIES)
def test_loaded_library_is_found_by_name(soname: str) -> None:
    """A library that was loaded by its path is found again by its name."""
    code = """
        import ctypes, os, sys
        loaded = ctypes.CDLL(sys.argv[1])
        print(ctypes.CDLL(sys.argv[2], os.RTLD_NOLOAD)._handle == loaded._handle)
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


def test_build_without_a_compiler_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no cc, the compiler of the ziglang package builds the same."""
    if not importlib.util.find_spec("ziglang"):
        pytest.skip("ziglang is not installed")
    monkeypatch.setenv("PATH", str(tmp_path))
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
    assert run_driver().stdout == run_driver("--list").stdout
    names = [line.split()[0] for line in run_driver().stdout.splitlines()]
    assert names == sorted(path.stem for path in driver.SCENARIOS.glob("*.txt"))


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


@pytest.mark.parametrize("name", sorted(path.stem for path in driver.SCENARIOS.glob("*.txt")))
def test_scenarios_are_valid(machine: Machine, name: str) -> None:
    """Every scenario at hand can be read."""
    assert int(machine.be(scenario(name)).nvml().ask("nvmlDeviceGetCount()")) > 0


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
