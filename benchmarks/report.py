"""Rows of the one table that is printed, and whether the bars are met."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import ways

Times = Mapping[str, Sequence[float]]  # milliseconds by way

HEAD = (
    "| measured | way | median | x bare | x ours | bar |\n| --- | --- | ---: | ---: | ---: | --- |"
)


@dataclass(frozen=True)
class Row:
    """A line of the table. value: with its unit. bar: what was wanted, and whether it is met."""

    what: str
    way: str
    value: str
    to_floor: str = ""
    to_ours: str = ""
    bar: str = ""

    def __str__(self) -> str:
        cells = (self.what, self.way, self.value, self.to_floor, self.to_ours, self.bar)
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True)
class Bar:
    """What is wanted of reserve_gpu beside another way.

    at_most: the ratio of its time to the other's. at_least: that of the other's to its time.
    """

    at_most: float = 0
    at_least: float = 0

    def verdict(self, ours: float, other: float) -> str:
        """What was wanted, and whether it is met."""
        if self.at_most:
            ratio = ours / other
            return verdict(f"{ratio:.2f} of at most {self.at_most:g}", is_met=ratio <= self.at_most)
        return verdict(f"at least {self.at_least:g}", is_met=other / ours >= self.at_least)


def verdict(wanted: str, *, is_met: bool) -> str:
    """What was wanted, and whether it is met."""
    return f"{wanted}: {'met' if is_met else '**missed**'}"


def rows(what: str, times: Times, bars: Mapping[str, Bar] | None = None) -> list[Row]:
    """A row for each way: its median, how it compares, and the bar that it sets."""
    found = []
    for row in side_by_side(what, [times]):
        bar = (bars or {}).get(row.way)
        ours, other = (
            statistics.median(times.get(ways.OURS, [0])),
            statistics.median(times[row.way]),
        )
        found.append(replace(row, bar=bar.verdict(ours, other)) if bar else row)
    return found


def side_by_side(what: str, several: Sequence[Times]) -> list[Row]:
    """A row for each way, with its medians of several measurements."""
    medians = [{way: statistics.median(found) for way, found in times.items()} for times in several]
    return [
        Row(
            what,
            way,
            " / ".join(milliseconds(one[way]) for one in medians),
            _ratios(way, ways.FLOOR, medians),
            _ratios(way, ways.OURS, medians),
        )
        for way in several[0]
    ]


def _ratios(way: str, other: str, medians: Sequence[Mapping[str, float]]) -> str:
    return " / ".join(f"{one[way] / one[other]:.2f}" for one in medians if other in one)


def milliseconds(value: float) -> str:
    """A time as people read it."""
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many of the values do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
