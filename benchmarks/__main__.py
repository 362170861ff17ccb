"""Benchmark %reserve_gpu against its alternatives, and compare the results with required values.

    python -m benchmarks [--quick] [--real | NAME ...]

The benchmarks use the stand-in driver, or with --real the installed driver. They start new
processes and kernels. They print the section "A run" of docs/benchmarks.md: a line about the
machine, and tables of the results and the required values. Programs that are compared take turns,
so that the machine's speed and load hardly affect the ratio of their times. This command installs
the required packages:

    pip install '.[test,benchmarks]'
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks import choosing, growth, history, hosts, real, rush, shell, table, waiting
from tests.support.hardware.machine import missing_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GROUPS: dict[str, Callable[..., Iterator[table.Row | table.Growth]]] = {
    "load": shell.load,
    "start": shell.start,
    "first": choosing.first,
    "last": choosing.last,
    "nothing": choosing.nothing,
    "status": choosing.status,
    "hosts": hosts.hosts,
    "history": history.history,
    "handover": waiting.handover,
    "queue": waiting.queue,
    "restart": waiting.restart,
    "wait": waiting.wait,
    "promise": waiting.idle_limit,
    "top": waiting.top,
    "memory": waiting.memory,
    "rush": rush.rush,
    "growth": growth.growth,
}
NEEDED = ("gpustat", "ipykernel", "jupyter_client", "nvitop")
PACKAGES = ("ipython", "nvidia-ml-py", "gpustat", "nvitop")


def main() -> None:
    """Run the selected groups of benchmarks, and print each row as soon as it is complete."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="run only a few rounds, as a quick test"
    )
    parser.add_argument(
        "--real", action="store_true", help="use the machine's only GPU, which must be idle"
    )
    parser.add_argument("groups", nargs="*", metavar="NAME", help=", ".join(GROUPS))
    arguments = parser.parse_args()
    groups = {"real": real.real} if arguments.real else GROUPS
    if unknown := sorted(set(arguments.groups) - set(groups)):
        parser.error(f"no such group: {', '.join(unknown)}; choose from {', '.join(groups)}")
    if arguments.real and (problem := missing_driver()):
        parser.error(problem)
    if missing := [name for name in NEEDED if not find_spec(name)]:
        parser.error(f"missing packages: {', '.join(missing)}; pip install '.[test,benchmarks]'")
    print(environment(), flush=True)
    head = ""
    for name in arguments.groups or groups:
        start = time.monotonic()
        for row in groups[name](quick=arguments.quick):
            if head != row.head:
                head = row.head
                print(f"\n{head}")
            print(row, flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)


def environment() -> str:
    """Return the line of docs/benchmarks.md that lists the machine, versions, and month."""
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    month = time.strftime("%B %Y")
    return f"{platform.machine()}, {cores} cores, {system}, Python {python}, {packages}; {month}."


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
