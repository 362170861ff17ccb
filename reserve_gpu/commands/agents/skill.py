"""`reserve-gpu skill`: a page for the instructions of a coding agent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reserve_gpu.commands.output import Output

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(_parser: ArgumentParser) -> None:
    """Add nothing: it has no arguments."""


def run(_arguments: Namespace) -> Output:
    """Return the page."""
    return Output(Path(__file__).with_name("SKILL.md").read_text(encoding="utf-8"))
