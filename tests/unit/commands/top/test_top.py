"""`reserve-gpu top` on a simulated screen."""

from __future__ import annotations

import curses
import re
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.cli.main import main
from reserve_gpu.commands.top import live
from reserve_gpu.model.devices import Device, Process, State
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.render.phrases import plain
from reserve_gpu.render.status_view import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = tuple(DeviceStatus(Device(index, f"GPU-{index}"), State.FREE) for index in range(64))


def test_without_a_terminal_the_error_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith("reserve-gpu status\n")


@pytest.mark.parametrize(
    ("max_lines", "listed", "is_cut"),
    [
        (5, [("GPU0", "3"), ("GPU1", "2"), ("GPU0", "1")], False),
        (4, [("GPU0", "3")], True),
        (3, [], False),
    ],
)
def test_processes_are_listed_by_memory_as_far_as_there_is_room(
    max_lines: int, listed: list[tuple[str, str]], *, is_cut: bool
) -> None:
    first, second, third = (Process(pid, pid * 1024, "bob", "python\x1b") for pid in (1, 3, 2))
    rows = ROWS[0]._replace(processes=(first, second)), ROWS[1]._replace(background=(third,))
    text = "".join(map(plain, live.processes(rows, 80, max_lines)))
    assert re.findall(r"(GPU\d) +(\d)\.0 GiB", text) == listed
    assert ("2 more" in text) is is_cut
    assert "\x1b" not in text


class Screen:
    """A curses window of 24 lines.

    Args:
        keys: The keys to press; each list arrives at once.

    Attributes:
        seen: The text on the screen at each wait for a key.
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

    def addstr(self, y: int, x: int, text: str, _: int) -> None:
        self._lines[y] = self._lines.get(y, "").ljust(x) + text

    def refresh(self) -> None:
        """Do nothing."""


def visible_gpus(*keys: list[str]) -> list[str]:
    """Return the first and the last of 64 GPUs on the screen, before each key and at the end."""
    screen, status = Screen(*keys, ["q"]), Status(ROWS)
    live.Top(screen, lambda: status, is_colored=False).run(status)
    numbers = [re.findall(r"^(\d+) +free", text, re.MULTILINE) for text in screen.seen]
    return [f"{found[0]}-{found[-1]}" for found in numbers]


def test_keys_scroll_by_lines_by_pages_and_to_the_ends() -> None:
    pages = [["KEY_NPAGE"]] * 4 + [["KEY_PPAGE"]] * 3
    ranges = ["0-20", "21-43", "42-63", "42-63", "42-63", "19-41", "0-20"]
    assert visible_gpus(*pages)[: len(ranges)] == ranges
    lines = visible_gpus(["KEY_END"], ["KEY_UP"], ["KEY_HOME"], ["KEY_DOWN"])
    assert lines == ["0-20", "42-63", "41-63", "0-20", "0-21"]


def test_escape_quits_unless_more_characters_arrive_with_it() -> None:
    """Alt-x, and a key that the terminal does not name, arrive that way."""
    assert len(visible_gpus(["\x1b", "x"], ["\x1b", "[", "1", ";", "3", "A"], ["x"])) == 4
    screen = Screen(["\x1b"])
    live.Top(screen, lambda: Status(()), is_colored=False).run(Status(()))
    assert len(screen.seen) == 1
