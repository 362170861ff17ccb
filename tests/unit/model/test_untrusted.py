"""Texts that other users wrote are safe to print, in every format."""

from __future__ import annotations

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
    *"\u00a0\u00ad\u061c\u180e\u2003\u200b\u200d\u200f\u2028\u202e\u2066\u3000\ufeff",
    *"\ue000\ud800\u0378\U000e0001\U000e0041\x00\x1b\x7f\x85\n\r\t",
]
MARKS = ["\u0301", "\u0338", "\u20dd", "\u0e31", "\u1161", "\u0903", "\u0fb2"]
LETTERS = st.one_of(
    st.sampled_from(INVISIBLE),
    st.sampled_from(MARKS),
    st.characters(),
    st.sampled_from("ae 1\u65e5"),
)


def forbidden_letters(text: str) -> list[str]:
    """Return the letters that must not be shown: invisible ones, and too many marks."""
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
def test_sanitized_text_is_short_and_visible(text: str, limit: int) -> None:
    """A sanitized text stays the same if it is sanitized again."""
    clean = sanitize(text, limit)
    assert len(clean) <= limit
    assert forbidden_letters(clean) == []
    assert sanitize(clean, limit) == clean
    assert len(text) <= limit or clean.endswith("\u2026")
    assert unicodedata.category(f"{clean}x"[0])[0] != "M"  # would combine with the text before


@pytest.mark.parametrize(
    "name",
    [
        "Vie\u0302\u0323t Nam",
        "\u0915\u094d\u0937\u0924\u094d\u0930\u093f\u092f \u095b\u093f\u0902\u0926\u0917\u0940",
        "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
        "\u1112\u1161\u11ab\u1100\u1173\u11af",
    ],
)
def test_names_with_several_marks_on_a_letter_are_unchanged(name: str) -> None:
    assert sanitize(name) == name


NASTY = f"e\nforged{MARKS[0] * 78}{''.join(INVISIBLE)}{MARKS[1] * 3}"
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


def nasty(value: Any) -> Any:
    """Return the value with NASTY in place of each text in it."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return NASTY
    if isinstance(value, Process):  # `kind` is a constant of this package
        return Process(*map(nasty, value))._replace(kind=value.kind)
    if isinstance(value, tuple):
        items = map(nasty, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def formats_of_commands(status: Status) -> Iterator[str]:
    """Yield the status in the formats of the commands that exist."""
    with suppress(ModuleNotFoundError):
        hosts = import_module("reserve_gpu.commands.hosts.hosts_view")
        picture = hosts.Hosts({"lab1": status, "lab2": "silent"}, NOW).picture()
        yield picture.to_text()
        yield picture._repr_html_()
    with suppress(ModuleNotFoundError):
        live = import_module("reserve_gpu.commands.top.live")
        yield "\n".join(map(plain, live.processes(status.rows, 999, 99)))
    with suppress(ModuleNotFoundError):
        yield import_module("reserve_gpu.commands.export.html_page").page(status, "GPUs")
        yield import_module("reserve_gpu.commands.export.prometheus").text(status)


def test_each_format_sanitizes_the_texts_of_other_users() -> None:
    status = Status(nasty(ROWS), nasty((TICKET,)), NASTY, NOW, NASTY, limit=NASTY, frontend=SHELL)
    waiting = Waiting(Request(), 2, 5.0, status.rows, first=status.waiting[0])
    for text in (
        *formats_of_commands(status),
        pictures.wait(waiting).to_text(),
        str(public.printable(status.to_dict())),
        status.picture().to_text(),
        status.picture()._repr_html_(),
    ):
        assert "forged" in text
        assert "\nforged" not in text
        assert {letter for line in text.split("\n") for letter in forbidden_letters(line)} == set()


@pytest.mark.parametrize("value", ["a", ["a", 5], ["a\nb"]])
def test_only_a_list_of_single_lines_is_read_as_lines(value: object) -> None:
    assert Fields({"behind": value}).lines("behind") is None
    assert Fields({"behind": ["a", "b", "c"]}).lines("behind", 2) == "a\nb"
