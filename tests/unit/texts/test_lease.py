"""Messages to the holder of a lease, and descriptions of a lease for other users."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.features.lease.lease_notices import Action, LeaseNotice
from reserve_gpu.model.requests import Lease, ReservationTerms, Rule, Size
from reserve_gpu.render import phrases
from reserve_gpu.render.frontends import MAGIC, PYTHON
from tests.support.frontends import FACES, GPU0, GPU1
from tests.support.holders import a_holder, changed

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.model.holders import Holder
    from reserve_gpu.render.frontends import Frontend

# Local times that never become the current day, so the texts include the date.
PAST = time.mktime((2001, 11, 20, 18, 0, 0, 0, 0, -1))
FUTURE = time.mktime((2099, 11, 20, 18, 0, 0, 0, 0, -1))
HOUR_S = 3600.0
NOW = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))  # a Friday

TIME, IDLE = Lease(until=PAST), Lease(until=FUTURE, idle_s=HOUR_S)
RULE = Rule('time = "24h"', "[limits]", "/etc/reserve_gpu.toml", 86_400.0)
CHILDREN = [f"python{number}\x1b (pid {number})" for number in range(5)]
PART = Size(4000.0, "MiB")


def describe(
    action: Action,
    lease: Lease = TIME,
    *,
    frontend: Frontend = MAGIC,
    is_by_idleness: bool = False,
    **fields: Any,
) -> str:
    """Return the message to the holder."""
    until = lease.until or PAST
    at = until - 1 if is_by_idleness else until
    return LeaseNotice(action, [GPU0], lease, at)._replace(**fields).text(frontend)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"lease": Lease(until=FUTURE, is_jobs=True)}, id="until the job's end"),
        pytest.param({"lease": IDLE}, id="until a time or idle"),
        pytest.param(
            {"lease": Lease(idle_s=90.0, if_wanted=True), "devices": [GPU0, GPU1]},
            id="two GPUs until idle and wanted",
        ),
    ],
)
def test_lease_has_begun(snapshot: SnapshotAssertion, fields: dict[str, Any]) -> None:
    assert describe(Action.LASTS, **fields) == snapshot


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="time"),
        pytest.param({"frontend": FACES["shell"]}, id="time, in a command"),
        pytest.param({"lease": TIME._replace(if_wanted=True)}, id="time, if wanted"),
        pytest.param({"lease": IDLE, "is_by_idleness": True}, id="idle"),
        pytest.param({"lease": TIME._replace(is_jobs=True)}, id="job"),
        pytest.param({"rule": RULE, "longer_s": 5430.0}, id="rule allows 90 minutes"),
        pytest.param({"rule": RULE, "longer_s": 59.0}, id="rule allows no extension"),
    ],
)
def test_lease_ends_soon(snapshot: SnapshotAssertion, fields: dict[str, Any]) -> None:
    text = describe(Action.WARN, **fields)
    assert text == snapshot
    assert describe(Action.WARN_AGAIN, **fields) == text


@pytest.mark.parametrize("action", list(Action)[3:], ids=lambda action: action.name)
@pytest.mark.parametrize("is_by_idleness", [False, True], ids=["time", "idle"])
def test_lease_has_ended(
    snapshot: SnapshotAssertion, action: Action, *, is_by_idleness: bool
) -> None:
    lease = IDLE if is_by_idleness else TIME
    assert describe(action, lease, is_by_idleness=is_by_idleness) == snapshot


def test_devices_are_released(snapshot: SnapshotAssertion) -> None:
    """Two parts of a GPU are released, and five child processes continue."""
    text = describe(
        Action.RELEASE, devices=[GPU0, GPU1], size=PART, children=CHILDREN, frontend=PYTHON
    )
    assert text == snapshot


# -- for other users -------------------------------------------------------------------------------

ALICE = a_holder(4321000, "alice", "train.ipynb", since=NOW - 2 * HOUR_S, seen=True)
ALICE = changed(ALICE, terms=ReservationTerms(note="thesis"))
UNTIL_6PM, SINCE_11AM = Lease(until=NOW + 6 * HOUR_S), Lease(until=NOW - HOUR_S)


def with_lease(lease: Lease, **changes: Any) -> Holder:
    """Return a holder with that lease."""
    return changed(ALICE, terms=ALICE.record.terms._replace(lease=lease), **changes)


@pytest.mark.parametrize(
    "lease",
    [
        pytest.param(UNTIL_6PM, id="time"),
        pytest.param(Lease(idle_s=HOUR_S), id="idle"),
        pytest.param(UNTIL_6PM._replace(idle_s=1800.0), id="time or idle"),
        pytest.param(UNTIL_6PM._replace(if_wanted=True), id="time, if wanted"),
        pytest.param(UNTIL_6PM._replace(is_jobs=True, if_wanted=True), id="job"),
        pytest.param(SINCE_11AM._replace(if_wanted=True), id="past its end, if wanted"),
    ],
)
def test_end_of_a_lease(snapshot: SnapshotAssertion, lease: Lease) -> None:
    holder = with_lease(lease)
    others = phrases.plain(phrases.holder_line(holder, NOW))
    own = phrases.plain(phrases.holder_line(holder, NOW, this_process="this kernel"))
    assert f"{others}\n{own}" == snapshot
