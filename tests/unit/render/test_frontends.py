"""Hints: what is said to be typed can be typed as it stands, where it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.allocation.request import parse
from reserve_gpu.model.devices import ComputeMode, Process, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from reserve_gpu.render import frontends, phrases, pictures
from reserve_gpu.render.notices import Refused
from tests.support.holders import a_holder

if TYPE_CHECKING:
    from reserve_gpu.render.frontends import Frontend

from tests.support.frontends import FACES, GPU0, GPU1, assert_asks_for, read

SCRIPT = ["python", "train it.py", "--wait", "it's; $HOME | `x` #1"]

WISHES: list[dict[str, Any]] = [
    {},
    {"devices": "2"},
    {"devices": "1,0:3,GPU-8f2a"},
    {"devices": "0000:01:00.0"},
    {"count": 2},
    {"min_memory": "16GB"},
    {"min_memory": "16GiB"},
    {"min_memory": "15999.5MiB"},
    {"min_memory": "2TB"},
    {"name": "RTX 6000 Ada"},
    {"memory": "10GB"},
    {"memory": "50%"},
    {"memory": "12.5%", "count": 2},
    {"memory": "9536.5MiB", "count": 2},
    {"devices": "2", "memory": "0.5TiB", "note": "x"},
    {"note": "until Friday"},
    {"note": "-x", "name": "--a"},
    {"note": 'it\'s; $HOME | `x` #1 \\ "quoted"'},
    {
        "count": 2,
        "min_memory": "16GB",
        "name": "A100",
        "note": "a b",
    },
]


@pytest.mark.parametrize("frontend", FACES.values(), ids=FACES.keys())
def test_a_hint_can_be_typed_as_it_stands(frontend: Frontend) -> None:
    """What is to be typed asks for what was asked for, to the letter, and waits if it says so."""
    for wishes in WISHES:
        assert_asks_for(frontend, wishes)


# Also what is a little less than a short number of GB or MiB, but not for how a computer counts.
ROOMS = [1024, 5912.78, 6200 * 1e6 / 2**20, 34816.5, 6389.617919921874, 1638.6999999999998]
BUSY = DeviceStatus(
    GPU1,
    State.BUSY,
    Usage(compute=1, mps=0),
    processes=(Process(1, user="alice"),),
    is_unreserved_use=True,
)
THERE = DeviceStatus(GPU0, State.FREE, Usage(compute=0, mps=0), would_be_taken=True)


@pytest.mark.parametrize("frontend", FACES.values(), ids=FACES.keys())
def test_each_way_out_is_what_it_says(frontend: Frontend) -> None:
    """The queue asks for the same, the smaller request for what is free, the name for that GPU."""
    request = parse(None, count=2, name="A100", note="a b")
    _, *hints = pictures.refusal(
        Refused(request, (THERE, BUSY), user="alice"), frontend
    ).layout.head
    lines = [phrases.plain(line).split(": ", 1) for line in hints]
    (text, queue), (less, smaller), (_, named) = lines[:3]
    assert (text, less) == ("Wait in the queue", "1 is available now")
    assert read(queue)[0] == request
    assert read(queue)[1]
    assert read(smaller) == (request._replace(count=1), None)
    assert read(named)[0].devices == ("1",)


OWN, ANOTHERS = Process(1, user="alice"), Process(2, user="bob")


@pytest.mark.parametrize(
    ("usage", "processes", "awaited_by", "is_offered"),
    [
        (Usage(compute=1, mps=0), [OWN], None, True),
        (Usage(compute=0, mps=1), [OWN], None, True),
        (Usage(compute=0, mps=0, used_mib=9000), [], None, False),  # by whom can't be seen
        (Usage(compute=1, mps=1), [OWN], None, False),  # the other one can't be seen
        (Usage(compute=2, mps=0), [OWN, ANOTHERS], None, False),
        (Usage(compute=1, mps=0), [OWN], a_holder(3, user="bob"), False),
        (Usage(compute=1, mps=0, mode=ComputeMode.EXCLUSIVE_PROCESS), [OWN], None, False),
        (None, [OWN], None, False),
    ],
)
def test_what_only_oneself_uses_may_be_named(
    usage: Usage | None, processes: list[Process], awaited_by: Holder | None, *, is_offered: bool
) -> None:
    """A busy GPU is offered by name only where nobody else can be on it, or waits for it."""
    row = BUSY._replace(usage=usage, processes=tuple(processes), awaited_by=awaited_by)
    head = pictures.refusal(Refused(parse(None), (row,), user="alice"), frontends.MAGIC).layout.head
    assert any("name it" in phrases.plain(line) for line in head) is is_offered


@pytest.mark.parametrize("frontend", FACES.values(), ids=FACES.keys())
def test_a_hint_asks_for_the_same_memory(frontend: Frontend) -> None:
    """The size in a hint is the one that was asked for, not rounded as in a sentence."""
    for size in ["16GB", "1.2345TiB", "0.004GB", "1234.5MiB"]:
        request = parse(None, min_memory=size)
        typed = read(frontend.typed(request))[0]
        assert typed.min_memory_mib == pytest.approx(request.min_memory_mib)


@pytest.mark.parametrize("frontend", FACES.values(), ids=FACES.keys())
def test_what_would_fit_does_fit(frontend: Frontend) -> None:
    """The size that a refusal offers is what there is room for, or a little less, never more."""
    for unit in ["MiB", "GB", "GiB", "TB"]:
        for promisable_mib in ROOMS:
            request = Request(terms=ReservationTerms(Size(80000.0, unit)))
            full = DeviceStatus(GPU0, State.FULL, promisable_mib=promisable_mib)
            (line,) = [
                phrases.plain(line)
                for line in pictures.refusal(Refused(request, (full, BUSY)), frontend).layout.head
                if " available now: " in phrases.plain(line)
            ]
            typed = read(line.split(": ", 1)[1])[0]
            assert typed.terms.memory_limit_mib is not None
            assert promisable_mib / 2 < typed.terms.memory_limit_mib <= promisable_mib
            assert typed._replace(terms=request.terms) == request


@pytest.mark.parametrize("frontend", FACES.values(), ids=FACES.keys())
@pytest.mark.parametrize("note", ["a\nb", "\x1b[31m"], ids=ascii)
def test_a_hint_is_one_printable_line(frontend: Frontend, note: str) -> None:
    """A note that would do something to a terminal is not repeated there."""
    assert frontend.typed(Request(terms=ReservationTerms(note=note)), waits=True).isprintable()


def test_a_long_command_is_not_repeated() -> None:
    """A command that would hide the hint, or do something to a terminal, is a placeholder."""
    assert frontends.shell(["echo", "x" * 200]).typed(Request()) == "reserve-gpu run -- COMMAND ..."
    assert frontends.shell(["echo", "a\nb"]).typed(Request()) == "reserve-gpu run -- COMMAND ..."
    assert frontends.shell(["echo", "a b"]).typed(Request()) == "reserve-gpu run -- echo 'a b'"
