"""What %reserve_gpu costs, beside what people would use instead, and whether that is little enough.

    python -m benchmarks [--quick] [NAME ...]

Runs on the stand-in driver, in fresh processes and kernels, and prints the section "A run" of
docs/benchmarks.md: the machine, and a table with a row for each bar. What is compared is measured
in turn, so on a machine that is slower or busier the ratios stay much the same.
Needs `pip install '.[test,benchmarks]'`.
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

from benchmarks import choosing, history, hosts, rush, shell, table, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GROUPS: dict[str, Callable[..., Iterator[table.Row]]] = {
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
    "promise": waiting.terms,
    "top": waiting.top,
    "memory": waiting.memory,
    "rush": rush.rush,
}
NEEDED = ("gpustat", "ipykernel", "jupyter_client", "nvitop")
PACKAGES = ("ipython", "nvidia-ml-py", "gpustat", "nvitop")


def main() -> None:
    """Run the groups and print their rows as they come."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    parser.add_argument("groups", nargs="*", metavar="NAME", help=", ".join(GROUPS))
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.groups) - set(GROUPS)):
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    if missing := [name for name in NEEDED if not find_spec(name)]:
        parser.error(f"{', '.join(missing)} missing: pip install '.[test,benchmarks]'")
    print(f"{here()}\n\n{table.HEAD}", flush=True)
    for name in arguments.groups or GROUPS:
        start = time.monotonic()
        for row in GROUPS[name](quick=arguments.quick):
            print(row, flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)


def here() -> str:
    """Return the machine, the versions and the month, as docs/benchmarks.md says them."""
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
