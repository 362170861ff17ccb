"""Read events and refusals as docs/formats.md describes them."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.machine import ROOT

FORMATS = (ROOT / "docs" / "formats.md").read_text()


def parse_events(text: str) -> list[dict[str, Any]]:
    """Return the events in some lines, and require that their fields are documented.

    Lines of the letter x are skipped; they are what fills a pipe.
    """
    found = [json.loads(line) for line in text.splitlines() if line.strip("x")]
    for event in found:
        assert event["version"] == 1
        assert event["time"] > 0
        known = documented("A refusal").keys() if event["event"] == "refused" else set()
        known |= documented("Events")[event["event"]] | {"version", "event", "time", "lost"}
        assert event.keys() <= known
    return found


def names_of(text: str) -> list[str]:
    """Return the names of the events in some lines."""
    return [event["event"] for event in parse_events(text)]


def documented(title: str) -> dict[str, set[str]]:
    """Return the names in the first column of a chapter's tables, with all names in their rows."""
    chapter = FORMATS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ", 1) for line in chapter.splitlines() if line.startswith("| `")]
    return {
        name: {*re.findall(r"`([a-z_]+)`", about)}
        for names, about in rows
        for name in re.findall(r"`([a-z_]+)`", names)
    }
