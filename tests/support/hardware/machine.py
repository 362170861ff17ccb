"""A machine with a real GPU, and programs that use CUDA without a framework on it.

With `--gpu-stand-in`, the machine has the stand-in driver. This shows that the tests work.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import site
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import driver
from tests.support.machine import ROOT, Child, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

H100S = Path(__file__).parents[2] / "hardware" / "two_h100s.txt"
CLI = (sys.executable, "-m", "reserve_gpu")
USER = "nobody"  # the ordinary user; no user is created
PACKAGES = {"PyTorch": "torch", "JAX": "jax", "CuPy": "cupy", "Numba": "numba"}

# Code for a child process. A loop is stopped by the time limit of its test.
CUDA = """
import ctypes, os, time
cuda, _context, _taken = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(), []
def ok(code): assert not code, f'CUDA returned {code}'
def count():
    return cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
def start():
    begin = time.monotonic(); code = cuda.cuInit(0)
    return [code, begin, time.monotonic()]
def context():
    begin = time.monotonic()
    ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(_context), 0))
    ok(cuda.cuCtxSetCurrent(_context))
    return [begin, time.monotonic()]
def take(mib):
    address = ctypes.c_uint64()
    ok(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(mib << 20)))
    _taken.append((address, min(mib, 64) << 18))
def work(seconds=0.0):
    end = time.monotonic() + seconds
    while True:
        for address, words in _taken:
            ok(cuda.cuMemsetD32_v2(address, 7, ctypes.c_size_t(words)))
        ok(cuda.cuCtxSynchronize())
        if time.monotonic() >= end: return
def free_mib():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ok(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    return free.value >> 20
"""
COMPUTE = f"{CUDA}start(); context(); take(1); work()"
CHECK = "import json, reserve_gpu; print(json.dumps(reserve_gpu.check().to_dict()))"

# Code for the process that reads NVML. `moment` returns the first time when a condition is true.
READER = """
import fcntl, os, time, pynvml as nvml
nvml.nvmlInit()
handle = nvml.nvmlDeviceGetHandleByIndex({index})
def ask(name, *arguments):
    try: return getattr(nvml, name)(*arguments)
    except nvml.NVMLError as error: return f'{{type(error).__name__}}'
    except AttributeError: return 'not in these bindings'
def sizes():
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {{process.pid: process.usedGpuMemory for process in processes}}
def mib(pid):
    size = sizes().get(pid)
    return None if size is None else size >> 20
def used_v1(): return nvml.nvmlDeviceGetMemoryInfo(handle).used >> 20
def used(): return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used >> 20
def is_gone(pid):
    try: return open(f'/proc/{{pid}}/stat').read().rpartition(')')[2].split()[0] == 'Z'
    except (FileNotFoundError, ProcessLookupError): return True
def is_unlocked(path):
    with open(path, 'rb') as file:
        try: fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError: return False
    return True
def moments(conditions, limit_s):
    found, end = dict.fromkeys(conditions), time.monotonic() + limit_s
    while None in found.values() and time.monotonic() < end:
        for name, condition in conditions.items():
            if found[name] is None and condition(): found[name] = time.monotonic()
    return found
"""

FIRST = """
import json, sys, time, pynvml
times = [time.perf_counter()]
pynvml.nvmlInit()
times.append(time.perf_counter())
pynvml.nvmlDeviceGetHandleByIndex(int(sys.argv[1]))
times.append(time.perf_counter())
print(json.dumps([times[1] - times[0], times[2] - times[1]]))
"""
COUNT = """
import ctypes
nvml, count = ctypes.CDLL('libnvidia-ml.so.1'), ctypes.c_uint()
code = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
assert not code, f'NVML returned {code}'
assert count.value, 'the driver has no GPU'
"""


class Hardware(Machine):
    """The machine with a real GPU. One GPU is reserved for the tests.

    Attributes:
        index: The number of the reserved GPU.
        count: The number of GPUs that the driver reports.
        uuid: Its UUID.
        start_s: The seconds that nvmlInit and the first handle took in a new process.
        large_mib: About 60 % of its memory. Less on the stand-in driver, which uses host memory.
    """

    limit_s = 120  # frameworks start slowly from a cold disk

    def __init__(self, folder: Path, *, is_stand_in: bool) -> None:
        self.is_stand_in = is_stand_in
        super().__init__(folder)
        (folder / "contexts").mkdir()
        if not os.geteuid():  # for the ordinary user
            folder.chmod(0o1777)
            (folder / "contexts").chmod(0o1777)
        self.write(f"contexts {folder / 'contexts'}\n{H100S.read_text()}")
        self.index, self.count, self.uuid, self.large_mib = 0, 1, "", 0
        self.start_s = (0.0, 0.0)
        self._idle_mib = 0
        self._children: list[Child] = []
        self._reader: Child | None = None

    def environ(self, **extra: str) -> dict[str, str]:
        """Return the user's environment, without variables and configuration of reserve_gpu.

        If the machine has several GPUs, only the reserved one is visible.
        """
        found = super().environ() | self._import_path()
        found.pop("PYTHONDONTWRITEBYTECODE", None)  # imports would be slower than users see
        if self.count > 1:
            found |= self.visible()
        return found | extra

    def _import_path(self) -> dict[str, str]:
        """Return the variables with which another HOME finds the user's own packages."""
        path = [
            str(ROOT),
            str(ROOT / "tests" / "support" / "fake_frameworks") if self.is_stand_in else "",
        ]
        path.append(os.environ.get("PYTHONPATH", ""))
        found = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        return found | ({"PYTHONUSERBASE": base} if (base := site.getuserbase()) else {})

    def on_driver(self, base: dict[str, str]) -> dict[str, str]:
        return driver.environment(self.scenario, base=base) if self.is_stand_in else base

    def visible(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": str(self.index), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def has(self, module: str) -> bool:
        return self.is_stand_in or find_spec(module) is not None

    # -- the reserved GPU --

    def reserve(self) -> str:
        """Reserve an idle GPU in the machine's own lock directory.

        Returns:
            The reason why no GPU could be reserved, or an empty string.
        """
        self.count = self.ask(
            "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
        )
        child = Child(self._keeper_environ(), self.folder)
        self._children.append(child)
        answer = self._reserve_in(child)
        if isinstance(answer, str):
            return answer
        self.index, self.uuid, instance = answer
        if instance is not None:
            return f"GPU{self.index} is divided into MIG instances"
        self.start_s = self.ask(FIRST, str(self.index))  # the reader keeps the driver initialized
        self._load_frameworks()
        self._idle_mib, total = self.read(
            "[used(), nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20]"
        )
        self.large_mib = total * 6 // 10 if not self.is_stand_in else 8000
        return ""

    def _load_frameworks(self) -> None:
        """Read the frameworks from the disk in the background, before a test needs them."""
        child = Child(self.environ(CUDA_VISIBLE_DEVICES=""), self.folder)
        self._children.append(child)
        for name in PACKAGES.values():
            child.send(f"import {name}")

    def wait_until_free(self) -> None:
        """Wait until the driver has freed the memory of ended processes, but not for ever."""
        until(lambda: self.read(f"not sizes() and used() <= {self._idle_mib} + 64"))

    @contextmanager
    def second_gpu(self) -> Iterator[list[Any] | str]:
        """Reserve one more idle GPU; see `_reserve_in`."""
        child = Child(self._keeper_environ(), self.folder)
        try:
            yield self._reserve_in(child)
        finally:
            child.kill()

    def _reserve_in(self, child: Child) -> list[Any] | str:
        """Reserve an idle GPU in a process.

        Returns:
            Its index, UUID and instance; or the reason why no GPU could be reserved.
        """
        answer = child.run(
            "held = reserve_gpu.reserve(note='hardware tests')\n"
            "[held.devices[0].index, held.devices[0].uuid, held.devices[0].instance]"
        )
        if answer.error:
            return answer.text.splitlines()[0]
        found: list[Any] = answer.value
        return found

    def _keeper_environ(self) -> dict[str, str]:
        """Return the environment in which the tests are one user among others."""
        ours = {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "RESERVE_GPU_"))}
        names = ("RESERVE_GPU_LOCK_DIR", "RESERVE_GPU_CONFIG", "RESERVE_GPU_HISTORY")
        found = {k: v for k, v in Machine.environ(self).items() if k not in names} | ours
        found |= self._import_path()
        if self.is_stand_in:
            found["RESERVE_GPU_LOCK_DIR"] = str(self.folder / "keeper")
        return found

    def close(self) -> None:
        """End the processes of the tests that are still running."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.kill()

    # -- questions --

    def ask(self, code: str, *arguments: str, **extra: str) -> Any:
        """Run code in a new process, and return its last line of output, decoded from JSON."""
        done = self.command(sys.executable, "-c", code, *arguments, **extra)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    def read(self, code: str) -> Any:
        """Return the value of code in the process that reads NVML.

        The process stays alive, which also keeps the driver initialized without persistence mode.
        After a call that did not return, a new process replaces it.
        """
        reader, self._reader = self._reader, None
        if reader is None:
            reader = Child(self.environ(), self.folder)
            self._children.append(reader)
            answer = reader.run(READER.format(index=self.index))
            assert not answer.error, answer
        answer = reader.run(code)
        self._reader = reader
        assert not answer.error, f"{answer.error}: {answer.text}"
        return answer.value

    def pids(self) -> list[int]:
        """Return the pids in the GPU's list of compute processes."""
        found: list[int] = self.read("list(sizes())")
        return found

    def status(self) -> tuple[dict[str, Any], list[Any]]:
        """Return the GPU's row of `reserve-gpu status --json`, and the waiters."""
        done = self.command(*CLI, "status", "--json")
        found = json.loads(done.stdout[done.stdout.index("{") :])
        row = next(row for row in found["devices"] if row["index"] == self.index)
        return row, found["waiting"]

    def state(self) -> str:
        return str(self.status()[0]["state"])

    def title(self) -> str:
        """Return one line with the card, the driver, the date and the versions."""
        name, number = self.read(
            "[nvml.nvmlDeviceGetName(handle), nvml.nvmlSystemGetDriverVersion()]"
        )
        what = "stand-in driver, no hardware" if self.is_stand_in else f"driver {number}"
        return ", ".join([
            f"{name} (GPU{self.index} of {self.count}, reserved for this run)",
            what,
            f"{datetime.now(timezone.utc):%Y-%m-%d}",
            f"Python {platform.python_version()}",
            f"reserve_gpu {package_version()}",
            *(f"{name} {found}" for name in PACKAGES if (found := installed(PACKAGES[name]))),
            f"Linux {platform.release()}",
        ])  # fmt: skip

    # -- processes --

    @contextmanager
    def computing(self, mib: int = 0, *, visible: str = "") -> Iterator[Child]:
        """Start a process with a CUDA context and memory, without a reservation.

        Args:
            mib: The size of the memory.
            visible: CUDA_VISIBLE_DEVICES; the process uses its first GPU. Defaults to this GPU.
        """
        environ = self.visible() | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
        with self.child(**environ) as child:
            told = child.run(f"{COMPUTE}\ntake({mib}); work()" if mib else COMPUTE)
            assert not told.error, told.text
            yield child

    @contextmanager
    def user_child(self) -> Iterator[Child]:
        """Start a process of the ordinary user."""
        child = Child(self.environ(HOME="/nonexistent"), self.folder, *as_user())
        try:
            yield child
        finally:
            child.kill()

    def missing_user(self) -> str:
        """Start a process of the ordinary user; returns the problem, or an empty string."""
        if os.geteuid() or not shutil.which("setpriv"):
            return "needs root and setpriv"
        code = "import reserve_gpu, pynvml, IPython"
        done = self.command(*as_user(), sys.executable, "-c", code, HOME="/nonexistent")
        return done.stderr.strip()[-200:]


def as_user() -> tuple[str, ...]:
    return ("setpriv", f"--reuid={USER}", "--regid=65534", "--clear-groups")


def until(condition: Callable[[], object], limit_s: float = 15.0) -> float | None:
    """Wait until a condition is true; returns the number of seconds, or None after the limit."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > limit_s:
            return None
        time.sleep(0.05)
    return time.monotonic() - start


def seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"


def milliseconds(value: float | None) -> str:
    return "never" if value is None else f"{value * 1000:.0f} ms"


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def refusal(text: str) -> str:
    """Return the line of a refusal that says why, or else the last line."""
    lines = [line for line in text.splitlines() if line.startswith("No free GPU")]
    return lines[0] if lines else last_line(text)


def missing_driver() -> str:
    """Look for a real NVIDIA driver with a GPU; returns the problem, or an empty string."""
    if os.environ.get("STAND_IN_SCENARIO"):
        return "this is the stand-in driver: use --stand-in"
    argv = [sys.executable, "-c", COUNT]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        return last_line(process.communicate(timeout=60)[1])
    except subprocess.TimeoutExpired:
        process.kill()  # and don't wait: a process that is stuck in the driver does not end
        return "NVML did not answer within 60 s"


def package_version() -> str:
    import reserve_gpu

    return str(reserve_gpu.__version__)


def installed(module: str) -> str | None:
    try:
        return version(module)
    except PackageNotFoundError:
        return None
