"""Tests of the commands, each in a folder that goes with its command; and what is there to type."""

from __future__ import annotations

import pytest

from reserve_gpu.commands.table import NAMES
from reserve_gpu.reservation.feature_registry import FEATURES


def needs_command(name: str) -> pytest.MarkDecorator:
    """Skip a test that uses another command, too, where that one has no row."""
    return pytest.mark.skipif(name not in NAMES, reason=f"needs the command {name}")


# Words by which a line can be told that only these commands, and this feature, understand.
TYPED = {
    "top": {"top", "--watch"},
    "hosts": {"--hosts"},
    "report": {"report"},
    "kernels": {"kernel"},
    "lease": {"--for", "--until", "--idle", "--if-wanted", "--end-kernel"},
    "agents": {"why", "skill"},
    "export": {"html", "htlm", "prometheus", "record"},
}
THERE = NAMES | {row.module.split(".")[1] for row in FEATURES}
UNKNOWN = {word for name, words in TYPED.items() if name not in THERE for word in words}


def understood(*lines: str) -> list[str]:
    """Return the lines that need nothing that has no row."""
    return [*filter(is_understood, lines)]


def is_understood(line: str) -> bool:
    """Tell whether a line needs nothing that has no row."""
    return UNKNOWN.isdisjoint(line.split())
