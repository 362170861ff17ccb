"""NVML and CUDA on this machine. Each test is independent of the others."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.gpus.memory_caps import DEFAULT_CONTEXT_MIB
from tests.support.hardware.machine import (
    COMPUTE,
    CUDA,
    USER,
    as_user,
    last_line,
    seconds,
    until,
)
from tests.support.hardware.report import check

if TYPE_CHECKING:
    from tests.support.hardware.machine import Hardware
    from tests.support.hardware.report import Findings

READINGS = {  # the queries of a reservation and a status
    "name": "pynvml.nvmlDeviceGetName(handle)",
    "UUID": "pynvml.nvmlDeviceGetUUID(handle)",
    "PCI": "pynvml.nvmlDeviceGetPciInfo(handle)",
    "MIG mode": "pynvml.nvmlDeviceGetMigMode(handle)",
    "compute mode": "pynvml.nvmlDeviceGetComputeMode(handle)",
    "memory v1": "pynvml.nvmlDeviceGetMemoryInfo(handle)",
    "memory v2": "pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)",
    "compute processes": "pynvml.nvmlDeviceGetComputeRunningProcesses(handle)",
    "graphics processes": "pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)",
    "MPS processes": "pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)",
    "utilization": "pynvml.nvmlDeviceGetUtilizationRates(handle)",
    "temperature": "pynvml.nvmlDeviceGetTemperature(handle, 0)",
    "power": "pynvml.nvmlDeviceGetPowerUsage(handle)",
    "power limit": "pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)",
}
TIMES = f"""
import json, os, time, pynvml
def took(code):
    start = time.perf_counter()
    try: value = eval(code)
    except pynvml.NVMLError as error: return None, type(error).__name__
    return value, f'{{(time.perf_counter() - start) * 1000:.2f}} ms'
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(int(os.environ['GPU']))
mode, _ = took('pynvml.nvmlDeviceGetPersistenceMode(handle)')
print(json.dumps([mode, {{n: took(c)[1] for n, c in {READINGS!r}.items()}}]))
"""


@check(
    facts={
        "persistence": "persistence mode",
        "start": "time of nvmlInit, and of the first handle in a new process",
        "queries": "time of NVML's queries",
    }
)
def test_times(hardware: Hardware, found: Findings) -> None:
    """Starting NVML, the first handle and each query end within the time limit."""
    mode, queries = hardware.ask(TIMES, GPU=str(hardware.index))
    names = {0: "off: each process that queries the GPU initializes it", 1: "on"}
    found.fact("persistence", names.get(mode, "not reported"))
    found.fact("start", ", ".join(seconds(each) for each in hardware.start_s))
    found.fact("queries", ", ".join(f"{name} {took}" for name, took in queries.items()))


@check(
    {
        "smi": "nvidia-smi works",
    }
)
def test_nvidia_smi(hardware: Hardware, found: Findings) -> None:
    """The command nvidia-smi reads this GPU."""
    if hardware.is_stand_in or not shutil.which("nvidia-smi"):
        pytest.skip("nvidia-smi is not on PATH")
    start = time.monotonic()
    done = hardware.command("nvidia-smi", f"--id={hardware.index}")
    took = seconds(time.monotonic() - start)
    found.promise("smi", done.returncode == 0, f"exit code {done.returncode} after {took}")


@check(
    facts={
        "mig": "MIG mode, current and pending",
        "width": "PCIe lanes, current and maximum",
        "confidential": "confidential computing: state, and whether the GPUs are ready",
    }
)
def test_modes(hardware: Hardware, found: Findings) -> None:
    """NVML reports the modes that change how this GPU must be judged."""
    found.fact("mig", hardware.read("ask('nvmlDeviceGetMigMode', handle)"))
    names = "'nvmlDeviceGetCurrPcieLinkWidth', 'nvmlDeviceGetMaxPcieLinkWidth'"
    found.fact("width", hardware.read(f"[ask(name, handle) for name in ({names})]"))
    state, ready = hardware.read(
        "state = ask('nvmlSystemGetConfComputeState')\n"
        "names = [name for name, *_ in getattr(state, '_fields_', [])]\n"
        "fields = ', '.join(f'{name} {getattr(state, name)}' for name in names)\n"
        "[fields or state, ask('nvmlSystemGetConfComputeGpusReadyState')]"
    )
    found.fact("confidential", f"{state}; {ready}")


# -- CUDA --


@check(
    {
        "before": "cuDeviceGetCount returns 3 before cuInit",
        "after": "cuDeviceGetCount returns 0 after cuInit",
        "fork": "cuDeviceGetCount returns 3 in a child forked after cuInit",
    },
    facts={"took": "time of the first cuInit, and of a CUDA context"},
)
def test_codes_of_cuda(hardware: Hardware, found: Findings) -> None:
    """The code from cuDeviceGetCount shows if this process has started CUDA."""
    code = f"""{CUDA}
before = count()
code, begin, end = start()
after = count()
reading, writing = os.pipe()
if not os.fork():
    os.write(writing, str(count()).encode())
    os._exit(0)
os.wait()
[before, code, after, int(os.read(reading, 9)), end - begin]
"""
    with hardware.child(**hardware.visible()) as child:
        before, code, after, forked, init_s = child.run(code).value
        begin, end = child.run("context()").value
    found.promise("before", before == 3, before)
    found.promise("after", (code, after) == (0, 0), f"cuInit {code}, then {after}")
    found.promise("fork", forked == 3, forked)
    found.fact("took", f"{init_s:.2f} s, {end - begin:.2f} s")


@check(
    {
        "hidden": "cuInit returns 100 if CUDA_VISIBLE_DEVICES is empty",
        "after": "cuDeviceGetCount returns 3 after that cuInit",
    },
    facts={"again": "a second cuInit, after CUDA_VISIBLE_DEVICES was set"},
)
def test_cuda_without_a_visible_gpu(hardware: Hardware, found: Findings) -> None:
    """If no GPU is visible, cuInit fails, and CUDA has not started."""
    with hardware.child(CUDA_VISIBLE_DEVICES="") as child:
        first, then, again, last = child.run(
            f"{CUDA}first, then = start()[0], count()\n"
            f"os.environ['CUDA_VISIBLE_DEVICES'] = '{hardware.index}'\n"
            "[first, then, start()[0], count()]"
        ).value
    found.promise("hidden", first == 100, first)
    found.promise("after", then == 3, then)
    works = "works" if (again, last) == (0, 0) else "fails"
    found.fact("again", f"{works}: cuInit {again}, then cuDeviceGetCount {last}")


STARTED = """
from reserve_gpu.gpus.cuda_environment import cuda_started
import json
print(json.dumps(None if is_cpu else cuda_started()))
"""
STARTS = [
    ("torch", "import torch", "", False),
    ("torch", "torch.cuda.is_available()", "is_cpu = not torch.cuda.is_available()", True),
    ("jax", "import jax", "", False),
    ("jax", "jax.devices()", "is_cpu = jax.devices()[0].platform == 'cpu'", True),
    ("cupy", "import cupy", "", False),
    ("cupy", "cupy.cuda.runtime.getDeviceCount()", "cupy.cuda.runtime.getDeviceCount()", True),
    ("numba", "from numba import cuda", "from numba import cuda", False),
    ("numba", "list(cuda.gpus)", "from numba import cuda; [gpu.id for gpu in cuda.gpus]", True),
]


@check(
    {
        "starts": "cuda_started() is {expected} after `{shown}`",
    },
    limit_s=100,
)
@pytest.mark.parametrize(("module", "shown", "code", "expected"), STARTS)
def test_cuda_started(
    hardware: Hardware, found: Findings, module: str, shown: str, code: str, *, expected: bool
) -> None:
    """Importing a framework does not start CUDA, using a GPU does, and cuda_started() knows it."""
    if not hardware.has(module):
        pytest.skip(f"{module} is not installed")
    small = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    code = f"is_cpu = False\nimport {module}\n{code}\n{STARTED}"
    started = hardware.ask(code, **hardware.visible(), **small)
    if started is None:
        pytest.skip(f"{module} finds no GPU")
    found.promise("starts", started == expected, started)


@check(
    {
        "uuid": "CUDA and NVML have the same UUID for the GPU",
    }
)
def test_uuids(hardware: Hardware, found: Findings) -> None:
    """CUDA's UUID of a GPU is NVML's, so that a process knows which GPU it uses."""
    code = (
        "import ctypes, json\n"
        "from reserve_gpu.gpus.cuda_environment import cuda_uuids\n"
        "ctypes.CDLL('libcuda.so.1').cuInit(0)\n"
        "print(json.dumps(cuda_uuids()))"
    )
    uuids = hardware.ask(code, **hardware.visible())
    expected = [hardware.uuid.lower().removeprefix("gpu-")]
    found.promise("uuid", uuids == expected, f"{len(uuids)} UUIDs")


# -- memory and processes --


@check(
    {
        "free": "an idle GPU is free",
    },
    facts={"idle": "memory of the idle GPU", "context": "memory with a bare CUDA context"},
)
def test_memory(hardware: Hardware, found: Findings) -> None:
    """The memory in use on an idle GPU is below the limit for an idle GPU."""
    until(lambda: not hardware.pids())
    v1, v2, reserved, total = hardware.read(
        "info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)\n"
        "[used_v1(), info.used >> 20, info.reserved >> 20, info.total >> 20]"
    )
    found.fact("idle", f"v1 {v1} MiB, v2 {v2} MiB and {reserved} MiB reserved, of {total} MiB")
    row, _ = hardware.status()
    found.promise("free", row["state"] == "free", row["reason"] or row["state"])
    with hardware.computing() as child:
        sizes = hardware.read(f"[used_v1(), used(), mib({child.pid})]")
        free = child.run("free_mib()").value
    found.fact(
        "context",
        "v1 {} MiB, v2 {} MiB, of the process {} MiB".format(*sizes)
        + f"; CUDA has {free} MiB left",
    )


CONTEXT = """
import os
if {has_torch}:
    import torch
    torch.cuda.init()
    x = torch.arange(100, dtype=torch.float32, device='cuda:0')
    x @ x
    if hasattr(torch, 'nn'):  # not in the PyTorch of the stand-in driver
        layer = torch.nn.Conv2d(16, 32, 3).cuda()
        layer(torch.rand(8, 16, 64, 64, device='cuda:0')).sum().backward()
        torch.cuda.synchronize()
    counted = getattr(torch.cuda, 'memory_reserved', int)() >> 20
else:
    start(); context()
    counted = 0
counted
"""


@check(
    {
        "size": f"the CUDA context {{of}} uses at most {DEFAULT_CONTEXT_MIB} MiB",
    },
    limit_s=100,
)
@pytest.mark.parametrize("of", ["alone", "of PyTorch"])
def test_size_of_a_context(hardware: Hardware, found: Findings, of: str) -> None:
    """The allowance for a CUDA context is large enough, also for a convolution with PyTorch."""
    has_torch = of != "alone"
    if has_torch and not hardware.has("torch"):
        pytest.skip("torch is not installed")
    with hardware.child(**hardware.visible()) as child:
        answer = child.run(CUDA + CONTEXT.format(has_torch=has_torch))
        if answer.error:
            pytest.skip(f"CUDA does not start: {answer.text[:80]}")
        mib = hardware.read(f"mib({child.pid})")
    if mib is None:
        pytest.skip("NVML does not report the size of this process")
    found.promise("size", mib - answer.value <= DEFAULT_CONTEXT_MIB, f"{mib - answer.value} MiB")


@check(facts={"listed": "a process that has only called cuInit and counted the GPUs"})
def test_a_process_that_only_counts(hardware: Hardware, found: Findings) -> None:
    """NVML shows whether counting the GPUs is enough to be listed, and with which memory."""
    with hardware.child(**hardware.visible()) as child:
        assert child.run(f"{CUDA}start(); count()").value == 0
        found.fact("listed", listed(hardware, child.pid, wait_s=1.0))


@check(facts={"listed": "a process with a context on another GPU, in the list of this GPU"})
def test_a_context_on_another_gpu(hardware: Hardware, found: Findings) -> None:
    """NVML shows whether a process that sees all GPUs is listed on each of them."""
    if hardware.count < 2:
        pytest.skip("needs a second GPU")
    with hardware.second_gpu() as other:
        if isinstance(other, str):
            pytest.skip(f"needs a second idle GPU: {other}")
        both = f"{other[0]},{hardware.index}"
        with hardware.computing(64, visible=both) as child:
            found.fact("listed", listed(hardware, child.pid, wait_s=1.0))


def listed(hardware: Hardware, pid: int, wait_s: float = 0.0) -> str:
    """Describe the entry of a process in NVML's list."""
    until(lambda: pid in hardware.pids(), wait_s)
    sizes = {int(each): size for each, size in hardware.read("sizes()").items()}
    if pid not in sizes:
        return "not listed"
    size = sizes[pid]
    return "listed without a size" if size is None else f"listed with {size >> 20} MiB"


MANAGED = """
size, address = ctypes.c_size_t(1024 << 20), ctypes.c_uint64()
ok(cuda.cuMemAllocManaged(ctypes.byref(address), size, 1))
ok(cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(7), size))
ok(cuda.cuCtxSynchronize())
"""


@check(facts={"managed": "1024 MiB of managed memory, touched on the GPU"})
def test_managed_memory(hardware: Hardware, found: Findings) -> None:
    """NVML shows whether the size of a process contains its managed memory."""
    with hardware.computing() as child:
        look = f"[used(), mib({child.pid})]"
        before = hardware.read(look)
        answer = child.run(MANAGED)
        if answer.error:
            pytest.skip(f"no managed memory: {answer.text[:80]}")
        after = hardware.read(look)
    gpu, process = (
        b - a if None not in (a, b) else None for a, b in zip(before, after, strict=True)
    )
    found.fact("managed", f"the GPU uses {gpu} MiB more, the process {process} MiB more")


FORK = """
pid = os.fork()
if not pid: time.sleep(120)
pid
"""


@check(
    facts={"orphan": "a forked child after kill -9 of its parent, which had 1024 MiB"}, limit_s=60
)
def test_a_forked_child_outlives_its_parent(hardware: Hardware, found: Findings) -> None:
    """NVML shows whether a forked child keeps its parent's memory, and under which pid."""
    until(lambda: not hardware.pids())
    idle = hardware.read("used()")
    with hardware.computing(1024) as parent:
        orphan = int(parent.run(FORK).value)
        before = hardware.read("used()")
        try:
            parent.kill()
            after_s = until(lambda: hardware.read("used()") < before - 500, 5)
            pids = hardware.pids()
        finally:
            os.kill(orphan, 9)
    names = {parent.pid: "the dead parent", orphan: "the child"}
    who = ", ".join(names.get(pid, "another pid") for pid in pids) or "no process"
    kept = "kept for 5 s at least" if after_s is None else f"freed after {seconds(after_s)}"
    freed_s = until(lambda: hardware.read("used()") <= idle + 16, 30)
    found.fact(
        "orphan", f"{kept}; listed: {who}; after the child's end freed after {seconds(freed_s)}"
    )


@check(
    {
        "hidden": "in another PID namespace, NVML never shows the pids of this namespace",
    }
)
def test_another_pid_namespace(hardware: Hardware, found: Findings) -> None:
    """Inside a PID namespace, NVML never shows a pid of the outer namespace."""
    namespace = ("unshare", "--pid", "--fork", "--mount-proc")
    if os.geteuid() or hardware.command(*namespace, "true").returncode:
        pytest.skip("needs root and unshare")
    code = (
        "import json, sys, pynvml; pynvml.nvmlInit()\n"
        f"handle = pynvml.nvmlDeviceGetHandleByIndex({hardware.index})\n"
        "processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)\n"
        "print(json.dumps([process.pid for process in processes]))"
    )
    with hardware.computing(512) as child:
        done = hardware.command(*namespace, sys.executable, "-c", code)
    assert not done.returncode, done.stderr[-500:]
    pids = json.loads(done.stdout)
    found.promise("hidden", child.pid not in pids, f"pid {child.pid}; there: {pids}")


# -- activity --

SAMPLES = """
clocks = {'epoch': 'CLOCK_REALTIME', 'boot': 'CLOCK_BOOTTIME', 'monotonic': 'CLOCK_MONOTONIC'}
samples = ask('nvmlDeviceGetProcessUtilization', handle, 0)
now = {name: time.clock_gettime(getattr(time, clock)) for name, clock in clocks.items()}
def ages(sample): return {name: at - sample.timeStamp / 1e6 for name, at in now.items()}
samples if isinstance(samples, str) else [[s.pid, ages(s)] for s in samples]
"""
WORKERS = """
import json, os
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.system import procfs
with Nvml() as gpus:
    device = gpus.devices(int(os.environ['GPU']))[0]
    found = gpus.recent_use(device, procfs.now().later(-2.0))
print(json.dumps(None if found is None else sorted(found)))
"""


@check(
    {
        "quiet": "a process that has only a CUDA context does not count as active",
        "active": "a computing process counts as active",
    },
    facts={
        "idle": "nvmlDeviceGetProcessUtilization on the idle GPU",
        "clock": "clock of its samples",
    },
    limit_s=60,
)
def test_active_processes(hardware: Hardware, found: Findings) -> None:
    """The driver reports the processes that compute, on a clock that can be recognized."""
    found.fact("idle", samples_text(hardware.read(SAMPLES)))
    with hardware.computing(64) as child:
        scenario = hardware.scenario.read_text()
        if hardware.is_stand_in:
            hardware.write(scenario.replace("\ngpu\n", "\ngpu\nuse-ended 4\n"))
        time.sleep(4)  # the start of CUDA is longer ago than the 2 s of `WORKERS`
        quiet = hardware.ask(WORKERS, GPU=str(hardware.index))
        if hardware.is_stand_in:
            hardware.write(scenario.replace("\ngpu\n", "\ngpu\nutilisation 40\n"))
        child.send("work(6)")
        time.sleep(2)
        working = hardware.ask(WORKERS, GPU=str(hardware.index))
        samples = hardware.read(SAMPLES)
        child.answer()
        hardware.write(scenario)
    found.fact("clock", clock_text(samples, child.pid))
    found.promise("quiet", None if quiet is None else child.pid not in quiet, quiet)
    found.promise("active", None if working is None else child.pid in working, working)


def samples_text(samples: Any) -> str:
    return samples if isinstance(samples, str) else f"{len(samples)} samples"


def clock_text(samples: Any, pid: int) -> str:
    """Name the clocks that fit the samples of a process that is computing now."""
    if isinstance(samples, str):
        return samples
    ages = [ages for sampled, ages in samples if sampled == pid]
    if not ages:
        return f"no sample of the process among {len(samples)}"
    newest = {name: min((age[name] for age in ages), key=abs) for name in ages[0]}
    fitting = [f"{name} ({age:.2f} s ago)" for name, age in newest.items() if abs(age) < 60]
    return ", ".join(fitting) or f"unknown: {newest}"


# -- other users, MPS --


@check(
    {
        "nvml": "NVML works for an ordinary user",
    }
)
def test_nvml_of_an_ordinary_user(hardware: Hardware, found: Findings) -> None:
    """An ordinary user can read the GPU."""
    if reason := hardware.missing_user():
        pytest.skip(f"no process of {USER} can run: {reason}")
    code = (
        "import pynvml; pynvml.nvmlInit()\n"
        f"handle = pynvml.nvmlDeviceGetHandleByIndex({hardware.index})\n"
        "pynvml.nvmlDeviceGetComputeRunningProcesses(handle)\n"
        "print(pynvml.nvmlDeviceGetMemoryInfo(handle).total >> 20, 'MiB')"
    )
    done = hardware.command(*as_user(), sys.executable, "-c", code, HOME="/nonexistent")
    found.promise("nvml", not done.returncode, last_line(done.stdout + done.stderr))


@check(
    {
        "busy": "a client of MPS makes the GPU busy",
    },
    facts={"lists": "lists with a client of MPS"},
    limit_s=60,
)
def test_mps(hardware: Hardware, found: Findings, request: pytest.FixtureRequest) -> None:
    """A process that uses the GPU through MPS is detected."""
    control = shutil.which("nvidia-cuda-mps-control")
    is_allowed = request.config.getoption("--gpu-mps") and not os.geteuid()
    if not control or not is_allowed:
        pytest.skip("needs nvidia-cuda-mps-control, root and the option --mps")
    folder = hardware.folder / "mps"
    folder.mkdir()
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    environ = {**dict.fromkeys(names, str(folder)), **hardware.visible()}
    # The daemon would keep a pipe open.
    hardware.command("sh", "-c", '"$0" -d >/dev/null 2>&1', control, **environ)
    try:
        with hardware.child(**environ) as child:
            answer = child.run(COMPUTE)
            lists = hardware.read(
                "[[p.pid for p in ask(f'nvmlDeviceGet{kind}RunningProcesses', handle)]"
                " for kind in ('Compute', 'MPSCompute')]"
            )
            state = hardware.state()
            assert child.process.stdin
            child.process.stdin.close()  # a client that is killed can end the server
            child.process.wait(10)
    finally:
        hardware.command("sh", "-c", 'echo "quit -t 3" | "$0"', control, **environ)
    found.fact("lists", f"client {child.pid}; compute {lists[0]}, MPS {lists[1]}")
    found.promise("busy", None if answer.error else state == "busy", answer.text or state)
