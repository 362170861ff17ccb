"""Memory: whether a wait that lasts for hours needs more of it than one of minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import ways
from benchmarks.report import Row, verdict
from benchmarks.stage import machine, stage

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOKS, FEW_LOOKS = 20_000, 2_000  # a waiter looks at everything once a second: that is 5.5 hours
GROWTH_LIMIT_KIB = 40  # 10 pages, which come and go; 4 bytes for each of the looks
# A wait without its pauses, shown as %reserve_gpu shows it; says its memory at two of its looks.
HURRY = """
import sys
from benchmarks.memory import own_kib
from reserve_gpu import waiting, reserve
from reserve_gpu.live import Live

waiting.POLL_S, waiting.LOOK_S, waiting.QUIET_S = 0, -1, -1
looks, found_kib = 0, []

def look(wait):
    global looks
    looks += 1
    live.show(wait)
    if looks in ({first}, {last}):
        found_kib.append(own_kib("self"))
    if looks == {last}:
        raise InterruptedError

try:
    with Live({stream}) as live:
        reserve(wait=True, progress=look)
except InterruptedError:
    print(*found_kib)
"""


def growth(*, quick: bool) -> Iterator[Row]:
    """By how much a script and a kernel grow in the second half of a wait of very many looks."""
    last = FEW_LOOKS if quick else LOOKS
    first = last // 2
    with stage(machine(8)) as on, on.child() as holder, on.kernel() as kernel:
        holder.run("reserve_gpu.reserve(count=8)")
        with on.start("-c", HURRY.format(first=first, last=last, stream="sys.stderr")) as script:
            said, told = script.communicate()
        yield _row(f"a script that waits, looks {first:,} to {last:,}", said, told)
        cell = kernel.run(HURRY.format(first=first, last=last, stream=""))
        told = "\n".join(cell.traceback)
        yield _row(f"a kernel that waits, looks {first:,} to {last:,}", cell.stdout, told)


def own_kib(process: int | str) -> int:
    """The memory that is the process's own, counted page by page: no part of a file that it maps.

    Of such a file others may map the same part, or the kernel some more of it than was asked for.
    """
    sizes = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(size.split()[1]) for size in sizes if size.startswith("Anonymous:"))


def _row(what: str, said: str, told: str) -> Row:
    """The row of a process that said its memory twice. told: why it did not, if it did not."""
    if not said:
        raise RuntimeError(f"{what} failed: {told}")
    before_kib, after_kib = map(int, said.split())
    growth_kib = after_kib - before_kib
    bar = f"no growth, at most {GROWTH_LIMIT_KIB} KiB"
    met = verdict(bar, is_met=growth_kib <= GROWTH_LIMIT_KIB)
    return Row(what, ways.OURS, f"{growth_kib:+d} KiB", bar=met)
