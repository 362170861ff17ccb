"""What %reserve_gpu costs, against the bare NVML calls that nobody can do without.

Runs on the stand-in driver, eight idle GPUs, in fresh processes and kernels. Prints medians in
milliseconds and their ratios; a run on a busy machine gives other milliseconds and much the same
ratios.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests import driver
from tests.machine import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 21
ROOT = Path(__file__).parent.parent
# An installed package is compiled; without this, a checkout might be compiled anew at every start.
UNUSUAL = ("PYTHONDONTWRITEBYTECODE",)

# Import the bindings, initialise, one handle, its UUID, process count, memory, shut down.
FLOOR = """
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
pynvml.nvmlDeviceGetUUID(handle)
pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
pynvml.nvmlShutdown()
"""
LOAD = "get_ipython().run_line_magic('load_ext', 'reserve_gpu')"
MAGIC = "get_ipython().run_line_magic('reserve_gpu', '')"
API = "import reserve_gpu; reserve_gpu.reserve()"
TIMED = """
import time
_start = time.perf_counter()
{code}
_ms = (time.perf_counter() - _start) * 1e3
print("ms", _ms)
"""
SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell({timed!r})
"""


def main() -> None:
    """Measure, and print a line for each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = environment(folder)
        load = [in_shell(environ, LOAD) for _ in range(ROUNDS)]
        print(f"%load_ext in a running shell: {statistics.median(load):.1f} ms (at most 3)")
        compare(
            "the first %reserve_gpu in a running kernel",
            lambda: in_kernel(folder, environ, FLOOR),
            lambda: in_kernel(folder, environ, MAGIC, before=LOAD),
            bar=1.25,
        )
        compare(
            f"python -c '{API}'",
            lambda: as_process(environ, FLOOR),
            lambda: as_process(environ, API),
            bar=1.5,
        )


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process on a machine of eight idle GPUs."""
    extra = {
        "HOME": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": str(ROOT),
        "RESERVE_GPU_LOCK_DIR": str(folder / "locks"),
    }
    base = {name: value for name, value in os.environ.items() if name not in UNUSUAL}
    return driver.environment(driver.SCENARIOS / "eight.txt", base=base | extra)


def compare(
    what: str, floor: Callable[[], float], ours: Callable[[], float], *, bar: float
) -> None:
    """Measure both in turn, so that whatever else the machine does meets both alike."""
    pairs = [(floor(), ours()) for _ in range(ROUNDS)]
    bare, full = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = f"{full / bare:.2f} times bare NVML's {bare:.1f} ms"
    print(f"{what}: {full:.1f} ms, {ratio} (at most {bar})")


def in_shell(environ: dict[str, str], code: str) -> float:
    """Milliseconds that code takes in a running IPython shell."""
    return milliseconds(run(environ, SHELL.format(timed=TIMED.format(code=code))))


def in_kernel(folder: Path, environ: dict[str, str], code: str, before: str = "") -> float:
    """Milliseconds that code takes in a fresh kernel, once it has run the code before."""
    kernel = Kernel(environ, folder)
    try:
        kernel.run(before)
        return milliseconds(kernel.run(TIMED.format(code=code)).stdout)
    finally:
        kernel.close()


def as_process(environ: dict[str, str], code: str) -> float:
    """Milliseconds from the start of a Python process that runs code to its end."""
    start = time.perf_counter()
    run(environ, code)
    return (time.perf_counter() - start) * 1e3


def milliseconds(output: str) -> float:
    """The number that TIMED printed."""
    return float(output.rsplit(maxsplit=1)[-1])


def run(environ: dict[str, str], code: str) -> str:
    """What a Python process that runs code prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, text=True, capture_output=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
