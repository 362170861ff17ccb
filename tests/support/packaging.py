"""Helpers of tests: packaging."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def modules() -> set[str]:
    package = CHECKOUT / "reserve_gpu"
    return {str(path.relative_to(CHECKOUT)) for path in package.rglob("*.py")}
