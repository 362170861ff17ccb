"""What %reserve_gpu costs, side by side with what people would use instead.

    python -m benchmarks [--quick] [NAME ...]

Runs on the stand-in driver, in fresh processes and kernels, and prints one table: medians of this
run, and how they compare. On another machine, or a busy one, the milliseconds are others; all ways
are measured in turn, so the ratios stay much the same. Needs `pip install '.[test,benchmarks]'`.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from benchmarks import choosing, looking, many, memory, report, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GROUPS: dict[str, Callable[..., Iterator[report.Row]]] = {
    "process": choosing.process,
    "kernel": choosing.kernel,
    "start": choosing.start,
    "slow": choosing.slow,
    "status": looking.status,
    "growth": looking.growth,
    "rush": many.rush,
    "handover": waiting.handover,
    "wait": waiting.wait,
    "memory": memory.growth,
}
NEEDED = ("GPUtil", "gpustat", "ipykernel", "jupyter_client", "nvitop")


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
    print(report.HEAD, flush=True)
    for name in arguments.groups or GROUPS:
        start = time.monotonic()
        for row in GROUPS[name](quick=arguments.quick):
            print(row, flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
