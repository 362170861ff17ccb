"""The modules of the package, for tests of the wheel."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def modules() -> set[str]:
    """Return the paths of the package's modules."""
    package = CHECKOUT / "reserve_gpu"
    return {str(path.relative_to(CHECKOUT)) for path in package.rglob("*.py")}
