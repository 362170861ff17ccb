"""What the driver says, through the real bindings, and what becomes of it."""

from __future__ import annotations

import ctypes.util
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.machine import Child, Machine

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
# Elsewhere, in a container, an empty process list proves nothing.
SEES_ALL = os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE

QUERIES = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]
NO_V3 = "".join(f"missing {query}_v3\n" for query in QUERIES)
NO_V2 = "".join(f"missing {query}_v2\n" for query in QUERIES)
NO_MEMORY_V2 = "missing nvmlDeviceGetMemoryInfo_v2\n"
VARIABLES = "{k: v for k, v in os.environ.items() if k[:5] == 'CUDA_'}"


def processes_fail(code: int) -> str:
    """All process queries of all GPUs answer this error."""
    return "".join(
        f"fail {query}{version} * {code}\n" for query in QUERIES for version in ("", "_v2", "_v3")
    )


def ask_nvml(child: Child, expression: str, limit_s: float = 20.0) -> Any:
    """The value of an expression with our `nvml` open."""
    answer = child.run(
        "from reserve_gpu.nvml import Nvml\n"
        f"with Nvml(limit_s={limit_s}) as nvml:\n    value = {expression}\nvalue"
    )
    assert answer.error is None, answer.text
    return answer.value


# -- idle or not -----------------------------------------------------------------------------------

IDLE = {
    "nothing on it": "gpu",
    "a little memory": "gpu\n memory 4096\n used 200",
    "1000 MiB of a large card": "gpu\n memory 81920\n used 1000",
    "the driver's own reserve": "gpu\n memory 4096\n reserved 600",
    "the reserve, in a reading without it": f"{NO_MEMORY_V2}gpu\n memory 4096\n reserved 600",
    "Xorg on a small card": "gpu\n memory 2048\n graphics 1100 4",
    "a desktop's 2 GB": "gpu\n memory 10240\n graphics 1100 350\n graphics 1300 1650",
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

# With what must be said of it.
BUSY = {
    "a compute process": ("gpu\n compute 4321 3500", "pid 4321"),
    "a compute process of unknown memory": ("gpu\n compute 4321 -", "pid 4321"),
    "a compute process beside a desktop": (
        "gpu\n memory 10240\n graphics 1 2000\n compute 4321 10",
        "pid 4321",
    ),
    "a compute process, before 510": (f"{NO_V3}gpu\n compute 4321 10", "pid 4321"),
    "a compute process, before 450": (f"{NO_V3}{NO_V2}gpu\n compute 4321 10", "1 compute process"),
    "an MPS client": ("gpu\n mps 777 100", "777"),
    "memory of nobody": ("gpu\n memory 81920\n used 1100", "1.1 GiB in use by no process"),
    "memory of nobody on a small card": ("gpu\n memory 4096\n used 210", "210 MiB in use by no"),
    "memory of nobody beside a desktop": (
        "gpu\n memory 81920\n graphics 1 2000\n used 1100",
        "1.1 GiB in use by no process",
    ),
    "memory of nobody beside the reserve": (
        f"{NO_MEMORY_V2}gpu\n memory 4096\n reserved 600\n used 200",
        "in use by no process",
    ),
    "memory of nobody, process lists unknown": (
        f"{processes_fail(999)}gpu\n memory 8192\n used 3000",
        "2.9 GiB in use by no process",
    ),
    "prohibited": ("gpu\n mode prohibited", "prohibited"),
    "exclusive process with a process": ("gpu\n mode exclusive_process\n compute 4321 5", "4321"),
    "neither processes nor memory": (f"{processes_fail(3)}gpu\n memory none", "neither"),
}


@pytest.mark.parametrize("scenario", IDLE.values(), ids=IDLE.keys())
def test_idle(machine: Machine, scenario: str) -> None:
    """A GPU without a sign of use, by a reading that can be trusted, is idle."""
    machine.write(scenario)
    with machine.child() as child:
        answer = child.reserve()
        assert answer.value == "0", answer.text


@pytest.mark.parametrize(("scenario", "said"), BUSY.values(), ids=BUSY.keys())
def test_not_idle(machine: Machine, scenario: str, said: str) -> None:
    """A GPU with a sign of use, or without a reading, is not taken, and why is said."""
    machine.write(scenario)
    with machine.child() as child:
        answer = child.reserve()
        assert answer.error == "NoFreeDeviceError"
        assert said in answer.text.splitlines()[1]
        machine.add("gpu")
        assert child.reserve().value == "1"


def test_without_a_memory_reading(machine: Machine) -> None:
    """Without a memory reading the processes decide, if all can be seen; else it is unknown."""
    machine.write("gpu\n memory none")
    with machine.child() as child:
        answer = child.reserve()
        if SEES_ALL:
            assert answer.value == "0"
        else:
            assert answer.error == "NoFreeDeviceError"
            assert "unknown" in answer.text.splitlines()[1]


def test_named_but_unusable(machine: Machine) -> None:
    """A GPU that CUDA would not let us onto is refused also if it is named."""
    with machine.child() as child:
        for use in ("mode prohibited", "mode exclusive_process\n compute 4321 5"):
            machine.write(f"gpu\n {use}\ngpu")
            answer = child.reserve("0")
            assert answer.error == "NoFreeDeviceError"
            assert "GPU0" in answer.text


def test_threshold_is_configurable(machine: Machine) -> None:
    """$RESERVE_GPU_IDLE_MEMORY moves the threshold both ways; one that is no size is refused."""
    machine.write("gpu\n memory 8192\n used 300")
    for size, idle in (("", True), ("299", False), ("301MiB", True), ("0.5GB", True), ("0", False)):
        with machine.child(RESERVE_GPU_IDLE_MEMORY=size) as child:
            assert (child.reserve().error is None) == idle, size
    with machine.child(RESERVE_GPU_IDLE_MEMORY="much") as child:
        answer = child.reserve()
        assert answer.error == "RequestError"
        assert "RESERVE_GPU_IDLE_MEMORY" in answer.text
        assert child.run(VARIABLES).value == {}


# -- MIG -------------------------------------------------------------------------------------------


def test_mig_instances(machine: Machine) -> None:
    """Each MIG instance is a device with its own lock and memory, gaps or not; its GPU is none."""
    machine.use("mig")
    with machine.child() as child, machine.child() as other:
        assert ask_nvml(child, "[getattr(d, 'label') for d in nvml.walk()]") == [
            "GPU0", "GPU1:0", "GPU1:2", "GPU1:5", "GPU2",
        ]  # fmt: skip
        uuids = ask_nvml(child, "[d.uuid for d in nvml.devices(1)]")
        assert all(uuid.startswith("MIG-") for uuid in uuids)
        assert other.reserve("'1:0'").value == uuids[0]
        assert child.reserve("'1:0'").error == "NoFreeDeviceError"
        assert child.reserve("'1:2'").value == uuids[1]
        assert child.run("os.environ['CUDA_DEVICE_MEMORY']").value == "9856"
        for name in ("1", "'1:1'", "'1:9'"):  # the GPU, a gap, beyond the last
            answer = child.reserve(name)
            assert answer.error == "RequestError"
            assert "1:0, 1:2, 1:5" in answer.text
        assert child.visible() == uuids[1]


def test_mig_instance_is_busy_by_itself(machine: Machine) -> None:
    """A process on one instance makes that one busy, not its neighbours."""
    machine.write("gpu\n mig on\n instance 1\n compute 4321 500\n instance 4\ngpu")
    with machine.child() as child:
        visible = child.reserve().value
        assert visible == ask_nvml(child, "[d.uuid for d in nvml.devices(0)][1]")


def test_mig_without_instances(machine: Machine) -> None:
    """A GPU with MIG on and no instance is skipped, and that is said."""
    machine.write("gpu\n mig on")
    with machine.child() as child:
        assert "MIG" in child.reserve().text.splitlines()[1]
        machine.add("gpu")
        assert child.reserve().value == "1"


# -- lazily ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", ["", "0", "'GPU0'"])
def test_nothing_is_touched_needlessly(machine: Machine, arguments: str) -> None:
    """With the first GPU idle, or named by its index, no other is touched."""
    with machine.child() as child:
        assert child.reserve(arguments).value == "0"
    touched = {call.partition(" ")[2] for call in machine.calls()}
    assert touched == {"", "0"}


def test_calls_do_not_grow_with_the_gpus(machine: Machine) -> None:
    """With the first GPU idle, eight GPUs take the calls that two take, and one initialisation."""
    calls = []
    for count in (2, 8):
        machine.write("gpu\n" * count)
        machine.log.unlink(missing_ok=True)
        with machine.child() as child:
            assert child.reserve().value == "0"
        calls.append(machine.calls())
    assert calls[0] == calls[1]
    assert sum(call.startswith("nvmlInit") for call in calls[0]) == 1
    assert sum(call.startswith("nvmlShutdown") for call in calls[0]) == 1
    assert sum(call.startswith("nvmlDeviceGetHandleByIndex") for call in calls[0]) == 1


def test_asking_again_asks_no_driver(machine: Machine) -> None:
    """What is held already is confirmed without a call to NVML."""
    with machine.child() as child:
        child.reserve()
        before = machine.calls()
        assert child.reserve().value == "0"
        assert machine.calls() == before


# -- no driver, or one in trouble ------------------------------------------------------------------


def check_no_driver(child: Child, said: str) -> None:
    """reserve() says it in one line, and changes nothing."""
    before = child.run(VARIABLES).value
    answer = child.reserve()
    assert answer.error in ("DriverError", "NoDriverError")
    assert said in answer.text.lower()
    assert "\n" not in answer.text
    assert child.run(VARIABLES).value == before


@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None, reason="there is an NVIDIA driver here"
)
def test_no_driver(machine: Machine) -> None:
    """Without the driver's library one line says so and no variable is changed."""
    with machine.child(LD_LIBRARY_PATH="", CUDA_VISIBLE_DEVICES="1") as child:
        check_no_driver(child, "no nvidia driver")


def test_library_that_cannot_be_loaded(machine: Machine, tmp_path: Path) -> None:
    """A file in the place of the driver's library that is none is the same as no driver."""
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    with machine.child(LD_LIBRARY_PATH=str(tmp_path), CUDA_VISIBLE_DEVICES="1") as child:
        check_no_driver(child, "no nvidia driver")


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
def test_driver_that_does_not_start(machine: Machine, code: int, remedy: str) -> None:
    """Whatever error initialisation answers, one line names a remedy and no variable is changed."""
    machine.add(f"fail nvmlInitWithFlags * {code}")
    with machine.child(CUDA_DEVICE_MEMORY="7") as child:
        check_no_driver(child, remedy)


def test_driver_without_gpus(machine: Machine) -> None:
    """A driver that shows no GPU, or can't count them, is said in one line."""
    machine.write("count 0\ngpu")
    with machine.child() as child:
        check_no_driver(child, "no gpu")
        machine.write("gpu\nfail nvmlDeviceGetCount_v2 * 999")
        check_no_driver(child, "count")


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
def test_gpu_in_trouble_is_skipped(machine: Machine, fault: str, cause: str) -> None:
    """A GPU that fails is skipped, the next one served; where it is wanted the cause is said."""
    machine.add(f"fail {fault}")
    with machine.child() as child:
        for wanted in ("count=2", "0"):
            answer = child.reserve(wanted)
            assert answer.error == "NoFreeDeviceError"
            (line,) = (line for line in answer.text.splitlines() if line.startswith("  GPU0: "))
            assert cause in line
        assert child.reserve().value == "1"


def test_gpus_beyond_those_described(machine: Machine) -> None:
    """GPUs that are counted but refuse their handle are skipped."""
    machine.write("count 3\ngpu\n compute 4321 10")
    with machine.child() as child:
        answer = child.reserve()
        assert answer.error == "NoFreeDeviceError"
        labels = [line.partition(":")[0] for line in answer.text.splitlines()[1:4]]
        assert labels == ["  GPU0", "  GPU1", "  GPU2"]


@pytest.mark.parametrize(
    "function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo_v2"]
)
def test_call_that_hangs(machine: Machine, function: str) -> None:
    """A GPU whose call hangs is marked as faulty after the limit, and the next one is read."""
    machine.add(f"delay {function} 0 1000")
    with machine.child() as child:
        kinds = "[type(found).__name__ for found in nvml.walk()]"
        assert ask_nvml(child, kinds, limit_s=0.3) == ["Fault", "Device"]
        reason = ask_nvml(child, "[found.reason for found in nvml.devices(0)][0]", limit_s=0.3)
        assert "hangs" in reason


ASK_AGAIN_AND_AGAIN = """
import time
from reserve_gpu.bindings import DeviceError
from reserve_gpu.nvml import Nvml

def ask(nvml, device):
    try:
        return nvml.usage(device).mode
    except DeviceError as error:
        return str(error)

def threads():
    return len(os.listdir("/proc/self/task"))

nvml = Nvml(limit_s=0.2).__enter__()
one, other = nvml.walk()
before = threads()
said = [ask(nvml, one) for _ in range(9)]
said, ask(nvml, other), threads() - before
"""
UNTIL_IT_ANSWERS = """
while ask(nvml, one) == said[0]:
    time.sleep(0.01)
ask(nvml, one)
"""


def test_a_call_that_hangs_is_not_made_again_until_it_ends(machine: Machine) -> None:
    """However often a reading is asked for, one thread hangs with it, and all others go on."""
    usual = machine.scenario.read_text()
    machine.add("delay nvmlDeviceGetComputeMode 0 3")
    with machine.child() as child:
        answer = child.run(ASK_AGAIN_AND_AGAIN)
        assert not answer.error, answer.text
        said, others, threads = answer.value
        assert set(said) == {"the driver hangs: no answer within 0.2 s (nvmlDeviceGetComputeMode)"}
        assert (others, threads) == ("default", 1)
        machine.write(usual)
        assert child.run(UNTIL_IT_ANSWERS).value == "default"


def test_initialisation_that_hangs(machine: Machine) -> None:
    """A driver that hangs at once is an error, not a wait without end."""
    machine.add("delay nvmlInitWithFlags * 1000")
    with machine.child() as child:
        answer = child.run(
            "from reserve_gpu.nvml import Nvml\nwith Nvml(limit_s=0.3) as nvml: nvml.count()"
        )
        assert answer.error == "DriverError"
        assert "hangs" in answer.text


# -- other people's bindings and bytes -------------------------------------------------------------


def test_memory_function_replaced(machine: Machine) -> None:
    """The memory function as gpustat leaves it, without `version`, is used as it is."""
    machine.write("gpu\n memory 4096\n reserved 600\ngpu\n memory 4096")
    with machine.child() as child:
        child.run(
            "import pynvml\n"
            "original = pynvml.nvmlDeviceGetMemoryInfo\n"
            "def replacement(handle):\n    return original(handle, version=pynvml.nvmlMemory_v2)\n"
            "pynvml.nvmlDeviceGetMemoryInfo = replacement"
        )
        assert child.reserve().value == "0"
        assert child.run("os.environ['CUDA_DEVICE_MEMORY']").value == "4096"


def test_wrong_module(machine: Machine, tmp_path: Path) -> None:
    """A module pynvml that is not nvidia-ml-py's is answered by the command that mends it."""
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass")
    with machine.child() as child:
        child.run(f"sys.path.insert(0, {str(tmp_path)!r})")
        check_no_driver(child, "pip install nvidia-ml-py")


def test_missing_module(machine: Machine, tmp_path: Path) -> None:
    """Without the module pynvml the command that installs it is named."""
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')")
    with machine.child() as child:
        child.run(f"sys.path.insert(0, {str(tmp_path)!r})")
        check_no_driver(child, "pip install nvidia-ml-py")


def test_bytes_that_are_no_text(machine: Machine) -> None:
    """A name or VBIOS that is not UTF-8 is no obstacle, and what is printed of it is text."""
    with machine.child() as child:
        machine.scenario.write_bytes(b"gpu\n name Ge\xff\xfeForce\n vbios \x80\x81\n")
        assert child.reserve().value == "0"
        assert child.run("str(reserve_gpu.current()).isprintable()").error is None
        (first, *_) = child.run("str(reserve_gpu.current()).splitlines()").value
        assert first.startswith("Reserving GPU0: 0000:01:00.0 16x")
