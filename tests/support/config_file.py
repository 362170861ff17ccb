"""Helpers of tests: config_file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OTHER = 65501  # an account without a name


def own(path: Path) -> None:
    for each in (path, *path.rglob("*")):
        os.lchown(each, OTHER, OTHER)
