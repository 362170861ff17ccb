"""A user's list of reservations, and the answers to a release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model.devices import State
from reserve_gpu.model.holders import Answer, DeviceStatus, Reserved
from reserve_gpu.render import reservation_list
from reserve_gpu.render.frontends import SHELL
from tests.support.holders import a_holder, changed
from tests.support.pictures import (
    A100,
    ALICE,
    BUSY,
    EVAL,
    IDLE_FOR_2H,
    NOW,
    PROGRAM,
    RESERVED,
    STRANGER,
    idle,
    table,
)

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.render.frontends import Frontend


EVALS = tuple(idle(A100._replace(index=index), EVAL, since=NOW - 3600) for index in (3, 5))
MINE = Reserved(changed(ALICE, since=NOW - 7200), (IDLE_FOR_2H,))
OTHER = Reserved(changed(EVAL, since=NOW - 3600, note="thesis"), EVALS)
QUOTED = Reserved(a_holder(17, "alice", "my notes.ipynb", seen=True), (RESERVED,))
EVERY = [MINE, OTHER, QUOTED]
RELEASE = "reserve-gpu release"
LISTED = {
    "ambiguous": reservation_list.ambiguous(EVERY, RELEASE, NOW),
    "nothing held": reservation_list.no_match("x", [], RELEASE, NOW),
    "no match": reservation_list.no_match("x", EVERY, RELEASE, NOW),
    "no match for root": reservation_list.no_match("x", [MINE], RELEASE, NOW, are_own=False),
    "all": reservation_list.no_match("all", [MINE], RELEASE, NOW),
    "on another machine": reservation_list.no_match("lab1:x", [MINE], RELEASE, NOW),
    "join without --": reservation_list.missing_separator(),
    "no response": reservation_list.signal_warning(MINE, Answer.SILENT, 10.0),
    "no request possible": reservation_list.signal_warning(QUOTED, Answer.PROGRAM, 0.5),
    "still in use": "\n".join(
        reservation_list.still_in_use(
            EVERY,
            [
                RESERVED,
                RESERVED._replace(processes=(STRANGER,)),
                DeviceStatus(A100, State.FREE),
                BUSY,
            ],
        )
    ),
}


@pytest.mark.parametrize("text", LISTED.values(), ids=LISTED)
def test_reservations_of_a_user(text: str, snapshot: SnapshotAssertion) -> None:
    assert text == snapshot


@pytest.mark.parametrize("frontend", [SHELL, PROGRAM], ids=["person", "program"])
def test_answers_to_a_release(frontend: Frontend, snapshot: SnapshotAssertion) -> None:
    """A program is told no command that ends a process."""
    texts = {
        answer.name: reservation_list.released(MINE, answer, EVERY, frontend) for answer in Answer
    }
    assert table(texts) == snapshot
