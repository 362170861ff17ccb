"""Words in the history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model.requests import End

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion


def test_reasons_for_an_end(snapshot: SnapshotAssertion) -> None:
    """Earlier lines in a user's history contain these words, so they should not change."""
    assert "\n".join(f"{end.name}: {end.value}" for end in End) == snapshot
