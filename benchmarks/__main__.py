"""What %reserve_gpu costs, against the bare NVML calls that nobody can do without.

Runs on the stand-in driver, eight idle GPUs. Prints medians in milliseconds and their ratios; a
second run on a busy machine gives other milliseconds and much the same ratios.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import driver

ROUNDS = 25
# An installed package is compiled; without this, a checkout might be compiled anew at every start.
UNUSUAL = ("PYTHONDONTWRITEBYTECODE",)
ROOT = Path(__file__).parent.parent

# Import the bindings, initialise, one handle, its UUID, process count, memory, shut down.
FLOOR = """
import pynvml, ctypes
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
pynvml.nvmlDeviceGetUUID(handle)
pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
pynvml.nvmlShutdown()
"""
RESERVE = "import reserve_gpu; reserve_gpu.reserve()"

# In a running kernel: IPython and what it imports are there already.
IN_SHELL = """
import time
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
{before}
start = time.perf_counter()
{code}
print((time.perf_counter() - start) * 1e3)
"""


def main() -> None:
    """Measure, and print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        environ = _environment(Path(folder))
        load = _inside(environ, 'shell.run_line_magic("load_ext", "reserve_gpu")')
        _row("%load_ext reserve_gpu in a running shell", load, bar="3 ms")
        loaded = 'shell.run_line_magic("load_ext", "reserve_gpu")'
        _compare(
            "the first %reserve_gpu in a running shell",
            *_alternate(
                lambda: _inside_once(environ, FLOOR),
                lambda: _inside_once(
                    environ, 'shell.run_line_magic("reserve_gpu", "")', before=loaded
                ),
            ),
            bar=1.25,
        )
        _compare(
            "python -c 'import reserve_gpu; reserve_gpu.reserve()'",
            *_alternate(lambda: _process(environ, FLOOR), lambda: _process(environ, RESERVE)),
            bar=1.5,
        )


def _environment(folder: Path) -> dict[str, str]:
    extra = {
        "HOME": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": str(ROOT),
        "RESERVE_GPU_LOCK_DIR": str(folder / "locks"),
    }
    base = {name: value for name, value in os.environ.items() if name not in UNUSUAL}
    return driver.environment(driver.SCENARIOS / "eight.txt", base=base | extra)


def _alternate(floor: object, ours: object) -> tuple[list[float], list[float]]:
    """Measure both in turn, so that whatever else the machine does meets both alike."""
    pairs = [(floor(), ours()) for _ in range(ROUNDS)]  # type: ignore[operator]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _inside(environ: dict[str, str], code: str) -> list[float]:
    return [_inside_once(environ, code) for _ in range(ROUNDS)]


def _inside_once(environ: dict[str, str], code: str, before: str = "") -> float:
    """Milliseconds that code takes in a running shell."""
    return float(_run(environ, IN_SHELL.format(code=code, before=before)).splitlines()[-1])


def _process(environ: dict[str, str], code: str) -> float:
    """Milliseconds from the start of a Python process that runs code to its end."""
    start = time.perf_counter()
    _run(environ, code)
    return (time.perf_counter() - start) * 1e3


def _run(environ: dict[str, str], code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, text=True, capture_output=True, check=True
    )
    return done.stdout


def _row(what: str, times: list[float], bar: str) -> None:
    print(f"{what}: {statistics.median(times):.2f} ms (at most {bar})")


def _compare(what: str, floor: list[float], ours: list[float], bar: float) -> None:
    bare, full = statistics.median(floor), statistics.median(ours)
    print(
        f"{what}: {full:.1f} ms, bare NVML {bare:.1f} ms, ratio {full / bare:.2f} (at most {bar})"
    )


if __name__ == "__main__":
    main()
