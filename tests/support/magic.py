"""Helpers of tests: magic."""

from __future__ import annotations


def without_container(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("Warning: this container"))
