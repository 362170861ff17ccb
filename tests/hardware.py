"""The machine with a real GPU that the tests marked `gpu` run on, and the table of what they find.

With `--gpu-stand-in` it is one of the stand-in driver, to see that the tests run to their end.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from tests.machine import ROOT, Child, Machine

if TYPE_CHECKING:
    from pathlib import Path

NOT_CONFIRMED = "not confirmed"
FRAMEWORKS = ("PyTorch", "TensorFlow", "JAX", "CuPy", "Numba")
READINGS = {  # what a reservation and a status ask of a GPU
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
    "utilisation": "pynvml.nvmlDeviceGetUtilizationRates(handle)",
    "temperature": "pynvml.nvmlDeviceGetTemperature(handle, 0)",
    "power": "pynvml.nvmlDeviceGetPowerUsage(handle)",
    "power limit": "pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)",
}
ROWS = (
    "cuDeviceGetCount before cuInit",
    "cuDeviceGetCount after cuInit",
    "cuDeviceGetCount in a child forked after cuInit",
    "cuInit with CUDA_VISIBLE_DEVICES=''",
    "cuDeviceGetCount after that cuInit",
    "a second cuInit, after CUDA_VISIBLE_DEVICES was set",
    "CUDA has started, after `import torch`",
    "CUDA has started, after `torch.cuda.is_available()`",
    "CUDA has started, after `import jax`",
    "CUDA has started, after `jax.devices()`",
    "CUDA has started, after `import cupy`",
    "CUDA has started, after CuPy counts devices",
    "CUDA has started, after `from numba import cuda`",
    "CUDA has started, after Numba lists devices",
    "CUDA and NVML have the same UUID for a GPU",
    "memory of an idle GPU, v1",
    "memory of an idle GPU, v2",
    "an idle GPU is judged idle",
    "compute processes without the test process",
    "compute processes with the test process",
    "the test process is listed with its pid",
    "a GPU with the test process is judged busy",
    "persistence mode",
    "time of nvmlInit",
    "time of the first handle",
    *(f"NVML query time: {name}" for name in READINGS),
    *(f"%reserve_gpu, then --check: {name}" for name in ("CUDA driver", *FRAMEWORKS)),
    "a second kernel is refused",
    "lock free after kill -9",
    "GPU reserved again after kill -9",
    "idle: the driver reports a process with only a context as active",
    "idle: the driver reports a computing process as active",
    "a part: memory available next to a part of 1000 MiB",
    "a part: exactly the available memory can be reserved",
    "a part: free memory according to CUDA and NVML",
    "a part: its holder's memory use according to NVML",
    "a part: memory available once its holder uses 1500 MiB and a context",
    "a part: time until available again after kill -9",
    *(f"a part, then --check: {name}" for name in ("CUDA driver", *FRAMEWORKS)),
    "size of a CUDA context: bare",
    "size of a CUDA context: with PyTorch, without PyTorch's own allocations",
)


COUNT = """
import ctypes
nvml, count = ctypes.CDLL('libnvidia-ml.so.1'), ctypes.c_uint()
assert not nvml.nvmlInit_v2() and not nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
assert count.value
"""


class Table:
    """What was found, by row."""

    def __init__(self) -> None:
        self.title = ""
        self.found: dict[str, str] = {}

    def note(self, row: str, found: object) -> None:
        """Enter what was found."""
        assert row in ROWS, row
        self.found[row] = str(found)

    def confirm(self, row: str, found: object, expected: object) -> None:
        """Enter what was found; fail where the package relies on something else."""
        is_so = found == expected
        self.note(row, f"{found}" if is_so else f"{found}, but {expected} was expected")
        assert is_so, f"{row}: {self.found[row]}"

    def __str__(self) -> str:
        lines = [f"| {row} | {self.found.get(row, NOT_CONFIRMED)} |" for row in ROWS]
        return "\n".join([self.title, "", "| test | result |", "| --- | --- |", *lines])


class Hardware(Machine):
    """The machine with a real GPU.

    index: of the GPU that the tests may use, held in the machine's own lock directory meanwhile.
    """

    limit_s = 240  # frameworks take their time to start

    def __init__(self, folder: Path, *, is_stand_in: bool) -> None:
        self.is_stand_in = is_stand_in
        super().__init__(folder)
        (folder / "contexts").mkdir()
        self.write(f"contexts {folder / 'contexts'}\n{self.scenario.read_text()}")
        self.index = 0

    def environ(self, **extra: str) -> dict[str, str]:
        """Return the person's environment, without our variables and IPython's configuration."""
        found = super().environ()
        path = [str(ROOT), str(ROOT / "tests" / "standins") if self.is_stand_in else ""]
        path.append(os.environ.get("PYTHONPATH", ""))
        found["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        return {**found, "HOME": os.environ.get("HOME", "/"), **extra}

    def on_driver(self, base: dict[str, str]) -> dict[str, str]:
        return super().on_driver(base) if self.is_stand_in else base

    def ask(self, code: str, *arguments: str, **extra: str) -> Any:
        """Run code in a fresh process; what its last line prints, as JSON."""
        done = self.command(sys.executable, "-c", code, *arguments, **extra)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    def keep_off(self) -> Child | str:
        """Hold an idle GPU against everybody else on this machine; why not, if that can't be."""
        limit = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
        environ = self.environ(**{k: v for k, v in os.environ.items() if k in limit})
        if self.is_stand_in:
            environ["RESERVE_GPU_LOCK_DIR"] = str(self.folder / "keeper")
        else:
            del environ["RESERVE_GPU_LOCK_DIR"]
        child = Child(environ, self.folder)
        answer = child.run("held = reserve_gpu.reserve()\nheld.devices[0].index")
        if answer.error:
            child.kill()
            assert not self.is_stand_in, answer.text
            return answer.text.splitlines()[0]
        self.index = answer.value
        return child

    def title(self) -> str:
        """Return what this machine is, and the date."""
        try:
            done = subprocess.run(
                ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            gpu = "; ".join(dict.fromkeys(done.stdout.strip().splitlines())) or "?"
        except OSError:
            gpu = "?"
        what = "the stand-in driver, no hardware" if self.is_stand_in else f"{gpu} (driver)"
        date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        return f"{what}; Linux {platform.release()}, Python {platform.python_version()}; {date}"


def has_driver() -> bool:
    """Tell whether there is a real NVIDIA driver with a GPU; asked in a process of its own."""
    if os.environ.get("STAND_IN_SCENARIO"):
        return False
    argv = [sys.executable, "-c", COUNT]
    return not subprocess.run(argv, capture_output=True, timeout=120, check=False).returncode
