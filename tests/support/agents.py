"""Helpers of tests: agents."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.machine import ROOT


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of some lines, each of which is one that the page describes."""
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        assert each["version"] == 1
        assert each["time"] > 0
        known = documented("A refusal").keys() if each["event"] == "refused" else set()
        known |= documented("Events")[each["event"]] | {"version", "event", "time", "lost"}
        assert each.keys() <= known
    return found


PAGE = (ROOT / "docs" / "formats.md").read_text()


def documented(title: str) -> dict[str, set[str]]:
    """Return what stands in the tables of a chapter: the words of each first cell, and of all."""
    chapter = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ", 1) for line in chapter.splitlines() if line.startswith("| `")]
    return {
        name: {*re.findall(r"`([a-z_]+)`", about)}
        for names, about in rows
        for name in re.findall(r"`([a-z_]+)`", names)
    }
