"""Run the hardware tests: `python -m tests.hardware` in the root of a clone."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NEEDED = ("pytest", "pynvml", "IPython", "ipykernel", "jupyter_client")
INSTALL = "python -m pip install -e '.[test]'"
DESCRIBE_S = 120


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tests.hardware",
        description="Try reserve_gpu on a real GPU. One idle GPU is reserved for a few minutes; no "
        "setting of it is changed. The result is printed, and written as Markdown.",
    )
    made.add_argument("--stand-in", action="store_true", help="try the tests without a GPU")
    made.add_argument("-k", metavar="EXPR", help="run only matching tests, as in pytest")
    made.add_argument("--output", default="hardware-report.md", metavar="FILE")
    made.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="total limit")
    made.add_argument("--mps", action="store_true", help="start and stop the MPS daemon (as root)")
    made.add_argument("--describe", action="store_true", help="print all values of NVML instead")
    return made


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 if a promise is broken, 2 if something is missing."""
    options = parser().parse_args(arguments)
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        print(f"{', '.join(missing)} not installed: {INSTALL}", file=sys.stderr)
        return 2
    from tests.support.hardware.machine import missing_driver

    reason = "" if options.stand_in else missing_driver()
    if reason:
        print(f"No NVIDIA driver with a GPU: {reason}", file=sys.stderr)
        return 2
    return describe(options) if options.describe else run(options)


def run(options: argparse.Namespace) -> int:
    """Run the tests in this process."""
    import pytest

    words = ["-m", "gpu", "-q", "-rN", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
    words += ["-W", "ignore"]  # warnings of plugins that happen to be installed
    words += ["--numprocesses=0", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    words += [f"--gpu-limit={options.limit}", f"--gpu-report={os.path.abspath(options.output)}"]
    words += ["--gpu-stand-in"] if options.stand_in else []
    words += ["--gpu-mps"] if options.mps else []
    words += ["-k", options.k] if options.k else []
    return int(pytest.main([*words, str(Path(__file__).parent)]))


def describe(options: argparse.Namespace) -> int:
    """Print NVML's values in a process that can be given up if the driver hangs."""
    from tests.support.hardware.describe import environment

    argv = [sys.executable, "-m", "tests.support.hardware.describe"]
    process = subprocess.Popen(argv, cwd=ROOT, env=environment(is_stand_in=options.stand_in))
    try:
        return process.wait(min(options.limit, DESCRIBE_S))
    except subprocess.TimeoutExpired:
        process.kill()
        print("\nThe last call did not return.", file=sys.stderr)
        return 1


sys.exit(main(sys.argv[1:]))
