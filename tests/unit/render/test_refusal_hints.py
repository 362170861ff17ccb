"""The hints of a refusal: when each one is shown, and what it suggests."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from reserve_gpu.model.devices import State, Unfit
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request
from reserve_gpu.render.frontends import MAGIC, PYTHON, SHELL
from tests.support.pictures import (
    A100,
    ALICE,
    ANY,
    BOB,
    BUSY,
    COMPUTED_ON,
    EMPTY,
    EXCLUSIVE,
    FULL,
    FULL_ROW,
    INSTANCE,
    LOST,
    PART_HOLDER,
    PROHIBITED,
    RESERVED,
    T4,
    TEN_GB,
    hints,
    refused,
)
from tests.support.pictures import PYTHON as PYTHON_PROCESS

# -- waiting ---------------------------------------------------------------------------------------


def offers_queue(*rows: DeviceStatus, **fields: Any) -> bool:
    """Return whether a refusal suggests waiting in the queue."""
    return any("--wait" in line for line in hints(refused(*rows, **fields)))


@pytest.mark.parametrize(("waited_s", "is_offered"), [(None, True), (0.0, True), (0.2, False)])
def test_queue_is_offered_unless_the_wait_has_timed_out(
    waited_s: float | None, *, is_offered: bool
) -> None:
    assert offers_queue(RESERVED, waited_s=waited_s) is is_offered


@pytest.mark.parametrize("state", [state for state in State if state is not State.IDLE])
def test_queue_is_offered_for_states_that_may_end(state: State) -> None:
    """No process is seen on a GPU whose use is unknown, so a wait for it might never end."""
    expected = {State.RESERVED, State.FULL, State.BUSY, State.AWAITED, State.LIMITED}
    assert offers_queue(DeviceStatus(A100, state)) is (state in expected)


BROKEN = DeviceStatus(LOST, State.BROKEN)
BARRED = DeviceStatus(A100, State.PROHIBITED, PROHIBITED)
UNFIT = DeviceStatus(T4, State.UNFIT, unfit=Unfit.MODEL)


@pytest.mark.parametrize(
    ("rows", "request_", "is_named"),
    [
        ([BROKEN], ANY, True),
        ([BROKEN, RESERVED], ANY, False),
        ([BROKEN, RESERVED], Request(count=2), True),
        ([BROKEN, RESERVED, DeviceStatus(T4, State.BUSY)], Request(count=2), False),
        ([BARRED, DeviceStatus(T4, State.UNKNOWN, reason="its lock is a link")], ANY, False),
        ([UNFIT], ANY, False),
    ],
)
def test_administrator_is_named_if_waiting_cannot_help(
    rows: list[DeviceStatus], request_: Request, *, is_named: bool
) -> None:
    """The administrator is named if too few devices can become free by themselves."""
    for waited_s in (None, 5.0):
        lines = hints(refused(*rows, request=request_, waited_s=waited_s))
        assert any("administrator" in line for line in lines) is is_named
        assert not (is_named and any("--wait" in line for line in lines))


# -- reserving by number ---------------------------------------------------------------------------

OF_BOB = PYTHON_PROCESS._replace(user="bob")
TWO = EMPTY._replace(compute=2)
OWN = BUSY._replace(device=T4)


WINDOWS = FULL._replace(sees_all=False, is_wsl=True)
LEFT_OVER = PYTHON_PROCESS._replace(left_by="train.ipynb")
# Changes to the row of a GPU that is used by the user's process.
MAY_BE_NAMED: list[dict[str, Any]] = [
    {},
    {"usage": EMPTY._replace(mps=1)},
    {"usage": TWO, "processes": (PYTHON_PROCESS, PYTHON_PROCESS._replace(pid=17))},
    {"usage": WINDOWS, "processes": ()},
]
MAY_NOT_BE_NAMED: list[dict[str, Any]] = [
    {"usage": TWO, "processes": (PYTHON_PROCESS, OF_BOB)},
    {"usage": COMPUTED_ON._replace(mps=1)},
    {"processes": ()},
    {"processes": (LEFT_OVER,)},
    {"usage": FULL, "processes": ()},
    {"usage": None},
    {"usage": EXCLUSIVE},
    {"awaited_by": ALICE},
    *({"state": each} for each in (State.RESERVED, State.AWAITED, State.UNKNOWN, State.BROKEN)),
]


def test_naming_a_gpu_is_suggested_only_if_no_other_user_uses_it() -> None:
    def is_suggested(fields: dict[str, Any]) -> bool:
        lines = hints(refused(OWN._replace(**fields), user="alice"))
        return any(line.endswith(": %reserve_gpu 1") for line in lines)

    assert list(filter(is_suggested, MAY_NOT_BE_NAMED)) == []
    assert list(filter(is_suggested, MAY_BE_NAMED)) == MAY_BE_NAMED


def test_naming_is_suggested_for_one_gpu_and_only_to_a_known_person() -> None:
    rows = [BUSY._replace(device=INSTANCE), OWN]
    assert hints(refused(*rows, user="alice"))[1].endswith(": %reserve_gpu 3:0")
    assert len(hints(refused(*rows))) == 1
    for_program = MAGIC._replace(is_for_program=True)
    assert len(hints(refused(*rows, user="alice", frontend=for_program))) == 1


def test_no_hint_suggests_taking_a_gpu_of_another_user() -> None:
    states = [state for state in State if state not in (State.FREE, State.UNKNOWN)]
    for frontend, state, processes, waited_s, reading in product(
        [MAGIC, SHELL, PYTHON], states, [(OF_BOB,), (PYTHON_PROCESS, OF_BOB)], [None, 5.0],
        [None, EMPTY, COMPUTED_ON, FULL, EXCLUSIVE],
    ):  # fmt: skip
        row = DeviceStatus(A100, state, reading, None, processes, (BOB,), is_unreserved_use=True)
        text = str(refused(row, frontend=frontend, waited_s=waited_s, user="alice"))
        assert frontend.typed(Request(("0",))) not in text


# -- parts -----------------------------------------------------------------------------------------


def offered(*rows: DeviceStatus, **fields: Any) -> list[str]:
    """Return the requests for a part that a refusal suggests."""
    lines = (line for line in hints(refused(*rows, **fields)) if " available now: " in line)
    return [line.split("%reserve_gpu ")[1] for line in lines if "--memory" in line]


ROOMIER = FULL_ROW._replace(promisable_mib=8000.0)
TAKEN = DeviceStatus(T4, State.FREE, would_be_taken=True)


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [
        ([FULL_ROW], None, ["--memory 5.8GiB"]),
        ([FULL_ROW, TAKEN], 2, ["-n 1 --memory 10GB", "-n 2 --memory 5.8GiB"]),
        ([FULL_ROW, ROOMIER._replace(device=INSTANCE)], 2, []),  # CUDA can't use both
        ([FULL_ROW._replace(promisable_mib=1024.0)], None, ["--memory 1GiB"]),
        ([FULL_ROW._replace(promisable_mib=1023.9)], None, []),  # too small for any program
    ],
)
def test_smaller_part_is_offered(
    rows: list[DeviceStatus], count: int | None, expected: list[str]
) -> None:
    """A refusal offers the largest part for which enough devices have room."""
    assert offered(*rows, request=TEN_GB._replace(count=count)) == expected


WHOLE = Ticket(1, "queue-1-0.lock", None, BOB)  # waits for a whole GPU
SHARED = RESERVED._replace(holders=(PART_HOLDER,), promisable_mib=33600.0)  # 35.2 GB


@pytest.mark.parametrize(
    ("rows", "request_", "ahead", "expected"),
    [
        ([SHARED], ANY, [], ["--memory 30GB"]),
        ([SHARED._replace(promisable_mib=18600.0), RESERVED], ANY, [], ["--memory 19GB"]),
        ([SHARED], Request(min_memory_mib=40000.0), [], []),  # more memory than the part
        ([SHARED._replace(state=State.LIMITED)], ANY, [], []),
        ([SHARED, SHARED], Request(count=2), [], []),
        ([SHARED._replace(is_mine=True)], ANY, [], []),
        ([SHARED], ANY, [WHOLE], ["--memory 30GB"]),  # this waiter can't use a part
        ([SHARED], ANY, [WHOLE._replace(memory_limit_mib=2048.0)], []),
    ],
)
def test_part_of_a_shared_gpu_is_offered(
    rows: list[DeviceStatus], request_: Request, ahead: list[Ticket], expected: list[str]
) -> None:
    """Instead of a whole GPU, a refusal offers the free part of a shared one in round GB."""
    assert offered(*rows, request=request_, ahead=ahead) == expected
