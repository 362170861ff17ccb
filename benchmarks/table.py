"""The results table. Each row shows a result and its target."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = "| benchmark | measured | bar | |\n| --- | --- | --- | --- |"


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

    def __str__(self) -> str:
        verdict = {None: "", True: "met", False: "**missed**"}[self.is_met]
        return f"| {self.label} | {self.measured} | {self.bar} | {verdict} |"


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


def faster(label: str, ours: Sequence[float], other: Sequence[float], at_least: float) -> Row:
    """Return a row for the ratio of another program's times to reserve_gpu's times.

    Args:
        label: The name of the benchmark.
        ours: The times of reserve_gpu, in milliseconds.
        other: The times of the other program, in milliseconds.
        at_least: The minimum ratio.
    """
    ratio = _ratio(other, ours)
    measured = f"{ratio:.2f} times faster ({_medians(ours, other)})"
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
