"""The `reserve-gpu skill` command: print instructions for coding agents."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reserve_gpu.commands.output import Output

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(_parser: ArgumentParser) -> None:
    """Do nothing, because `skill` takes no arguments."""


def run(_arguments: Namespace) -> Output:
    """Return the text of SKILL.md."""
    return Output(Path(__file__).with_name("SKILL.md").read_text(encoding="utf-8"))
