"""What is said of the caps that keep frameworks within a part of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.report.words import be, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
LATE = (
    "CUDA runs already: JAX, TensorFlow and CuPy keep the limit that they started with until a "
    "restart."
)
MPS_OF_SEVERAL = (
    "MPS: no limit is set, as it would go by numbers that change where a process sees fewer GPUs. "
    "Reserve one GPU for each process, or set CUDA_MPS_PINNED_DEVICE_MEM_LIMIT yourself."
)


def stand(names: Sequence[str]) -> str:
    """Say that these variables, which the user has set, were left as they are."""
    keep = "keeps its value" if len(names) == 1 else "keep their values"
    return f"{listed(names)} {be(len(names))} set already and {keep}, as the cap there."


def uneven(names: Sequence[str]) -> str:
    """Say that one number has to do for GPUs of different sizes. names: of the variables."""
    return (
        f"These GPUs differ in memory, and {listed(names)} {be(len(names))} one fraction for all: "
        "that of the largest. On the others it is less than the part."
    )


def to_type(framework: str, line: str) -> str:
    """Return how the user can cap a framework that reads no variable."""
    return f"To keep {framework} within the part, run this right after its import:\n{line}"
