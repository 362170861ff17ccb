"""Decide about colours: by the environment, and the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_coloured(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Tell whether to use colours.

    environ: of this process. NO_COLOR (https://no-color.org) comes before FORCE_COLOR
    (https://force-color.org); each counts if it is not empty.
    """
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (is_terminal and environ.get("TERM") != "dumb")
