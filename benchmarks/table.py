"""The tables of results. Each row shows a result and its target."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

VERDICTS = {None: "", True: "met", False: "**missed**"}
# The milliseconds by which two medians of the same CPU time can differ.
NOISE_MS = 5.0
MOST_GROWTH = 1.5  # maximum ratio of the costs per item; a linear cost has a ratio of 1


class Row(NamedTuple):
    """A row of the results table.

    Attributes:
        label: The name of the benchmark.
        measured: The result.
        bar: The target for the result, or an empty string if the row is only for comparison.
        is_met: Whether the result meets the target, or None if there is no target.
    """

    label: str
    measured: str
    bar: str = ""
    is_met: bool | None = None

    @property
    def head(self) -> str:
        """Return the head of the table."""
        return "| benchmark | measured | bar | |\n| --- | --- | --- | --- |"

    def __str__(self) -> str:
        return f"| {self.label} | {self.measured} | {self.bar} | {VERDICTS[self.is_met]} |"


class Growth(NamedTuple):
    """A row of the table that shows how a cost grows with the number of items.

    Attributes:
        label: The name of the benchmark.
        items: The kind of items.
        sizes: The numbers of items, from the smallest to the largest. Empty if nothing could be
            measured.
        whole_ms: The time of the whole process at each size, in milliseconds.
        cpu_ms: The CPU time of the measured call at each size, in milliseconds.
        limit_ms: The maximum time in milliseconds that the items can add, or None.
        note: The reason why nothing could be measured.
    """

    label: str
    items: str
    sizes: Sequence[int] = ()
    whole_ms: Sequence[float] = ()
    cpu_ms: Sequence[float] = ()
    limit_ms: float | None = None
    note: str = ""

    @property
    def head(self) -> str:
        """Return the head of the table."""
        titles = "| how cost grows | items | whole process | CPU time | bar | |"
        return f"{titles}\n| --- | --- | --- | --- | --- | --- |"

    @property
    def is_met(self) -> bool | None:
        """Return whether the cost meets its target, or None if it was not measured."""
        if self.note:
            return None
        added_ms = max(self.whole_ms) - self.whole_ms[0]
        is_small = self.limit_ms is None or added_ms <= self.limit_ms
        return is_small and is_linear(self.sizes, self.cpu_ms)

    def __str__(self) -> str:
        sizes = " / ".join(f"{size:,}" for size in self.sizes)
        whole = self.note or " / ".join(map(milliseconds, self.whole_ms))
        cpu = " / ".join(map(milliseconds, self.cpu_ms))
        bar = "linear" if self.limit_ms is None else f"linear, adds at most {self.limit_ms:g} ms"
        items = f"{sizes} {self.items}".strip()
        return f"| {self.label} | {items} | {whole} | {cpu} | {bar} | {VERDICTS[self.is_met]} |"


def is_linear(sizes: Sequence[int], times_ms: Sequence[float]) -> bool:
    """Return whether a cost grows no faster than linearly.

    The cost of each item between the middle and the largest size is compared with the cost of each
    item between the smallest and the middle size.

    Args:
        sizes: The three numbers of items, from the smallest to the largest.
        times_ms: The time in milliseconds at each size.
    """
    few, some, many = sizes
    small_step_ms = max(0.0, times_ms[1] - times_ms[0]) + NOISE_MS
    large_step_ms = times_ms[2] - times_ms[1]
    return large_step_ms / (many - some) <= MOST_GROWTH * small_step_ms / (some - few)


def slower(label: str, ours: Sequence[float], other: Sequence[float], at_most: float) -> Row:
    """Return a row for the ratio of reserve_gpu's times to another program's times.

    Args:
        label: The name of the benchmark.
        ours: The times of reserve_gpu, in milliseconds.
        other: The times of the other program, in milliseconds.
        at_most: The maximum ratio.
    """
    ratio = _ratio(ours, other)
    measured = f"{ratio:.2f} times ({_medians(ours, other)})"
    return Row(label, measured, f"at most {at_most:g} times", ratio <= at_most)


def faster(
    label: str, ours: Sequence[float], other: Sequence[float], at_least: float | None = None
) -> Row:
    """Return a row for the ratio of another program's times to reserve_gpu's times.

    Args:
        label: The name of the benchmark.
        ours: The times of reserve_gpu, in milliseconds.
        other: The times of the other program, in milliseconds.
        at_least: The minimum ratio, or None if the row is only for comparison.
    """
    ratio = _ratio(other, ours)
    measured = f"{ratio:.2f} times faster ({_medians(ours, other)})"
    if at_least is None:
        return Row(label, measured)
    return Row(label, measured, f"at least {at_least:g} times", ratio >= at_least)


def milliseconds(value: float) -> str:
    """Format a time that is given in milliseconds, using seconds for times of 1 s or more."""
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of the values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _ratio(longer: Sequence[float], shorter: Sequence[float]) -> float:
    """Compute the ratio of the times in each round, and return the median.

    Only times from the same round are compared, because the machine's speed can change over time.
    """
    return statistics.median(a / b for a, b in zip(longer, shorter, strict=True))


def _medians(ours: Sequence[float], other: Sequence[float]) -> str:
    both = (milliseconds(statistics.median(times)) for times in (ours, other))
    return " vs. ".join(both)
