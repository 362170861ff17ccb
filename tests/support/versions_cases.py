"""Helpers of tests: versions_cases."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.versions import Version


# What only one of them says for programs; and how long ago something was, which each look changes.
NEW_NAMES = {"agent", "free_at", "idle_for_s", "is_dying", "job", "job_name", "is_job_end"}


def picture(version: Version) -> dict[str, Any]:
    """Return all that both versions say of the machine, for programs."""
    told = version.json("status")
    # The earlier one also told of hours from histories, which it never did in these tests.
    assert told.pop("hours", None) is None
    assert told.pop("time")
    people = [holder for device in told["devices"] for holder in device["holders"]]
    for each in (*told["devices"], *people, *told["waiting"]):
        for name in NEW_NAMES:
            each.pop(name, None)
    return told


def holders(version: Version, index: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = picture(version)["devices"][index]["holders"]
    return found


# -- the history -----------------------------------------------------------------------------------


def logged(here: Here, pattern: str) -> list[dict[str, Any]]:
    """Return the lines of the history of who runs the tests, in the files of that pattern."""
    files = sorted((here.home / ".local/state/reserve_gpu").rglob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]
