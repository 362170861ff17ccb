"""Words in the history, and warnings about it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reserve_gpu.features.history import journal
from reserve_gpu.log import places
from reserve_gpu.model.requests import End

if TYPE_CHECKING:
    import pytest
    from syrupy.assertion import SnapshotAssertion

    from tests.support.histories import Histories


def test_reasons_for_an_end(snapshot: SnapshotAssertion) -> None:
    """Earlier lines in a user's history contain these words, so they should not change."""
    assert "\n".join(f"{end.name}: {end.value}" for end in End) == snapshot


def test_incomplete_history(
    kept: Histories,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: SnapshotAssertion,
) -> None:
    """Other users can write to the folder."""
    monkeypatch.setattr(journal, "_warned", [])
    journal.tried(places.opened, str(kept.folder), os.geteuid())
    assert caplog.messages[0].replace(str(kept.folder), "FOLDER") == snapshot
