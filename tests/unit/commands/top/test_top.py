"""reserve-gpu top: the status live in a terminal."""

from __future__ import annotations

import curses
import re
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.cli.main import main
from reserve_gpu.commands.top import live as top
from reserve_gpu.model.devices import Device, Process, State
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.render.phrases import plain
from reserve_gpu.render.status_view import Status

if TYPE_CHECKING:
    from collections.abc import Iterator


pexpect = pytest.importorskip("pexpect")  # IPython brings it


def row(index: int) -> DeviceStatus:
    return DeviceStatus(Device(index, f"GPU-{index}"), State.FREE)


def test_it_needs_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Where there is no terminal one line says so, and what to type."""
    assert main(["top"]) == 2
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.endswith("To see the status once: reserve-gpu status")


def test_processes_where_there_is_room() -> None:
    """Below the picture stand the processes, those with the most memory first, as room is left."""
    found = [Process(pid, pid * 1024, "bob", "python\x1b") for pid in (1, 3, 2)]
    rows = (row(0)._replace(processes=(*found[:2],)), row(1)._replace(background=(found[2],)))
    texts = ["".join(map(plain, top.processes(rows, 80, room))) for room in (5, 4, 3)]
    assert [re.findall(r"(GPU\d) +(\d)\.0 GiB", text) for text in texts] == [
        [("GPU0", "3"), ("GPU1", "2"), ("GPU0", "1")], [("GPU0", "3")], [],
    ]  # fmt: skip
    assert "2 more" in texts[1]
    assert "\x1b" not in texts[0]
    assert top.processes((row(0),), 80, 20) == []


def test_users_are_aligned() -> None:
    """Commands start in one column, however long the users are, and end with the terminal."""
    found = [Process(pid, 1024, "bob" * pid, "python" * 9) for pid in (1, 2)]
    _, _, *lines = map(plain, top.processes((row(0)._replace(processes=tuple(found)),), 60, 20))
    assert len({line.index("python") for line in lines}) == 1
    assert [len(line) for line in lines] == [60, 60]


class Screen:
    """A screen of 24 lines. keys: what is pressed, one after the other; what comes at once is one.

    seen: the lines that stood there at each of them.
    """

    def __init__(self, *keys: list[str]) -> None:
        self._keys = [*keys]
        self._arriving: Iterator[str] = iter([])
        self._lines: dict[int, str] = {}
        self.seen: list[str] = []

    def getmaxyx(self) -> tuple[int, int]:
        return 24, 120

    def timeout(self, milliseconds: int) -> None:
        if milliseconds:
            self.seen.append("\n".join(self._lines[y] for y in sorted(self._lines)))
            self._arriving = iter(self._keys.pop(0))

    def getkey(self) -> str:
        for key in self._arriving:
            return key
        raise curses.error

    def erase(self) -> None:
        self._lines = {}

    def addstr(self, y: int, x: int, words: str, _: int) -> None:
        self._lines[y] = self._lines.get(y, "").ljust(x) + words

    def refresh(self) -> None:
        """Do nothing: all of it is shown at once."""


def shown(*keys: list[str]) -> list[str]:
    """Return the numbers of the GPUs that stand there at each key, the first and the last one."""
    screen, rows = Screen(*keys, ["q"]), tuple(map(row, range(64)))
    seen = Status(rows)
    top.Top(screen, lambda: seen, is_colored=False).run(seen)
    every = [re.findall(r"^(\d+) +free", text, re.MULTILINE) for text in screen.seen]
    return [f"{numbers[0]}-{numbers[-1]}" for numbers in every]


def test_keys_scroll() -> None:
    """Each of 64 GPUs is reached by arrows, by pages, by Home and by End, and none beyond them."""
    pages = [["KEY_NPAGE"]] * 4 + [["KEY_PPAGE"]] * 3
    numbers = ["0-20", "21-43", "42-63", "42-63", "42-63", "19-41", "0-20"]
    assert shown(*pages)[: len(numbers)] == numbers
    assert shown(["KEY_END"], ["KEY_UP"], ["KEY_HOME"], ["KEY_DOWN"]) == [
        "0-20", "42-63", "41-63", "0-20", "0-21",
    ]  # fmt: skip


def test_alt_and_a_key_ends_nothing() -> None:
    """Alt-x, and a key that the terminal does not name, come as Esc with more: only Esc ends it."""
    assert len(shown(["\x1b", "x"], ["\x1b", "[", "1", ";", "3", "A"], ["x"])) == 4
    screen = Screen(["\x1b"])
    top.Top(screen, lambda: Status(()), is_colored=False).run(Status(()))
    assert len(screen.seen) == 1
