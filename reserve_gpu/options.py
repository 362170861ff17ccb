"""The one table of options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """One argument of the magic, as argparse takes it."""

    flags: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


REQUEST = (
    Option(
        ("devices",),
        {
            "nargs": "*",
            "metavar": "DEVICE",
            "help": "the GPUs to take: an index (2), several (1,3 or 1 3, order kept), a UUID or the start "
            "of one (GPU-8f2a), a MIG instance (1:0), a PCI bus id (0000:03:00.0). None: the first free one",
        },
    ),
)

MAGIC = (
    Option(("--release",), {"action": "store_true", "help": "let go of what this kernel holds"}),
)
