"""The help of each command and of the magic."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.cli.main import main
from reserve_gpu.commands.registry import COMMANDS
from reserve_gpu.extension import ReserveGPU
from reserve_gpu.ipython.parser import magic_parser

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

SHOWN = {name for name, command in COMMANDS.items() if command.help}
NAMES = sorted({"", *SHOWN, *(name.partition(" ")[0] for name in SHOWN)})


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal so wide that no line is broken."""
    monkeypatch.setenv("COLUMNS", "1000")


def normalize(text: str) -> str:
    """Return the help as of Python 3.13, with two spaces between an option and its text.

    Older versions print `-n N, --count N` instead of `-n, --count N`, which moves the texts.
    """
    text = re.sub(r"(-\w) (\S+), (--[\w-]+ \2)", r"\1, \3", text)
    return re.sub(r"^( +(?:-|[A-Z]{5}).*?)\s{2,}(?=\S)", r"\1  ", text, flags=re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command(
    name: str, snapshot: SnapshotAssertion, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*name.split(), "--help"])
    assert normalize(capsys.readouterr().out) == snapshot


def test_help_of_the_magic(snapshot: SnapshotAssertion) -> None:
    assert normalize(magic_parser().format_help()) == snapshot


def test_help_of_the_settings(snapshot: SnapshotAssertion) -> None:
    """`%config ReserveGPU` shows this text and the current values."""
    assert ReserveGPU.class_get_help() == snapshot
