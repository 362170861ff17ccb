"""Help, version and status on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.registry import COMMANDS

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here


@pytest.mark.parametrize(
    "words", ["", "kernel", *(name for name, command in COMMANDS.items() if command.help)]
)
def test_help(here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """`--help`, `-h` and `help` show the same text, within 80 columns and without the driver."""
    monkeypatch.setenv("COLUMNS", "80")
    done = typed(*words.split(), "--help")
    assert (done.code, done.stderr, done.argv) == (0, "", None)
    assert done.stdout.startswith("usage: reserve-gpu")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "kernel start" not in done.stdout
    for command in ([*words.split(), "-h"], ["help", *words.split()]):
        assert typed(*command) == done
    assert here.calls() == []


@pytest.mark.parametrize("words", ["", "kernel"])
def test_without_a_command(here: Here, typed: CommandLine, words: str) -> None:
    """Without a command, the help is shown with exit code 2."""
    done, help_ = typed(*words.split()), typed(*words.split(), "--help")
    assert (done.code, done.stdout, done.stderr) == (2, help_.stdout, "")
    assert here.calls() == []


def test_version_is_one_line(typed: CommandLine) -> None:
    done = typed("--version")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("reserve-gpu")
    assert done.stdout.count("\n") == 1
