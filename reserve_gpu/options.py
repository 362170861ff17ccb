"""The one table of options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One argument, as argparse takes it."""

    flags: tuple[str, ...]
    settings: dict[str, Any]


def _option(*flags: str, **settings: Any) -> Option:
    return Option(flags, settings)


REQUEST = (
    _option(
        "devices",
        nargs="*",
        metavar="DEVICE",
        help="GPUs to take: an index (2), several (1,3 or 1 3, order kept), a UUID or its start "
        "(GPU-8f2a), a MIG instance (1:0), a PCI bus id (0000:03:00.0); none: the first free one",
    ),
    _option("-n", "--count", type=int, metavar="COUNT", help="how many, the best connected ones"),
    _option("--min-memory", metavar="SIZE", help="total memory of each: 16GB, 16GiB, 16000 (MiB)"),
    _option("--name", metavar="TEXT", help="only GPUs with this text in their name"),
    _option(
        "--exclude", nargs="+", action="extend", default=[], metavar="DEVICE", help="never these"
    ),
    _option("--share", action="store_true", help="also a GPU that is in use or reserved"),
    _option("--note", metavar="TEXT", help="a line for others to read beside your reservation"),
    _option("--optional", action="store_true", help="where no GPU can be had, go on without one"),
)

MAGIC = (_option("--release", action="store_true", help="let go of what this kernel holds"),)
