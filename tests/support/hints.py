"""Helpers of tests: hints."""

from __future__ import annotations


def typed(text: str) -> str:
    """Return the command to type: the last line."""
    return text.splitlines()[-1]
