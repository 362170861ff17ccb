"""Robots that have read the page, and nothing else, share four GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import robot

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.full

TASKS = 160  # by hand: python -m tests.support.robot 1000


def test_they_share(tmp_path: Path) -> None:
    """All tasks are done, though callers kill calls; no two at once on a GPU, and none is left."""
    result = robot.run(tmp_path, TASKS)
    assert result.faults == []
    assert sorted(result.done) == sorted(f"task{number}" for number in range(TASKS))
    assert result.overlaps == []
    assert result.held == []
    assert result.late_s < 5
    assert (
        min(result.seen[each] for each in ("waiting", "reserved", "released", "killed", "refused"))
        > 0
    )


def test_an_overlap_is_seen() -> None:
    """Two calls on one GPU at once are told; one that was killed overlaps nothing."""
    lines = ["begin a 0 1.0", "begin b 0 2.0", "end a 0 3.0", "end b 0 4.0", "begin c 1 1.0"]
    assert robot.overlaps([*lines, "begin d 1 2.0", "end d 1 3.0"]) == ["b and a on 0"]
