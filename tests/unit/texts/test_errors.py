"""Errors about a reservation, and their hints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.model.devices import State, Unfit
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from reserve_gpu.render import notices
from reserve_gpu.render.frontends import MAGIC, PYTHON, SHELL, shell
from reserve_gpu.render.notices import HidesAll, ReservedAbove, TooLate, impossible, lost
from tests.support.pictures import (
    A100,
    ALICE,
    BOB,
    GPU_RULE,
    INSTANCE,
    PAST,
    PROGRAM,
    T4,
    TIME_RULE,
    UNNAMED,
    unfit,
)

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.model import errors
    from reserve_gpu.render.frontends import Frontend

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
LOCK_FILE = "/run/lock/reserve_gpu/a.lock"


def of_large_parts(gb: float) -> Request:
    """Return a request for a part of so many GB."""
    return Request(terms=ReservationTerms(Size(gb * 1e9 / 2**20, "GB")))


FREE = DeviceStatus(A100, State.FREE)
UNKNOWN_SIZE = unfit(UNNAMED, Unfit.MEMORY_UNKNOWN)
WITH_RESERVE = unfit(A100._replace(reserve_mib=600), Unfit.PART)
H100 = Request(model="H100")
ALL_BUT_ONE_MIB = Request(terms=ReservationTerms(Size(40959.0, "MiB")), min_memory_mib=1024.0)
ABOVE = [DeviceStatus(device, State.RESERVED, holders=(ALICE,)) for device in (A100, T4)]
ERRORS = {
    "lock deleted": lost(A100, LOCK_FILE, [BOB]),
    "lock closed": lost(A100, None, [ALICE, BOB]),
    "joined": notices.has_joined([A100], "train.ipynb"),
    "holds already": notices.holds_already([A100]),
    "too many GPUs for a rule": notices.too_many(GPU_RULE, Request(count=2)),
    "too long for a rule": notices.too_long(TIME_RULE, 2 * 86_400.0),
    "a rule ends it anyway": notices.ends_anyway(TIME_RULE),
    "a rule forbids more": notices.cannot_extend(TIME_RULE, PAST),
    "no such model": impossible(H100, [unfit(T4, Unfit.MODEL)], None),
    "not so much memory": impossible(
        Request(min_memory_mib=190734.86328125, memory_unit="GB"),
        [unfit(A100._replace(index=n), Unfit.MEMORY) for n in range(8)],
        None,
    ),
    "two with memory, one is suitable": impossible(
        Request(count=2, min_memory_mib=20480),
        [FREE, unfit(T4, Unfit.MEMORY), UNKNOWN_SIZE],
        None,
    ),
    "more than visible": impossible(Request(count=9), [FREE._replace(state=State.BUSY)] * 2, "0,1"),
    "GPU and instance": impossible(Request(count=2), [FREE, FREE._replace(device=INSTANCE)], None),
    "second instance": impossible(
        Request(count=2), [FREE, unfit(INSTANCE, Unfit.SECOND_INSTANCE)], None
    ),
    "part of all but the driver's reserve": impossible(ALL_BUT_ONE_MIB, [WITH_RESERVE], None),
    "too large a part": impossible(
        of_large_parts(100), [unfit(each, Unfit.PART) for each in (A100, T4)], None
    ),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_error(error: errors.ReserveGPUError, snapshot: SnapshotAssertion) -> None:
    assert str(error) == snapshot


TRUE = shell(["true"])
NAMED = Request(devices=("1",))
# Errors whose hints depend on the frontend.
HINTED = {
    "above: one": (ReservedAbove([ABOVE[0], UNKNOWN_SIZE], {VISIBLE: "0", ORDER: None}), MAGIC),
    "late: holds one": (TooLate([A100]), MAGIC),
    "late: holds the visible one": (TooLate([A100], [A100]), MAGIC),
    "late: sees two": (TooLate([], [A100, T4]), MAGIC),
    "late: sees two available": (TooLate([], [INSTANCE, T4], can_reserve=True), MAGIC),
    "hidden: magic": (HidesAll(NAMED, "-1", 2), MAGIC),
    "hidden: Python": (HidesAll(NAMED, "-1", 2), PYTHON),
    "hidden: shell": (HidesAll(NAMED, "-1", 2), TRUE),
    "hidden: program": (HidesAll(NAMED, "-1", 2), PROGRAM),
    "hidden: holds one": (HidesAll(Request(count=2), "-1", 2, kept=(A100,)), MAGIC),
}


@pytest.mark.parametrize(("reason", "frontend"), HINTED.values(), ids=HINTED)
def test_error_with_hint(
    reason: ReservedAbove | TooLate | HidesAll, frontend: Frontend, snapshot: SnapshotAssertion
) -> None:
    assert str(reason.error(frontend)) == snapshot


HIDING = [
    *[("", 2), (" ", 2), ("-1", 2), ("NoDevFiles", 2)],
    *[("0,0", 2), ("1,0,1", 2), ("GPU-a,GPU-a", 2), ("7,0,0", 2), ("1", 1), ("GPU-cccc", 4)],
    *[("all", 2), ("cuda:1", 2), ("[0]", 2), ("\x1b[1m", 2)],
]


def test_value_that_hides_all_gpus(snapshot: SnapshotAssertion) -> None:
    """The message says why this value of CUDA_VISIBLE_DEVICES hides every GPU."""
    texts = (str(HidesAll(Request(), limit, total).error(SHELL)) for limit, total in HIDING)
    assert "\n".join(text.partition(" The variable")[0] for text in texts) == snapshot


def test_unknown_name_in_the_package(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(AttributeError) as caught:
        reserve_gpu.reserved  # type: ignore[attr-defined]  # noqa: B018
    assert str(caught.value) == snapshot
