"""Containers are recognized, and their users are told about reservations outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.here import Here


def test_a_directory_that_has_room_again(here: Here) -> None:
    """A reservation whose record is written has no such warning."""
    assert "can't read" not in here.shell().run("%reserve_gpu --note thesis").stderr
