"""What only hardware can confirm. Each test leaves the GPU as it was, and stands alone."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO

import pytest

from reserve_gpu.gpus.memory_caps import DEFAULT_CONTEXT_MIB
from tests.hardware import FRAMEWORKS, NOT_CONFIRMED, READINGS, ROWS
from tests.machine import ROOT

if TYPE_CHECKING:
    from tests.hardware import Hardware, Table

CUDA = """
import ctypes, json, os
cuda, count = ctypes.CDLL('libcuda.so.1'), ctypes.c_int()
ask = lambda: cuda.cuDeviceGetCount(ctypes.byref(count))
"""
NVML = """
import json, os, time, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(int(os.environ['GPU']))
"""
# A context and a little memory, taken through the driver alone; `work` lets the GPU do something.
COMPUTE = """
import ctypes
cuda, context, address = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(), ctypes.c_uint64()
size = ctypes.c_size_t(1 << 20)
assert not cuda.cuInit(0) and not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
assert not cuda.cuCtxSetCurrent(context) and not cuda.cuMemAlloc_v2(ctypes.byref(address), size)
def work():
    assert not cuda.cuMemsetD32_v2(address, 7, ctypes.c_size_t(1 << 18))
work()
"""
LISTED = "pynvml.nvmlDeviceGetComputeRunningProcesses(handle)"


def nvml(hardware: Hardware, code: str) -> Any:
    """Ask NVML of the GPU of these tests."""
    return hardware.ask(f"{NVML}{code}", GPU=str(hardware.index))


def visible(hardware: Hardware) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(hardware.index), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


CHECK = "import json, reserve_gpu; print(json.dumps(reserve_gpu.check().to_dict()))"


@pytest.mark.gpu
def test_cuda_before_and_after_its_start(hardware: Hardware, table: Table) -> None:
    """Before cuInit cuDeviceGetCount answers 3, after it 0."""
    code = f"{CUDA}before = ask(); cuda.cuInit(0); print(json.dumps([before, ask()]))"
    before, after = hardware.ask(code, **visible(hardware))
    table.note("cuDeviceGetCount after cuInit", after)
    table.confirm("cuDeviceGetCount before cuInit", before, 3)
    table.confirm("cuDeviceGetCount after cuInit", after, 0)


@pytest.mark.gpu
def test_cuda_in_a_forked_child(hardware: Hardware, table: Table) -> None:
    """In a child forked after cuInit, cuDeviceGetCount answers 3, as if CUDA had not started."""
    code = f"""{CUDA}
cuda.cuInit(0)
reading, writing = os.pipe()
if not os.fork():
    os.write(writing, str(ask()).encode())
    os._exit(0)
os.wait()
print(os.read(reading, 9).decode())
"""
    answer = hardware.ask(code, **visible(hardware))
    table.confirm("cuDeviceGetCount in a child forked after cuInit", answer, 3)


@pytest.mark.gpu
def test_cuda_after_a_failed_start(hardware: Hardware, table: Table) -> None:
    """An empty variable makes cuInit answer 100, and CUDA has not started then."""
    code = f"""{CUDA}
first, then = cuda.cuInit(0), ask()
os.environ['CUDA_VISIBLE_DEVICES'] = {str(hardware.index)!r}
again = cuda.cuInit(0)
code = ask()
print(json.dumps([first, then, again, code, count.value]))
"""
    first, then, again, answer, count = hardware.ask(code, CUDA_VISIBLE_DEVICES="")
    works = f"works: it answers {again}, {count} device(s)"
    fails = f"does not work: it answers {again}, cuDeviceGetCount {answer}"
    table.note(
        "a second cuInit, after CUDA_VISIBLE_DEVICES was set",
        works if not again and not answer and count else fails,
    )
    table.note("cuDeviceGetCount after that cuInit", then)
    table.confirm("cuInit with CUDA_VISIBLE_DEVICES=''", first, 100)
    table.confirm("cuDeviceGetCount after that cuInit", then, 3)


STARTED = """
from reserve_gpu.gpus.cuda_environment import cuda_started
import json
print(json.dumps(None if is_cpu else cuda_started()))
"""
STARTS = [
    ("torch", "after `import torch`", "import torch", False),
    (
        "torch",
        "after `torch.cuda.is_available()`",
        "import torch; torch.cuda.is_available(); is_cpu = not torch.version.cuda",
        True,
    ),
    ("jax", "after `import jax`", "import jax", False),
    (
        "jax",
        "after `jax.devices()`",
        "import jax; is_cpu = jax.devices()[0].platform == 'cpu'",
        True,
    ),
    ("cupy", "after `import cupy`", "import cupy", False),
    (
        "cupy",
        "after CuPy counts devices",
        "import cupy; cupy.cuda.runtime.getDeviceCount()",
        True,
    ),
    ("numba", "after `from numba import cuda`", "from numba import cuda", False),
    (
        "numba",
        "after Numba lists devices",
        "from numba import cuda; [gpu.id for gpu in cuda.gpus]",
        True,
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("module", "when", "code", "expected"), STARTS, ids=[when for _, when, _, _ in STARTS]
)
def test_the_probe_knows_when_a_framework_starts_cuda(
    hardware: Hardware, table: Table, module: str, when: str, code: str, *, expected: bool
) -> None:
    """Importing a framework starts no CUDA, using a GPU does, and cuda_started() knows it."""
    row = f"CUDA has started, {when}"
    if not hardware.is_stand_in and not find_spec(module):
        pytest.skip(f"{module} is not installed")
    small = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found = hardware.ask(f"is_cpu = False\n{code}\n{STARTED}", **visible(hardware), **small)
    if found is None:
        pytest.skip(f"{module} is built for the CPU")
    table.confirm(row, found, expected)


@pytest.mark.gpu
def test_cuda_and_nvml_mean_the_same_gpu(hardware: Hardware, table: Table) -> None:
    """The UUID that CUDA has for a GPU is the one that NVML has: by it a GPU is taken back."""
    code = (
        "import ctypes, json\n"
        "from reserve_gpu.gpus.cuda_environment import cuda_uuids\n"
        "ctypes.CDLL('libcuda.so.1').cuInit(0)\n"
        "print(json.dumps(cuda_uuids()))"
    )
    uuids = hardware.ask(code, **visible(hardware))
    uuid = nvml(hardware, "print(json.dumps(pynvml.nvmlDeviceGetUUID(handle)))")
    is_same = uuids == [uuid.lower().removeprefix("gpu-")]
    table.confirm("CUDA and NVML have the same UUID for a GPU", is_same, expected=True)


@pytest.mark.gpu
def test_memory_of_an_idle_gpu(hardware: Hardware, table: Table) -> None:
    """The memory in use on an idle GPU is below what counts as use, by either version."""
    one, used, reserved, total = nvml(
        hardware,
        "v1 = pynvml.nvmlDeviceGetMemoryInfo(handle)\n"
        "v2 = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)\n"
        "print(json.dumps([n >> 20 for n in (v1.used, v2.used, v2.reserved, v2.total)]))",
    )
    table.note("memory of an idle GPU, v1", f"{one} MiB used of {total}")
    table.note("memory of an idle GPU, v2", f"{used} MiB used and {reserved} reserved of {total}")
    state = state_of(hardware)
    table.confirm("an idle GPU is judged idle", state == "free", expected=True)


def state_of(hardware: Hardware) -> str:
    """Return the state of the GPU of these tests, as --status shows it."""
    code = "import json, reserve_gpu; print(json.dumps(reserve_gpu.status().to_dict()))"
    devices = hardware.ask(code)["devices"]
    return next(str(d["state"]) for d in devices if d["index"] == hardware.index)


@pytest.mark.gpu
def test_process_lists(hardware: Hardware, table: Table) -> None:
    """A process with a CUDA context is listed, by its own pid, and makes the GPU busy."""
    code = f"print(json.dumps([[p.pid, p.usedGpuMemory] for p in {LISTED}]))"
    before = nvml(hardware, code)
    with hardware.child(**visible(hardware)) as child:
        assert child.run(COMPUTE).error is None
        with_ours = nvml(hardware, code)
        state = state_of(hardware)
    new = [entry for entry in with_ours if entry not in before]
    table.note("compute processes without the test process", len(before))
    sizes = ", ".join("memory unknown" if m is None else f"{m >> 20} MiB" for _, m in new)
    table.note(
        "compute processes with the test process", f"{len(with_ours)}{sizes and f'; ours: {sizes}'}"
    )
    pids = [pid for pid, _ in new]
    table.note("the test process is listed with its pid", child.pid in pids)
    # Where a container hides processes, memory decides: a bare context may be too small for that.
    table.note("a GPU with the test process is judged busy", f"{state == 'busy'} ({state})")
    assert child.pid in pids or not pids, "a list with other pids than ours"
    assert state == "busy" or not pids


TIMES = f"""
import json, os, time, pynvml
READINGS = {list(READINGS.items())!r}
def took(code):
    start = time.perf_counter()
    try:
        value = eval(code)
    except pynvml.NVMLError as error:
        return None, str(error)
    return value, f'{{(time.perf_counter() - start) * 1000:.2f}} ms'
_, started = took('pynvml.nvmlInit()')
handle, first = took("pynvml.nvmlDeviceGetHandleByIndex(int(os.environ['GPU']))")
mode, _ = took('pynvml.nvmlDeviceGetPersistenceMode(handle)')
print(json.dumps([started, first, mode, {{name: took(code)[1] for name, code in READINGS}}]))
"""


@pytest.mark.gpu
def test_times(hardware: Hardware, table: Table) -> None:
    """Starting NVML, the first handle and each reading come to an end, in a time that is noted."""
    started, first, mode, readings = hardware.ask(TIMES, GPU=str(hardware.index))
    table.note("persistence mode", {0: "off", 1: "on"}.get(mode, "not reported"))
    table.note("time of nvmlInit", started)
    table.note("time of the first handle", first)
    for name, took in readings.items():
        table.note(f"NVML query time: {name}", took)
    assert started.endswith(" ms")
    assert first.endswith(" ms")


@pytest.mark.gpu
def test_check(hardware: Hardware, table: Table) -> None:
    """After %reserve_gpu each framework for CUDA sees the reserved GPU and no other."""
    done = hardware.ipython(f"%reserve_gpu {hardware.index}", CHECK)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout[done.stdout.index("{") :])["frameworks"]
    for row in rows:
        reason = row["reason"] and f": {row['reason']}"
        found = f"{row['version']}, {row['state']}{reason or ''}"
        if row["state"] != "not installed":
            table.note(f"%reserve_gpu, then --check: {row['name']}", found)
    assert rows[0]["state"] == "fits"
    for row in rows:
        assert row["state"] in ("fits", "fails", "not installed") or not row["is_built_for_cuda"]


@pytest.mark.gpu
def test_a_second_kernel_is_refused(hardware: Hardware, table: Table) -> None:
    """While one kernel holds the GPU, another is refused, and told which process it is."""
    with hardware.kernel() as first, hardware.kernel() as second:
        assert first.run(f"%reserve_gpu {hardware.index}").error is None
        pid = first.pid
        refused = second.run(f"%reserve_gpu {hardware.index}")
        seen = second.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])").stdout
    found = f"{refused.error}, CUDA_VISIBLE_DEVICES={seen.strip()!r}"
    table.note("a second kernel is refused", found)
    assert refused.error == "NoFreeDeviceError"
    assert f"(pid {pid})" in refused.shown
    assert seen == "\n"


WORKERS = """
import json, os, time
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.gpus.usage import recent_use
from reserve_gpu.system import procfs
with Nvml() as gpus:
    found = gpus.use_samples(gpus.devices(int(os.environ['GPU']))[0])
if found is not None:
    now = procfs.now()
    found = recent_use(found, now.later(-2.0), now, time.monotonic())
print(json.dumps(None if found is None else sorted(found)))
"""


@pytest.mark.gpu
def test_who_has_worked(hardware: Hardware, table: Table) -> None:
    """The driver tells who computes on a GPU, and not who only has a context there."""
    gpu = str(hardware.index)
    with hardware.child(**visible(hardware)) as child:
        assert child.run(COMPUTE).error is None
        time.sleep(4)
        quiet = hardware.ask(WORKERS, GPU=gpu)
        before = hardware.scenario.read_text()
        if hardware.is_stand_in:
            hardware.write(before.replace("\ngpu\n", "\ngpu\nutilisation 40\n"))
        child.run("import time; end = time.time() + 4")
        child.send("while time.time() < end: work()")
        time.sleep(2)
        working = hardware.ask(WORKERS, GPU=gpu)
        child.answer()
        hardware.write(before)
    rows = [row for row in ROWS if row.startswith("idle: ")]
    table.confirm(rows[0], child.pid in (quiet or []), expected=False)
    table.confirm(rows[1], child.pid in (working or []), expected=True)


@pytest.mark.gpu
def test_free_after_kill(hardware: Hardware, table: Table) -> None:
    """After kill -9 of a process that computes on the GPU, another one can reserve it."""
    with hardware.child() as holder, hardware.child(**visible(hardware)) as next_one:
        assert holder.reserve(f"'{hardware.index}'").error is None
        assert holder.run(COMPUTE).error is None
        assert next_one.reserve().error == "NoFreeDeviceError"
        uuid = holder.run("reserve_gpu.current().devices[0].uuid").value
        (lock,) = hardware.locks.glob(f"{uuid}*.lock")
        start = time.perf_counter()
        holder.process.kill()
        with lock.open("rb") as file:
            while not is_free(file):
                assert time.perf_counter() - start < 60
        lock_s = time.perf_counter() - start
        while next_one.reserve().error:
            assert time.perf_counter() - start < 60
        device_s = time.perf_counter() - start
        holder.process.wait(60)
    table.note("lock free after kill -9", f"{lock_s * 1000:.0f} ms")
    table.note("GPU reserved again after kill -9", f"{device_s * 1000:.0f} ms")
    assert state_of(hardware) == "free"


# The room that there is for a part, to who is refused all of the GPU as one.
ROOM = """
(row,) = [row for row in reserve_gpu.status().rows if row.device.number == {index!r}]
most_mib = row.device.memory_mib - (row.device.reserve_mib or 0)
try: reserve_gpu.reserve({index!r}, memory=f'{{most_mib}}MiB')
except reserve_gpu.NoFreeDeviceError as error: left = error.rows[0].promisable_mib
left
"""
# What the holder of a part uses, None where that can't be seen.
USES = """
(row,) = [row for row in reserve_gpu.status().rows if row.device.number == {index!r}]
row.holders[0].used_mib
"""
# 1500 MiB beside a context; then what is free for CUDA, in MiB.
USE = """
import ctypes
cuda, context, address = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(), ctypes.c_uint64()
assert not cuda.cuInit(0) and not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
assert not cuda.cuCtxSetCurrent(context)
assert not cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(1500 << 20))
free, total = ctypes.c_size_t(), ctypes.c_size_t()
cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) or free.value >> 20
"""
FREE = "print(pynvml.nvmlDeviceGetMemoryInfo(handle).free >> 20)"


@pytest.mark.gpu
def test_parts(hardware: Hardware, table: Table) -> None:
    """What is left beside a part can be had, and no more; what is used of it is seen by NVML."""
    index = str(hardware.index)
    with hardware.child() as holder, hardware.child() as other:
        assert holder.reserve(f"{index!r}, memory='1000MiB'").error is None
        left = other.run(ROOM.format(index=index)).value
        most = other.run("most_mib").value
        table.note(
            "a part: memory available next to a part of 1000 MiB", f"{left:.0f} of {most} MiB"
        )
        refused = other.reserve(f"{index!r}, memory='{left + 1}MiB'").error
        given = other.reserve(f"{index!r}, memory='{left}MiB'").error
        row = "a part: exactly the available memory can be reserved"
        table.confirm(row, [refused, given], ["NoFreeDeviceError", None])
        other.run("reserve_gpu.release()")
        free = holder.run(USE).value
        by_nvml = nvml(hardware, FREE)
        table.note(
            "a part: free memory according to CUDA and NVML", f"{free} MiB, and {by_nvml} MiB"
        )
        uses = other.run(USES.format(index=index)).value
        table.note("a part: its holder's memory use according to NVML", uses and f"{uses:.0f} MiB")
        later = other.run(ROOM.format(index=index)).value
        row = "a part: memory available once its holder uses 1500 MiB and a context"
        table.note(row, f"{later:.0f} of {most} MiB")
        start = time.perf_counter()
        holder.kill()
        while other.reserve(f"{index!r}, memory='{left}MiB'").error:
            assert time.perf_counter() - start < 60
        took_s = time.perf_counter() - start
        table.note("a part: time until available again after kill -9", f"{took_s * 1000:.0f} ms")
    assert later <= left - 500
    assert uses is None or uses >= 1500


@pytest.mark.gpu
def test_caps(hardware: Hardware, table: Table) -> None:
    """Within a part the frameworks that read a variable have one that caps them."""
    done = hardware.ipython(f"%reserve_gpu {hardware.index} --memory 2GB", CHECK)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout[done.stdout.index("{") :])["frameworks"]
    there = [row for row in rows if row["state"] != "not installed"]
    for row in there:
        table.note(f"a part, then --check: {row['name']}", row["cap"] or "not capped")
    assert there
    for row in there:
        assert row["cap"] or row["name"] not in {"JAX", "CuPy"}, row


CONTEXT = """
import ctypes, os, pynvml
if {has_torch}:
    import torch
    torch.cuda.init()
    x = torch.arange(100, dtype=torch.float32, device='cuda:0')
    x @ x
else:
    cuda, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p()
    assert not cuda.cuInit(0) and not cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex({index})
processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
used = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
counted = getattr(torch.cuda, 'memory_reserved', int)() if {has_torch} else 0
(used[0] - counted) >> 20 if used and used[0] else None
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("has_torch", "row"),
    [(False, "bare"), (True, "with PyTorch, without PyTorch's own allocations")],
)
def test_the_size_of_a_context(
    hardware: Hardware, table: Table, row: str, *, has_torch: bool
) -> None:
    """The allowance for a CUDA context is at least what one takes here."""
    with hardware.child() as child:
        assert child.reserve(f"{str(hardware.index)!r}").error is None
        answer = child.run(CONTEXT.format(has_torch=has_torch, index=hardware.index))
    if answer.error and has_torch:
        pytest.skip(f"no PyTorch for CUDA: {answer.text[:80]}")
    found = "not reported" if answer.value is None else f"{answer.value} MiB"
    table.note(f"size of a CUDA context: {row}", found)
    assert not answer.error, answer.text
    assert answer.value is None or answer.value <= DEFAULT_CONTEXT_MIB


def is_free(file: BinaryIO) -> bool:
    """Tell whether nobody holds the lock; releases it at once."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def test_the_document_has_every_row() -> None:
    """docs/hardware.md has a line for everything that the tests look at, in their order."""
    lines = (ROOT / "docs" / "hardware.md").read_text().splitlines()
    cells = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")]
    found = [cell for cell in cells if cell in ROWS]
    assert found == list(ROWS)
    assert {f"%reserve_gpu, then --check: {name}" for name in FRAMEWORKS} <= set(ROWS)


@pytest.mark.full
def test_they_run_to_their_end() -> None:
    """On the stand-in driver every test of the hardware passes, and fills its rows."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"}
    argv = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--gpu-stand-in", "-n0", __file__]
    done = subprocess.run(
        [*argv, "-p", "no:cacheprovider"],
        env=environ, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = dict(line[2:-2].split(" | ", 1) for line in done.stdout.splitlines() if " | " in line)
    assert [row for row in ROWS if found.get(row) in (None, NOT_CONFIRMED)] == []
