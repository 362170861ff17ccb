"""Tables of GPUs in a status and a wait: in terminals, as text and in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model.devices import State
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Rule
from reserve_gpu.render import pictures
from tests.support.holders import changed
from tests.support.pictures import ALICE, ANY, BOB, EMPTY, PICTURES, RESERVED, T4, lines_at

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.render.pictures import Picture


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_in_a_terminal(picture: Picture, width: int, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(lines_at(picture, width)) == snapshot


def test_in_a_notebook(snapshot: SnapshotAssertion) -> None:
    assert PICTURES["parts"]._repr_html_().replace("><", ">\n<") == snapshot


LIMIT = Rule("gpus = 1", "[groups.students]", "/etc/reserve_gpu.toml", 1.0)
LIMITED = DeviceStatus(
    T4, State.LIMITED, EMPTY, rule=LIMIT, counted=(changed(ALICE, label="GPU0"),)
)
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
