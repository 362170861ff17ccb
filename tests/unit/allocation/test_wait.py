"""Waiting for a GPU in the test process: who goes first, when to look, and how it ends."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.requests import Request
from reserve_gpu.render.progress import CLEAR, Live
from tests.support.holders import a_holder

if TYPE_CHECKING:
    import pytest


from tests.support.wait import Terminal

# -- what is seen of it ----------------------------------------------------------------------------


def test_a_wait_is_shown_once_in_every_second() -> None:
    """However often a waiter is woken, no second is skipped, and none is shown twice."""
    log = io.StringIO()
    with Live(log) as live:
        for entry, waited_s in enumerate((0.1, 0.9, 1.1, 1.9, 2.0), 2):
            live.show(Waiting(Request(), entry, waited_s, ()))
    assert re.findall(r"number ([0-9]) in the queue, ([0-9]) s so far", log.getvalue()) == [
        ("2", "0"), ("4", "1"), ("6", "2"),
    ]  # fmt: skip


def test_where_the_picture_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal with too few lines gets one line, cut where it has no room.

    Letters that take two columns count as two.
    """
    monkeypatch.setenv("COLUMNS", "71")
    monkeypatch.setenv("LINES", "3")
    monkeypatch.setenv("TERM", "vt100")
    holder, terminal = a_holder(4321000, "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 20), Terminal()
    row = DeviceStatus(Device(0, "GPU-a"), State.RESERVED, holders=(holder,))
    with Live(terminal) as live:
        live.show(Waiting(Request(), 1, 0.0, (row,)))
    shown = "Waiting for a GPU: next in the queue, 0 s so far. GPU0 "
    line = f"{shown}{holder.user}"[: len(shown) + (70 - 3 - len(shown)) // 2]
    assert terminal.getvalue() == f"\r\x1b[J{line}...\n\r\x1b[1A\x1b[J"


def test_where_the_terminal_shows_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor stands below the picture: the ^C that a terminal shows makes no line longer."""
    monkeypatch.setenv("COLUMNS", "71")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "vt100")
    row = DeviceStatus(Device(0, "GPU-a"), State.RESERVED, holders=(a_holder(4321000, "alice"),))
    terminal = Terminal()
    with Live(terminal) as live:
        live.show(Waiting(Request(), 1, 0.0, (row,)))
        shown = terminal.getvalue()
    assert shown.endswith("\n")
    assert terminal.getvalue() == f"{shown}\r\x1b[{shown.count(chr(10))}A\x1b[J"


def test_a_terminal_that_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown is broken to the new width at once, also where nothing else has changed."""
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Live(stream) as live:
        for waited_s, columns in ((3600.0, 80), (3601.0, 80), (3602.0, 30)):
            monkeypatch.setenv("COLUMNS", str(columns))
            live.show(Waiting(Request(), 1, waited_s, ()))
    wide, narrow, end = stream.getvalue().split(CLEAR)[1:]
    assert wide.count("\n") == 1
    assert narrow.count("\n") > 1
    assert "Waiting" not in end
