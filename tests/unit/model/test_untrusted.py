"""Texts that other users have written, in all that shows them."""

from __future__ import annotations

import math
import unicodedata
from contextlib import suppress
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reserve_gpu import public
from reserve_gpu.model.devices import Fault, Process, State
from reserve_gpu.model.holders import DeviceStatus, ProcessInfo
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request
from reserve_gpu.model.untrusted import Fields, sanitize
from reserve_gpu.render import pictures
from reserve_gpu.render.frontends import SHELL
from reserve_gpu.render.phrases import plain
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder
from tests.support.pictures import NOW, free, held

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_MARKS = 4
INVISIBLE = [
    *"\u034f\u115f\u1160\u17b4\u17b5\u180b\u180f\u2800\u3164\ufe00\ufe0f\uffa0\U000e0100\U000e01ef",
    *"\u00a0\u00ad\u061c\u180e\u2003\u200b\u200d\u200f\u2028\u202e\u2066\u2800\u3000\ufeff",
    *"\ue000\ud800\u0378\U000e0001\U000e0041\x00\x1b\x7f\x85\n\r\t",
]
MARKS = ["\u0301", "\u0338", "\u20dd", "\u0e31", "\u1161", "\u0903", "\u0fb2"]
LETTERS = st.one_of(
    st.sampled_from(INVISIBLE),
    st.sampled_from(MARKS),
    st.characters(),
    st.sampled_from("ae 1\u65e5"),
)
NASTY = f"e\nforged{MARKS[0] * 78}{''.join(INVISIBLE)}{MARKS[1] * 3}"


def faults(text: str) -> list[str]:
    """Return the letters that must not be shown: invisible letters, and marks above the limit."""
    found, marks = [], 0
    for letter in text:
        marks = marks + 1 if unicodedata.category(letter) in ("Mn", "Me") else 0
        if letter in INVISIBLE or not letter.isprintable() or marks > MOST_MARKS:
            found.append(f"U+{ord(letter):04X}")
    return found


@settings(deadline=None, derandomize=True)
@given(st.text(LETTERS, max_size=120), st.integers(1, 100))
@example("e" + "\u0301" * 78, 80)
@example("\u3164" * 78, 80)
def test_any_text_can_be_shown(text: str, limit: int) -> None:
    """A foreign text is shown in one line, bounded, visible, and the same if it is shown again."""
    seen = sanitize(text, limit)
    assert len(seen) <= limit
    assert faults(seen) == []
    assert sanitize(seen, limit) == seen
    assert len(text) <= limit or seen.endswith("\u2026")
    assert unicodedata.category(f"{seen}x"[0])[0] != "M"  # it would be drawn on what is before it


@pytest.mark.parametrize(
    "name",
    [
        "e\u0301te\u0301.ipynb",
        "Vie\u0302\u0323t Nam",
        "\u0915\u094d\u0937\u0924\u094d\u0930\u093f\u092f \u095b\u093f\u0902\u0926\u0917\u0940",
        "\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48 \u0e01\u0e33\u0e25\u0e31\u0e07",
        "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
        "\u0627\u0644\u0639\u064e\u0631\u064e\u0628\u0650\u064a\u0651\u064e\u0629",
        "\u1112\u1161\u11ab\u1100\u1173\u11af",
        "\u0f56\u0f66\u0f92\u0fb2\u0f72\u0f42\u0f66",
        "\u65e5\u672c\u8a9e \U0001f680 \u00fcbung",
    ],
)
def test_names_of_people_stay_as_they_are(name: str) -> None:
    """Names in scripts that need several marks on a letter are shown unchanged."""
    assert sanitize(name) == name


def test_emoji_can_be_recognized() -> None:
    """Joiners are replaced, and the emoji around them stay."""
    assert (
        sanitize("\U0001f468\u200d\U0001f469 \u2764\ufe0f")
        == "\U0001f468\ufffd\U0001f469 \u2764\ufffd"
    )


def nasty(value: Any) -> Any:
    """Return the value with another text in place of every one in it."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return NASTY
    if isinstance(value, Process):  # whose kind is a word of ours
        return Process(*map(nasty, value))._replace(kind=value.kind)
    if isinstance(value, tuple):
        items = map(nasty, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


WHO = ProcessInfo(4000, "u", "n", "c", "/cwd", "host", None, "agent", "job", "name")

HOLDER = a_holder(4000, "alice", "train.ipynb", since=NOW - 60, note="note", seen=True)
HOLDER = HOLDER._replace(record=HOLDER.record._replace(who=WHO), beside="beside")
PROCESS = Process(1, 500, "user", "command")
ROWS = (
    held(0, "alice", "train.ipynb", "note")._replace(holders=(HOLDER,)),
    held(1, "bob")._replace(holders=(HOLDER, HOLDER), processes=(PROCESS,)),
    free(2)._replace(state=State.BUSY, processes=(PROCESS, PROCESS._replace(zombie_of="parent"))),
    free(3)._replace(state=State.BUSY, reason="reason"),
    free(4)._replace(awaited_by=HOLDER),
    DeviceStatus(Fault(5, "reason"), State.BROKEN, reason="reason"),
)
TICKET = Ticket(1, "queue-1", None, HOLDER, "GPU0")
SEEN = Status(ROWS, (TICKET,), time=NOW, host="host", frontend=SHELL, problem="problem", limit="0")


def of_commands(seen: Status) -> Iterator[str]:
    """Yield the status in the formats of the commands that are there."""
    with suppress(ModuleNotFoundError):
        hosts = import_module("reserve_gpu.commands.hosts.hosts_view")
        picture = hosts.Hosts({"lab1": seen, "lab2": "silent"}, NOW).picture()
        yield picture.to_text()
        yield picture._repr_html_()
    with suppress(ModuleNotFoundError):
        live = import_module("reserve_gpu.commands.top.live")
        yield "\n".join(map(plain, live.processes(seen.rows, 999, 99)))
    with suppress(ModuleNotFoundError):
        yield import_module("reserve_gpu.commands.export.html_page").page(seen, "GPUs")
        yield import_module("reserve_gpu.commands.export.prometheus").text(seen)


def test_nothing_of_it_reaches_a_reader() -> None:
    """No format of the status has letters that can't be seen, whatever other processes write."""
    seen = SEEN._replace(rows=nasty(SEEN.rows), waiting=nasty(SEEN.waiting), host=NASTY)
    seen = seen._replace(problem=NASTY, limit=NASTY)
    waiting = Waiting(Request(), 2, 5.0, seen.rows, math.inf, seen.waiting[0])
    for text in (
        *of_commands(seen),
        pictures.wait(waiting).to_text(),
        str(public.printable(seen.to_dict())),
        seen.picture().to_text(),
        seen.picture()._repr_html_(),
    ):
        lines = text.split("\n")
        assert "forged" in text
        assert not [line for line in lines if line.startswith("forged")]
        assert {each for line in lines for each in faults(line)} == set()


@pytest.mark.parametrize(
    "value", [None, "a", 5, {"a": "b"}, ["a", 5], ["a", None], [["a"]], ["a\nb"]]
)
def test_invalid_lines(value: object) -> None:
    """Lines are only read from a list that contains nothing but strings of one line each."""
    assert Fields({"behind": value}).lines("behind") is None
    assert Fields({"behind": ["a", "b", "c"]}).lines("behind", 2) == "a\nb"
