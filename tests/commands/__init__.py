"""Tests of the commands, each in a folder that goes with its command."""

from __future__ import annotations

import pytest

from reserve_gpu.commands.table import NAMES


def needs_command(name: str) -> pytest.MarkDecorator:
    """Skip a test that uses another command, too, where that one has no row."""
    return pytest.mark.skipif(name not in NAMES, reason=f"needs the command {name}")
