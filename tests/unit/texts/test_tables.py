"""Tables of GPUs in a status and a wait: in terminals, as text and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.render import pictures
from tests.support.pictures import ANY, BOB, LIMITED, PICTURES, RESERVED, lines_at

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.render.pictures import Picture


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_in_a_terminal(picture: Picture, width: int, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(lines_at(picture, width)) == snapshot


def test_in_a_notebook(snapshot: SnapshotAssertion) -> None:
    assert PICTURES["parts"]._repr_html_().replace("><", ">\n<") == snapshot


WAITS = {
    "with a timeout": Waiting(ANY, 1, 61.0, (RESERVED,), 600.0),
    "behind another user": Waiting(
        ANY, 2, 61.0, (RESERVED,), first=Ticket(1, "q", None, BOB, "2 GPUs <b>\x1b")
    ),
    "at a limit": Waiting(ANY, 1, 0.0, (LIMITED,)),
}


@pytest.mark.parametrize("waiting", WAITS.values(), ids=WAITS)
def test_wait(waiting: Waiting, snapshot: SnapshotAssertion) -> None:
    picture = pictures.wait(waiting, "this kernel")
    assert f"{picture.brief}\n{picture}" == snapshot
