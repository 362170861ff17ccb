"""Helpers of tests: directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


UUIDS = [f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(2)]
SCENARIO = "\n".join(f"gpu\n  uuid {uuid}" for uuid in UUIDS)


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


def replace(path: Path) -> None:
    draft = path.with_name("draft")
    draft.touch()
    draft.replace(path)
