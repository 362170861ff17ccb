"""Refusals: the headline, the row of each GPU, and the hints below them."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu import render
from reserve_gpu.model.devices import Device, Process, State, Unfit, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder, LastHolder
from reserve_gpu.model.requests import Lease, Request, Rule, Rules
from reserve_gpu.render import contacts, phrases, pictures, reasons, rule_text
from reserve_gpu.render.frontends import MAGIC, SHELL
from reserve_gpu.render.notices import Refused
from tests.support.holders import a_holder, changed
from tests.support.pictures import (
    A100,
    ALICE,
    ANY,
    BOB,
    BUSY,
    COMPUTED_ON,
    EMPTY,
    EVAL,
    EXCLUSIVE,
    FULL,
    FULL_ROW,
    GPU_RULE,
    IDLE_FOR_2H,
    INSTANCE,
    LIMITED,
    LOST,
    NOW,
    PART_HOLDER,
    PAST,
    PROGRAM,
    PROHIBITED,
    RESERVED,
    RULES_FILE,
    STRANGER,
    T4,
    TEN_GB,
    TIME_RULE,
    UNNAMED,
    free,
    headline,
    idle,
    refused,
    table,
    unfit,
)
from tests.support.pictures import PYTHON as PYTHON_PROCESS

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.render.frontends import Frontend
    from reserve_gpu.render.pictures import Picture

HOSTILE = "\x1b[31mred\n  GPU1: free\u202e"


# -- refusals --------------------------------------------------------------------------------------

BROKEN = DeviceStatus(LOST, State.BROKEN, reason="GPU is lost")
FREE = DeviceStatus(A100, State.FREE, EMPTY, would_be_taken=True)
OWN = RESERVED._replace(is_mine=True, would_be_taken=True)
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


# -- the rows of a table ---------------------------------------------------------------------------


def reserved(*holders: Holder, **fields: Any) -> DeviceStatus:
    """Return the row of a reserved GPU."""
    return RESERVED._replace(usage=None, holders=holders, **fields)


def busy(usage: Usage | None, *processes: Process, **fields: Any) -> DeviceStatus:
    """Return the row of a busy GPU."""
    return DeviceStatus(A100, State.BUSY, usage, processes=processes, **fields)


OF_JOB = a_holder(17, "bob", agent="claude", origin="lab1", job="4711", job_name="train.sh")
HELD = Usage(0, 0, used_mib=3072)
ENDED = LastHolder(a_holder(4321, HOSTILE), None)
FREEING = LastHolder(a_holder(4321, HOSTILE), 3.2, is_falling=True)
AWAITED = DeviceStatus(A100, State.AWAITED, EMPTY, awaited_by=BOB)
FULL_OF_STRANGERS = FULL_ROW._replace(processes=(STRANGER,), is_unreserved_use=True)
DRAIN = Rule('drain = ["0"]', "[devices]", RULES_FILE, 0.0)
XORG = Process(5, 3000, "root", "Xorg", kind="graphics")
DEAD = Process(6, None, "alice", "python")
ROWS = {
    "reserved": RESERVED,
    "by an unknown user": reserved(Holder()),
    "unverified": reserved(a_holder(17, "bob")),
    "in another container": reserved(a_holder(17, "bob", is_other_namespace=True)),
    "in a job": reserved(OF_JOB),
    "with a stranger": reserved(BOB, processes=(STRANGER,)),
    "with a process next to the holder": reserved(
        BOB, processes=(PYTHON_PROCESS._replace(beside="train.ipynb"),)
    ),
    "joined": reserved(BOB._replace(beside="train.ipynb")),
    "joined a reservation that is gone": reserved(changed(BOB, guest_of=1.0)),
    "killed": reserved(BOB._replace(is_dying=True)),
    "with an error": reserved(ALICE, reason="Unknown Error"),
    "by this kernel": reserved(ALICE, is_mine=True, would_be_taken=True),
    "lost, but reserved": reserved(changed(BOB, label="GPU9"), device=LOST, reason="GPU is lost"),
    "awaited": AWAITED,
    "awaited by another user than the holder": AWAITED._replace(holders=(ALICE,)),
    "used without a reservation": busy(COMPUTED_ON, PYTHON_PROCESS, is_unreserved_use=True),
    "left over": busy(COMPUTED_ON, PYTHON_PROCESS._replace(left_by=HOSTILE)),
    "used in exclusive mode": busy(EXCLUSIVE, PYTHON_PROCESS, is_unreserved_use=True),
    "used by an invisible process": busy(COMPUTED_ON),
    "used by an MPS client": busy(EMPTY._replace(mps=1)),
    "memory in use": busy(FULL),
    "memory in use, in a container": busy(FULL._replace(sees_all=False)),
    "memory in use, under WSL": busy(FULL._replace(sees_all=False, is_wsl=True)),
    "graphics": busy(FULL._replace(graphics_mib=10444.8), background=(XORG,)),
    "process without memory": busy(COMPUTED_ON, background=(DEAD,)),
    "busy for an unknown reason": busy(None),
    "released": busy(HELD, last_holder=FREEING),
    "ended, and listed": busy(HELD, last_holder=ENDED._replace(is_listed=True)),
    "ended": busy(HELD, last_holder=ENDED),
    "prohibited": DeviceStatus(A100, State.PROHIBITED, PROHIBITED),
    "drained": DeviceStatus(A100, State.DRAINED, rule=DRAIN),
    "unknown": DeviceStatus(A100, State.UNKNOWN, Usage()),
    "unknown on the host's memory": DeviceStatus(A100, State.UNKNOWN, Usage(has_host_memory=True)),
    "broken": DeviceStatus(A100, State.BROKEN, reason="Unknown Error"),
    "memory has failed": DeviceStatus(A100, State.FREE, EMPTY._replace(awaits_reset=True)),
    "unfit: lost": unfit(LOST, Unfit.UNREADABLE),
    "unfit: model": unfit(T4, Unfit.MODEL),
    "unfit: no model": unfit(UNNAMED, Unfit.MODEL),
    "unfit: memory": unfit(T4, Unfit.MEMORY),
    "unfit: part": unfit(T4, Unfit.PART),
    "unfit: unknown memory": unfit(UNNAMED, Unfit.MEMORY_UNKNOWN),
    "unfit: second instance": unfit(INSTANCE, Unfit.SECOND_INSTANCE),
    "free": DeviceStatus(A100, State.FREE, EMPTY, would_be_taken=True),
    "busy, but named": busy(COMPUTED_ON, would_be_taken=True),
    "full": FULL_ROW,
    "full to the last MiB": FULL_ROW._replace(promisable_mib=0.2, holders=(PART_HOLDER,)),
    "almost full": FULL_ROW._replace(promisable_mib=110.0),
    "full, with this kernel's part": FULL_ROW._replace(is_mine=True),
    "full, with a stranger": FULL_OF_STRANGERS,
}


def text_of_row(row: DeviceStatus) -> str:
    """Return the state and the text of a device in a refusal."""
    entry = refused(row, request=TEN_GB).layout.entries[-1]
    assert entry.state
    lines = [phrases.plain(line) for line in (entry.who, *entry.more) if line]
    return f"{entry.state.value}: {'; '.join(lines)}"


def test_rows(snapshot: SnapshotAssertion) -> None:
    assert table({name: text_of_row(row) for name, row in ROWS.items()}) == snapshot


# -- hints -----------------------------------------------------------------------------------------

ZOMBIE = PYTHON_PROCESS._replace(zombie_of=f"{HOSTILE} (pid 11)")
LEFT_AT = PYTHON_PROCESS._replace(left_by="train.ipynb", started=PAST)
DARK = DeviceStatus(A100, State.UNKNOWN, Usage(compute=0, sees_all=False))
UNSEEN = {
    "memory in use": busy(FULL),
    "memory in use, under WSL": busy(FULL._replace(sees_all=False, is_wsl=True)),
    "memory in use, in a container": busy(FULL._replace(sees_all=False)),
    "memory of a holder": reserved(ALICE)._replace(usage=FULL),
    "memory of an invisible process": busy(FULL._replace(compute=1)),
    "memory of a process that has ended": busy(
        FULL._replace(compute=1), PYTHON_PROCESS._replace(has_ended=True)
    ),
    "unreadable": DARK,
    "unreadable with a reason": DARK._replace(reason="its lock is a link"),
    "unreadable with a holder": DARK._replace(holders=(PART_HOLDER,)),
    "zombie": busy(COMPUTED_ON, ZOMBIE),
    "left over": busy(COMPUTED_ON, LEFT_AT),
    "of another user": busy(COMPUTED_ON, LEFT_AT._replace(user="bob")),
    "opened by one": busy(FULL, openers=(PYTHON_PROCESS,)),
    "freeing": busy(FULL, last_holder=FREEING),
    "released": busy(FULL, last_holder=FREEING._replace(is_falling=False)),
    "ended": busy(FULL, last_holder=ENDED),
}


@pytest.mark.parametrize(
    ("frontend", "user"),
    [
        pytest.param(MAGIC, "alice", id="owner"),
        pytest.param(PROGRAM, "alice", id="program of the owner"),
        pytest.param(None, None, id="waiter"),
    ],
)
def test_hints_about_use_that_cannot_be_seen(
    frontend: Frontend | None, user: str | None, snapshot: SnapshotAssertion
) -> None:
    """Only the owner of processes reads the command that ends them, unless it is a program."""
    texts = {
        name: " | ".join(map(phrases.plain, reasons.unseen([row], frontend, user)))
        for name, row in UNSEEN.items()
    }
    assert table(texts) == snapshot


LATE = changed(EVAL, lease=Lease(until=NOW - 60), since=NOW - 7200)
DAY_LATE = changed(BOB, lease=Lease(until=NOW - 86400), since=NOW - 172800)
THREE = tuple(IDLE_FOR_2H._replace(device=A100._replace(index=index)) for index in range(3))
USED_LATE = DeviceStatus(A100._replace(index=7), State.RESERVED, COMPUTED_ON, holders=(LATE,))
NEW = idle(T4, BOB, since=NOW - 60)
SHARERS = tuple(a_holder(pid, name, since=1.0) for pid, name in enumerate("abcd", 1))
LISTS = {
    "longest idle first": (
        idle(A100, ALICE, since=NOW - 9000, cell=NOW - 1800),
        idle(T4, BOB, since=NOW - 7200),
        idle(UNNAMED, a_holder(5, "carol"), since=NOW - 9000, cell=NOW - 3600),
        RESERVED._replace(device=INSTANCE),
    ),
    "three of six": tuple(
        idle(A100._replace(index=pid), a_holder(pid, f"u{pid}"), since=NOW - 7200 - pid)
        for pid in range(6)
    ),
    "idle and overdue": (THREE[0], USED_LATE),
    "reserved for less than ten minutes": (idle(A100, BOB, since=NOW - 599),),
    "reserved for ten minutes": (idle(A100, BOB, since=NOW - 600),),
    "idle for an unknown time": (idle(A100, BOB),),
    "shared by four": (RESERVED._replace(holders=SHARERS, is_unused=True),),
    "drained": (IDLE_FOR_2H._replace(state=State.DRAINED),),
    "killed": (RESERVED._replace(holders=(LATE._replace(is_dying=True),)),),
    "many": tuple(
        IDLE_FOR_2H._replace(device=A100._replace(index=2 * index)) for index in range(14)
    ),
}


def test_users_to_ask(snapshot: SnapshotAssertion) -> None:
    texts = {name: phrases.plain(contacts.users_to_ask(rows, NOW)) for name, rows in LISTS.items()}
    assert table(texts) == snapshot


KEPT = changed(ALICE, kept_until=NOW + 30, since=NOW - 60)
OWN_GPUS = {
    "idle for 2 h": (IDLE_FOR_2H,),
    "one of two devices is idle": (IDLE_FOR_2H, RESERVED._replace(device=T4)),
    "idle for less than a minute": (idle(A100, ALICE, since=NOW - 9000, cell=NOW - 59),),
    "reserved for less than ten minutes": (idle(A100, ALICE, since=NOW - 599),),
    "without a name": (idle(A100, a_holder(5, "alice", seen=True), since=NOW - 7200),),
    "of another user": (NEW,),
    "unverified": (idle(A100, a_holder(5, "alice"), since=NOW - 7200),),
    "kept for a restart": (reserved(KEPT),),
    "four": tuple(
        idle(A100, a_holder(pid, "alice", seen=True), since=NOW - 7200) for pid in range(1, 5)
    ),
}


def test_own_reservations(snapshot: SnapshotAssertion) -> None:
    """Only the user who holds a GPU reads how to release it, unless it is a program."""
    texts = {
        name: " | ".join(map(phrases.plain, contacts.own_reservations(rows, NOW, "alice", MAGIC)))
        for name, rows in OWN_GPUS.items()
    }
    assert table(texts) == snapshot
    (line,) = contacts.own_reservations((IDLE_FOR_2H,), NOW, "alice", SHELL, "ssh lab1 ")
    assert phrases.plain(line).endswith(" ssh lab1 reserve-gpu release 4321000")
    for user, frontend in ((None, MAGIC), ("alice", PROGRAM)):
        assert contacts.own_reservations((IDLE_FOR_2H,), NOW, user, frontend) == []


def leased(**lease: Any) -> Holder:
    """Return a holder that has held a device for two hours, with this lease."""
    return changed(ALICE, since=NOW - 7200, lease=Lease(**lease))


NEXT_FREE = {
    "longest idle": (idle(A100, ALICE, since=NOW - 1800), idle(T4, BOB, since=NOW - 7200)),
    "first to end": (
        reserved(leased(until=NOW + 7200)),
        reserved(leased(until=NOW + 3600), device=T4),
        IDLE_FOR_2H,
    ),
    "overdue": (idle(A100, DAY_LATE, since=NOW - 172800),),
    "past its end": (reserved(leased(until=NOW - 60, if_wanted=True)),),
    "idle limit": (IDLE_FOR_2H._replace(holders=(leased(idle_s=10800.0),)),),
    "kept for a restart": (reserved(KEPT),),
    "one of two ends": (reserved(leased(until=NOW + 60), BOB),),
}


def test_next_free(snapshot: SnapshotAssertion) -> None:
    texts = {name: phrases.plain(contacts.next_free(rows, NOW)) for name, rows in NEXT_FREE.items()}
    assert table(texts) == snapshot


# -- rules -----------------------------------------------------------------------------------------

IDLE_RULE = Rule('idle = "2h"', "[limits]", RULES_FILE, 7200.0)
END_RULE = Rule('after_cuda = "end"', "[limits]", RULES_FILE, 0.0)
ALL_RULES = Rules(
    RULES_FILE, "alice", "Maintenance on Friday\x1b", GPU_RULE, TIME_RULE, IDLE_RULE, END_RULE
)
RULES = {
    "all": ALL_RULES,
    "nothing to end": Rules(RULES_FILE, "alice", gpus=GPU_RULE, after_cuda=END_RULE),
    "problem": Rules(RULES_FILE, "alice", problems=("unknown key 'gpu'",)),
    "drained": Rules(RULES_FILE, "alice", drained=("0", "7", "GPU-")),
}


def test_rules_in_a_status(snapshot: SnapshotAssertion) -> None:
    rows = (free(0), free(1))
    texts = {
        name: " | ".join(map(phrases.plain, [*rule_text.head(rules), *rule_text.foot(rules, rows)]))
        for name, rules in RULES.items()
    }
    assert table(texts) == snapshot


COUNTED = changed(ALICE, label="GPU1")
LIMITS = {
    "one": (COUNTED,),
    "two": (COUNTED, changed(PART_HOLDER, label="GPU2")),
    "without details": (Holder(),),
    "none": (),
}


def test_limit_that_is_reached(snapshot: SnapshotAssertion) -> None:
    texts = {
        name: rule_text.limited([RESERVED, LIMITED._replace(device=A100, counted=counted)])
        for name, counted in LIMITS.items()
    }
    assert table(texts) == snapshot
