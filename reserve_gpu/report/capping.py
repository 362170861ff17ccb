"""What is said of the caps that keep frameworks within a part of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.errors import shown
from reserve_gpu.report.words import be, listed

if TYPE_CHECKING:
    from collections.abc import Sequence


def stand(names: Sequence[str]) -> list[str]:
    """That these variables, which the user has set, were left as they are."""
    if not names:
        return []
    keep = "keeps its value" if len(names) == 1 else "keep their values"
    return [f"{listed(names)} {be(len(names))} set already and {keep}, as the cap there."]


def uneven(names: Sequence[str]) -> str:
    """That one number has to do for GPUs of different sizes. names: of the variables."""
    return (
        f"These GPUs differ in memory, and {listed(names)} {be(len(names))} one fraction for all: "
        "that of the largest. On the others it is less than the part."
    )


def keeps(framework: str) -> str:
    """That a framework which runs already can't be given another cap."""
    return (
        f"{framework} runs already and keeps the limit that it started with, or none: restart this "
        "kernel to have it capped anew."
    )


def uncapped(framework: str, error: Exception) -> str:
    """That this version of a framework can't be capped."""
    return (
        f"Nothing keeps {framework} within the part here ({type(error).__name__}: "
        f"{shown(str(error))}): mind what it uses."
    )
