"""The display of a wait on a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest

from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.requests import Request
from reserve_gpu.render.progress import CLEAR, Live
from tests.support.holders import a_holder
from tests.support.wait import Terminal


def waiting(waited_s: float = 0.0, place: int = 1, user: str | None = None) -> Waiting:
    """Return the progress of a wait for GPU0, which this user has reserved, or for any GPU."""
    holder = a_holder(4321000, user)
    row = DeviceStatus(Device(0, "GPU-a"), State.RESERVED, holders=(holder,))
    return Waiting(Request(), place, waited_s, (row,) if user else ())


@pytest.fixture
def vt100(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal with 71 columns and 24 lines."""
    for name, value in {"COLUMNS": "71", "LINES": "24", "TERM": "vt100"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


def test_a_wait_is_shown_once_in_every_second() -> None:
    """However often the waiter checks, no second is skipped, and none is shown twice."""
    log = io.StringIO()
    with Live(log) as live:
        for place, waited_s in enumerate((0.1, 0.9, 1.1, 1.9, 2.0), 2):
            live.show(waiting(waited_s, place))
    shown = re.findall(r"number ([0-9]) in the queue, ([0-9]) s so far", log.getvalue())
    assert shown == [("2", "0"), ("4", "1"), ("6", "2")]


def test_a_low_terminal_shows_one_shortened_line(
    vt100: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters that are two columns wide count as two columns."""
    monkeypatch.setenv("LINES", "3")
    user = "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 20
    with Live(vt100) as live:
        live.show(waiting(user=user))
    shown = "Waiting for a GPU: next in the queue, 0 s so far. GPU0 "
    line = f"{shown}{user}"[: len(shown) + (70 - 3 - len(shown)) // 2]
    assert vt100.getvalue() == f"\r\x1b[J{line}...\n\r\x1b[1A\x1b[J"


def test_the_picture_follows_the_width_of_the_terminal(
    vt100: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the terminal is resized, the same text is broken into other lines."""
    with Live(vt100) as live:
        for waited_s, columns in ((3600.0, 80), (3601.0, 80), (3602.0, 30)):
            monkeypatch.setenv("COLUMNS", str(columns))
            live.show(waiting(waited_s))
    wide, narrow, end = vt100.getvalue().split(CLEAR)[1:]
    assert wide.count("\n") == 1
    assert narrow.count("\n") > 1
    assert "Waiting" not in end
