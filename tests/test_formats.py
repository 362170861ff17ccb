"""What the status is given out as: coloured text, a page for browsers, metrics for Prometheus."""

from __future__ import annotations

import io
import re
import sys
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.report.colour import is_coloured
from reserve_gpu.report.layout import Layout
from reserve_gpu.report.pictures import Picture
from reserve_gpu.report.progress import Frame, Terminal
from reserve_gpu.report.words import STRONG
from tests.commandline import CommandLine

if TYPE_CHECKING:
    from tests.here import Here

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """`reserve-gpu` on the machine of this process."""
    return CommandLine(capsys)


class Tty(io.StringIO):
    """A terminal, as far as Python asks."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


# -- colours ---------------------------------------------------------------------------------------

NO, FORCE, DUMB = {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}


@pytest.mark.parametrize(
    ("choice", "environ", "on_a_terminal", "elsewhere"),
    [
        ("auto", {}, True, False),
        ("auto", NO, False, False),
        ("auto", {"NO_COLOR": ""}, True, False),
        ("auto", {"NO_COLOR": "0"}, False, False),
        ("auto", FORCE, True, True),
        ("auto", {"FORCE_COLOR": ""}, True, False),
        ("auto", {"FORCE_COLOR": "0"}, True, True),
        ("auto", {**NO, **FORCE}, False, False),
        ("auto", DUMB, False, False),
        ("auto", {**DUMB, **FORCE}, True, True),
        ("always", {**NO, **DUMB}, True, True),
        ("never", FORCE, False, False),
    ],
)
def test_who_decides_about_colours(
    choice: str, environ: dict[str, str], *, on_a_terminal: bool, elsewhere: bool
) -> None:
    """What was typed prevails; else NO_COLOR, FORCE_COLOR and what the output is, in this order."""
    assert is_coloured(choice, environ, is_terminal=True) is on_a_terminal
    assert is_coloured(choice, environ, is_terminal=False) is elsewhere


def test_colours_in_a_pipe(here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets colours where they are asked for, and the same words with them and without."""
    monkeypatch.delenv("COLUMNS", raising=False)
    plain = typed("status").stdout
    assert "\x1b" not in plain
    coloured = typed("status", "--color", "always").stdout
    assert "\x1b[" in coloured
    assert COLOURS.sub("", coloured).splitlines()[1:] == plain.splitlines()[1:]
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in typed("status").stdout
    assert "\x1b" not in typed("status", "--color=never").stdout


def test_colours_for_a_screen_behind_a_pipe(
    here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In colours the lines are as wide as `watch` says that its screen is; in a log they are whole.

    https://man7.org/linux/man-pages/man1/watch.1.html
    """
    monkeypatch.setenv("COLUMNS", "50")
    with here.rival(note="a long story " * 10):
        coloured = COLOURS.sub("", typed("status", "--color", "always").stdout).splitlines()
        plain = typed("status").stdout.splitlines()
    assert {len(line) > 50 for line in coloured if "long story" in line} == {False}
    assert {len(line) > 50 for line in plain if "long story" in line} == {True}


@pytest.mark.parametrize(("name", "are_some"), [("NO_COLOR", False), ("NOTHING", True)])
def test_no_colours_in_a_terminal(
    here: Here, monkeypatch: pytest.MonkeyPatch, name: str, *, are_some: bool
) -> None:
    """With NO_COLOR neither the status nor what is live has colours in a terminal."""
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TERM", "xterm")
    live = Tty()
    Terminal(live).show(Frame(Picture(Layout([(("words", STRONG),)]))))
    assert ("\x1b[1m" in live.getvalue()) is are_some
    monkeypatch.setattr(sys, "stdout", Tty())
    assert ("\x1b[" in reserve_gpu.status().to_text()) is are_some


def test_a_colour_that_is_none(typed: CommandLine) -> None:
    """Another choice than auto, always and never is refused with what there is."""
    done = typed("status", "--color", "purple")
    assert done.code == 2
    assert all(choice in done.stderr for choice in ("auto", "always", "never"))
