"""`reserve-gpu skill`: a page for the instructions of a coding agent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reserve_gpu.commands.table import Output, Subcommand

if TYPE_CHECKING:
    from argparse import Namespace


def skill(_arguments: Namespace) -> Output:
    """Return the page."""
    return Output(Path(__file__).with_name("SKILL.md").read_text(encoding="utf-8"))


SKILL = Subcommand(skill)
