"""Hints suggest requests that are valid as they are, in each frontend."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.allocation.request import parse
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from reserve_gpu.render import frontends
from reserve_gpu.system import settings
from tests.support.frontends import FACES, assert_asks_for, parse_hint
from tests.support.pictures import BUSY, FULL_ROW, hints, refused

if TYPE_CHECKING:
    from reserve_gpu.render.frontends import Frontend

REQUESTS: list[dict[str, Any]] = [
    {},
    {"devices": "1,0:3,GPU-8f2a"},
    {"count": 2, "min_memory": "16GB", "name": "RTX 6000 Ada", "note": "a b"},
    {"memory": "12.5%", "count": 2},
    {"note": "-x", "name": "--a"},
    {"note": 'it\'s; $HOME | `x` #1 \\ "quoted"'},
]
# Including sizes that are just below a round number of MiB or GB, because of floating point.
ROOMS_MIB = [1024, 5912.78, 6200 * 1e6 / 2**20, 34816.5, 6389.617919921874, 1638.6999999999998]
EACH_FRONTEND = pytest.mark.parametrize("frontend", FACES.values(), ids=FACES)


@EACH_FRONTEND
def test_typed_hint_makes_the_same_request(frontend: Frontend) -> None:
    for keywords in REQUESTS:
        assert_asks_for(frontend, keywords)
    for size in ("1.2345TiB", "0.004GB"):  # not rounded as in a sentence
        request = parse(None, min_memory=size)
        typed, _ = parse_hint(frontend.typed(request))
        assert typed.min_memory_mib == pytest.approx(request.min_memory_mib)


@EACH_FRONTEND
def test_offered_part_fits(frontend: Frontend) -> None:
    """The size of an offered part is at most the available memory, in the requested unit."""
    for unit in ["MiB", "GB", "GiB", "TB"]:
        for promisable_mib in ROOMS_MIB:
            request = Request(terms=ReservationTerms(Size(80000.0, unit)))
            full = FULL_ROW._replace(promisable_mib=promisable_mib)
            lines = hints(refused(full, BUSY, request=request, frontend=frontend))
            (line,) = (line for line in lines if " available now: " in line)
            typed, _ = parse_hint(line.split(": ", 1)[1])
            assert promisable_mib / 2 < (typed.terms.memory_limit_mib or 0.0) <= promisable_mib
            assert typed._replace(terms=request.terms) == request


@EACH_FRONTEND
def test_note_with_control_characters_is_left_out(frontend: Frontend) -> None:
    for note in ("a\nb", "\x1b[31m"):
        request = Request(terms=ReservationTerms(note=note))
        assert frontend.typed(request, waits=True).isprintable()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["echo", "x" * 195], f"echo {'x' * 195}"),  # 200 characters
        (["echo", "x" * 196], "COMMAND ..."),
        (["echo", "a\nb"], "COMMAND ..."),
    ],
)
def test_only_short_printable_commands_are_repeated(command: list[str], shown: str) -> None:
    assert frontends.shell(command).typed(Request()) == f"reserve-gpu run -- {shown}"


@pytest.mark.usefixtures("terminal")
def test_messages_on_a_terminal_are_for_a_person_unless_an_agent_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for agent, is_for_program in (("", False), ("claude", True)):
        monkeypatch.setenv(settings.AGENT, agent)
        assert frontends.for_this_process(frontends.SHELL).is_for_program is is_for_program


def test_messages_without_a_terminal_are_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdin in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert frontends.for_this_process(frontends.SHELL).is_for_program
