"""Hints: what is said to be typed can be typed as it stands, where it stands."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu import request_options
from reserve_gpu.allocation.request import parse
from reserve_gpu.commands.run import command
from reserve_gpu.ipython.parser import magic_parser
from reserve_gpu.model import errors
from reserve_gpu.model.devices import ComputeMode, Device, Process, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from reserve_gpu.option_parser import Parser
from reserve_gpu.render import frontends, phrases, pictures
from reserve_gpu.render.notices import Refused
from reserve_gpu.render.status_view import Status
from tests.holders import a_holder

if TYPE_CHECKING:
    from collections.abc import Callable

    from reserve_gpu.render.frontends import Frontend
    from tests.here import Here

SCRIPT = ["python", "train it.py", "--wait", "it's; $HOME | `x` #1"]
FACES = {"magic": frontends.MAGIC, "shell": frontends.shell(SCRIPT), "Python": frontends.PYTHON}

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


def read(hint: str) -> tuple[Request, object]:
    """Return the request that a hint makes, typed where it was shown, and its wait."""
    if hint.startswith("reserve_gpu."):
        called: dict[str, Any] = eval(hint, {"reserve_gpu": SimpleNamespace(reserve=record)})
        return understood(called)
    program, *typed = shlex.split(hint)
    if program == "%reserve_gpu":
        return understood(request_options.reserve_keywords(magic_parser().parse_args(typed)))
    assert program == "reserve-gpu"
    ours, to_run = command.split(typed[1:])
    assert to_run == SCRIPT
    assert typed[0] == "run"
    parser = Parser()
    command.add_arguments(parser)
    return understood(request_options.reserve_keywords(parser.parse_args(ours)))


def record(*arguments: object, **named: object) -> dict[str, object]:
    """Return what `reserve()` would get."""
    return inspect.signature(reserve_gpu.reserve).bind(*arguments, **named).arguments


def understood(wishes: dict[str, Any]) -> tuple[Request, object]:
    wait = wishes.pop("wait", None)
    return parse(wishes.pop("devices", None), **wishes), wait


@pytest.mark.parametrize("frontend", FACES.values(), ids=FACES.keys())
def test_a_hint_can_be_typed_as_it_stands(frontend: Frontend) -> None:
    """What is to be typed asks for what was asked for, to the letter, and waits if it says so."""
    for wishes in WISHES:
        assert_asks_for(frontend, wishes)


def assert_asks_for(frontend: Frontend, wishes: dict[str, Any]) -> None:
    """Type the hint for a request; it has to make the same one."""
    request = parse(**{"devices": None, **wishes})
    assert read(frontend.typed(request)) == (request, None)
    again, wait = read(frontend.typed(request, waits=True))
    assert again == request
    assert wait in {True, "1h"}


# Also what is a little less than a short number of GB or MiB, but not for how a computer counts.
ROOMS = [1024, 5912.78, 6200 * 1e6 / 2**20, 34816.5, 6389.617919921874, 1638.6999999999998]
GPU0, GPU1 = Device(0, "GPU-a"), Device(1, "GPU-b")
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


OWN_ELSEWHERE = DeviceStatus(
    GPU0, State.RESERVED, Usage(), holders=(a_holder(4321, "alice", "old.ipynb", seen=True),)
)
# What to type in a shell, by what shows it.
SHELL_LINES: dict[str, Callable[[], object]] = {
    "reserve-gpu release 4321": lambda: Status((OWN_ELSEWHERE,), user="alice"),
    f"{sys.executable} -m pip install": lambda: errors.install_command("distributed"),
}


@pytest.mark.parametrize("typed", SHELL_LINES)
def test_a_line_for_a_shell_is_typed_behind_a_sign_in_a_cell(here: Here, typed: str) -> None:
    """What a notebook says to type in a shell stands behind `!` there, and bare in a shell."""
    show = SHELL_LINES[typed]
    assert typed in str(show())
    assert f"!{typed}" not in str(show())
    here.shell()
    assert f"!{typed}" in str(show())


def test_a_refusal_is_typed_in_a_cell(here: Here) -> None:
    """A refusal of the magic and of Python says `!reserve-gpu` in a cell, as text and as HTML."""
    with here.rival(notebook="old.ipynb"), here.rival("1"):
        shell = here.shell(is_notebook=True)
        for line in ("%reserve_gpu", "import reserve_gpu; reserve_gpu.reserve()"):
            for form in ("text/plain", "text/html"):
                shown = shell.run(line).values[0][form]
                typed = f"!reserve-gpu release {os.getpid()}"
                assert shown.count("reserve-gpu ") == shown.count(typed)
                assert "!reserve-gpu" in shown


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
