"""Helpers of tests: status_parts."""

from __future__ import annotations

from typing import Any


def numbers(device: dict[str, Any]) -> list[tuple[float | None, float | None, bool | None]]:
    """Return what each holder was promised and uses, and whether that is too much."""
    names = ("memory_promised_mib", "memory_used_mib", "is_over")
    return [tuple(holder[name] for name in names) for holder in device["holders"]]
