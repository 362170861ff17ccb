"""Helpers of tests: report."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from reserve_gpu.commands.report import totals
from reserve_gpu.commands.report.totals import Hours, summed
from reserve_gpu.log import log_reader as histories_of
from reserve_gpu.log.log_lines import Kind, LogLine
from tests.support.histories import (
    DAY_S,
    FIRST_UID,
    HOUR_S,
    Stay,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


AT = 1761300000 - 1761300000 % HOUR_S  # 2025-10-24, at the beginning of an hour
NOW = AT + 30 * DAY_S


def line(**changes: Any) -> LogLine:
    """Return a line of one hour, of which half an hour was used."""
    whole = LogLine(
        Kind.RESERVED, "a1", AT, AT, AT + HOUR_S, 3600.0, 1800.0, 1800.0, gpu="GPU-1",
        label="GPU0", name="train.ipynb",
    )  # fmt: skip
    return whole._replace(**changes)


def sums(by: str = "user", since: float = 0, now: float = NOW) -> totals.Summary:
    return summed(histories_of.since(since, now, set()), by)


def total(since: float = 0) -> Hours:
    return totals.together(sums(since=since).days.values())


def rounded(rows: Mapping[str, Hours]) -> dict[str, list[float]]:
    return {name: [round(value, 6) for value in hours] for name, hours in rows.items()}


# -- what it sums up to ----------------------------------------------------------------------------


def intended(stays: Sequence[Stay], key: Callable[[Stay], str]) -> dict[str, list[float]]:
    """Return the hours of what people meant to do, by straight loops: reserved, used and idle."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for stay in stays:
        for place, share in enumerate((1.0, stay.used, 1 - stay.used - stay.unknown)):
            found[key(stay)][place] += stay.seconds * share * stay.share / 3600
    return {name: [round(value, 6) for value in hours] for name, hours in found.items()}


def notebook_of(stay: Stay) -> str:
    """Return what a notebook is called; root has histories of many users, and sees whose it is."""
    user = "" if os.geteuid() else f"uid {FIRST_UID + stay.person}: "
    return f"{user}{stay.notebook}"


# -- how it is shown -------------------------------------------------------------------------------

HOSTILE = "\x1b[31m<b>=1\u202e\n" * 20
ROWS = {
    "alice": Hours(31, 9, 22, 0.5, 1.25),
    "bob": Hours(22.5, 20, 0.03),
    "\u540d\u524d" * 20: Hours(12, 2, 6),
    HOSTILE: Hours(0.02, 0.01, 0.01),
    "\u0627\u0644": Hours(),
}
