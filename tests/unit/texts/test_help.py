"""The help of each command and of the magic, in a terminal of 100 columns."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.cli.main import main
from reserve_gpu.commands.registry import COMMANDS
from reserve_gpu.ipython.parser import magic_parser

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

SHOWN = {name for name, command in COMMANDS.items() if command.help}
NAMES = sorted({"", *SHOWN, *(name.partition(" ")[0] for name in SHOWN)})


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def like_python_313(text: str) -> str:
    """Return the help with `-n, --count N`, as of Python 3.13, instead of `-n N, --count N`."""
    option = re.compile(r"^(  -\w) (\S+), (--[\w-]+ \2)\s+", re.MULTILINE)
    return option.sub(lambda found: f"{found[1]}, {found[3]}".ljust(24), text)


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command(
    name: str, snapshot: SnapshotAssertion, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*name.split(), "--help"])
    assert like_python_313(capsys.readouterr().out) == snapshot


def test_help_of_the_magic(snapshot: SnapshotAssertion) -> None:
    assert like_python_313(magic_parser().format_help()) == snapshot
