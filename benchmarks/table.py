"""The table that is printed: a row for each bar, and whether it is met."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD = "| what | measured | bar | |\n| --- | --- | --- | --- |"


class Row(NamedTuple):
    """A line of the table. is_met: None for what is there to compare, without a bar."""

    what: str
    measured: str
    bar: str = ""
    is_met: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "", True: "met", False: "**missed**"}[self.is_met]
        return f"| {self.what} | {self.measured} | {self.bar} | {verdict} |"


def slower(what: str, ours: Sequence[float], other: Sequence[float], at_most: float) -> Row:
    """Return how many times longer ours takes. Times in milliseconds."""
    ratio = _ratio(ours, other)
    measured = f"{ratio:.2f} times ({_medians(ours, other)})"
    return Row(what, measured, f"at most {at_most:g} times", ratio <= at_most)


def faster(what: str, ours: Sequence[float], other: Sequence[float], at_least: float) -> Row:
    """Return how many times longer the other takes. Times in milliseconds."""
    ratio = _ratio(other, ours)
    measured = f"{ratio:.2f} times faster ({_medians(ours, other)})"
    return Row(what, measured, f"at least {at_least:g} times", ratio >= at_least)


def milliseconds(value: float) -> str:
    """Return a time as people read it."""
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that so many of the values do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _ratio(longer: Sequence[float], shorter: Sequence[float]) -> float:
    """Return the median of each round's ratio: a machine that changes its speed changes both."""
    return statistics.median(a / b for a, b in zip(longer, shorter, strict=True))


def _medians(ours: Sequence[float], other: Sequence[float]) -> str:
    both = (milliseconds(statistics.median(times)) for times in (ours, other))
    return " against ".join(both)
