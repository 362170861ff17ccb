"""Tables of GPUs in a status, a refusal and a wait: in terminals, as text and in a notebook."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu import render
from reserve_gpu.model.devices import Device, State, Unfit
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request, Rule
from reserve_gpu.render import pictures
from reserve_gpu.render.frontends import MAGIC
from reserve_gpu.render.notices import Refused
from tests.support.holders import a_holder, changed
from tests.support.pictures import (
    A100,
    ALICE,
    ANY,
    BOB,
    BUSY,
    EMPTY,
    FULL_ROW,
    INSTANCE,
    LOST,
    PART_HOLDER,
    PICTURES,
    RESERVED,
    STRANGER,
    T4,
    TEN_GB,
    UNNAMED,
    headline,
    lines_at,
    refused,
)

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.render.pictures import Picture


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_in_a_terminal(picture: Picture, width: int, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(lines_at(picture, width)) == snapshot


def test_in_a_notebook(snapshot: SnapshotAssertion) -> None:
    assert PICTURES["parts"]._repr_html_().replace("><", ">\n<") == snapshot


# -- refusals --------------------------------------------------------------------------------------

BROKEN = DeviceStatus(LOST, State.BROKEN, reason="GPU is lost")
FREE = DeviceStatus(A100, State.FREE, EMPTY, would_be_taken=True)
OWN = RESERVED._replace(is_mine=True, would_be_taken=True)
LIMIT = Rule("gpus = 1", "[groups.students]", "/etc/reserve_gpu.toml", 1.0)
LIMITED = DeviceStatus(
    T4, State.LIMITED, EMPTY, rule=LIMIT, counted=(changed(ALICE, label="GPU0"),)
)
BUSY_T4 = BUSY._replace(device=T4)
REFUSALS = {
    "one of three is held": refused(
        OWN, FREE._replace(device=T4), BUSY, request=Request(count=3), kept=[A100]
    ),
    "others are free, and one is held": refused(
        RESERVED,
        request=Request(("0", "1")),
        kept=[INSTANCE],
        free=[FREE._replace(device=T4), FREE._replace(device=UNNAMED)],
    ),
    "shared by the user and another": refused(
        RESERVED._replace(holders=(BOB, ALICE), is_unused=True), user="alice"
    ),
    "inherited limit": refused(RESERVED, RESERVED, limit="0,1"),
    "quota": refused(LIMITED),
    "quota, for a program": refused(LIMITED, frontend=MAGIC._replace(is_for_program=True)),
    "held by a sibling": refused(RESERVED, BUSY, siblings={4321000}),
    "broken": refused(BROKEN, waited_s=5.0),
    "used by the user alone": refused(BUSY_T4, BUSY, user="alice"),
    "a larger part": refused(
        FULL_ROW._replace(holders=(changed(PART_HOLDER, pid=17), BOB), is_mine=True),
        request=TEN_GB,
        kept=[A100],
    ),
    "a stranger next to a part": refused(
        FULL_ROW._replace(
            holders=(PART_HOLDER._replace(used_mib=11000.0),),
            processes=(
                STRANGER,
                STRANGER._replace(pid=4321000, user="alice", has_reserved=True),
            ),
            is_unreserved_use=True,
        ),
        request=TEN_GB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("picture", REFUSALS.values(), ids=REFUSALS)
def test_refusal(picture: Picture, snapshot: SnapshotAssertion) -> None:
    assert str(picture) == snapshot


def test_refusal_whose_modules_were_removed(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    error = Refused(ANY, [RESERVED]).error(MAGIC)
    monkeypatch.delattr(render, "pictures")
    monkeypatch.setitem(sys.modules, pictures.__name__, None)
    assert str(error) == snapshot


def rows_in(*states: State) -> list[DeviceStatus]:
    """Return the rows of GPUs in these states."""
    return [DeviceStatus(Device(i, f"GPU-{i}"), state) for i, state in enumerate(states)]


def kept_by(user: str) -> DeviceStatus:
    """Return the row of a GPU that is kept for the restart of a user's notebook."""
    holder = changed(ALICE, kept_until=time.time() + 600, since=0.0)._replace(owner=user)
    return RESERVED._replace(holders=(holder,))


NO_ROOM = FULL_ROW._replace(device=UNNAMED, promisable_mib=7000.0)
UNFIT = DeviceStatus(T4, State.UNFIT, unfit=Unfit.PART)
HEADLINES: dict[str, tuple[list[DeviceStatus], dict[str, Any]]] = {
    "none fits": (rows_in(State.UNFIT), {}),
    "one reserved": (rows_in(State.RESERVED), {}),
    "two reserved": (rows_in(State.RESERVED, State.RESERVED), {}),
    "four": (rows_in(State.BROKEN, State.BUSY, State.DENIED, State.BUSY), {}),
    "one without instances": (rows_in(State.EMPTY), {}),
    "one busy instance": ([BUSY._replace(device=INSTANCE)], {}),
    "named": (rows_in(State.RESERVED), {"request": Request(("0",))}),
    "four named": (rows_in(*[State.BUSY] * 4), {"request": Request(("0-3",))}),
    "one of two is free": (rows_in(State.FREE, State.BUSY), {"request": Request(count=2)}),
    "two of three are free": (
        rows_in(State.FREE, State.FREE, State.BUSY, State.UNFIT),
        {"request": Request(count=3)},
    ),
    "free, but awaited": ([FREE._replace(awaited_by=BOB)], {}),
    "another is busy": ([OWN, BUSY_T4], {"request": Request(count=3), "kept": [A100]}),
    "held by the user": ([RESERVED], {"user": "alice"}),
    "held by four": (
        [RESERVED._replace(holders=tuple(a_holder(i, name) for i, name in enumerate("abcd")))],
        {},
    ),
    "held by an unknown user": ([RESERVED._replace(holders=(Holder(),))], {}),
    "no room": ([FULL_ROW, NO_ROOM], {"request": TEN_GB}),
    "no room on the named GPU": ([FULL_ROW], {"request": TEN_GB._replace(devices=("0",))}),
    "room on one of three": (
        [FULL_ROW, FREE._replace(device=T4), RESERVED],
        {"request": TEN_GB._replace(count=2)},
    ),
    "room on two of three": (
        [FULL_ROW, FREE._replace(device=T4), FREE],
        {"request": TEN_GB._replace(count=3)},
    ),
    "room on none": ([FULL_ROW, UNFIT, RESERVED], {"request": TEN_GB._replace(count=2)}),
    "no part, but no full GPU": ([RESERVED], {"request": TEN_GB}),
    "timed out": ([RESERVED], {"waited_s": 7200.0}),
}


def test_headlines_of_refusals(snapshot: SnapshotAssertion) -> None:
    cases = {name: refused(*rows, **fields) for name, (rows, fields) in HEADLINES.items()}
    cases |= {
        "kept for the user's notebook": refused(kept_by("alice"), user="alice"),
        "kept for another user's notebook": refused(kept_by("alice"), user="bob"),
    }
    lines = [f"{name}: {headline(picture)}" for name, picture in cases.items()]
    assert "\n".join(lines) == snapshot


# -- waits -----------------------------------------------------------------------------------------

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
