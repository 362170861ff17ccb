"""Whether words get colours: by what was typed, by the environment, by where they go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTO, ALWAYS, NEVER = "auto", "always", "never"
CHOICES = (AUTO, ALWAYS, NEVER)


def is_coloured(choice: str, environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Tell whether to use colours.

    choice: one of CHOICES; what was typed prevails. environ: of this process. It is asked for
    NO_COLOR first (https://no-color.org), then for FORCE_COLOR (https://force-color.org), of which
    only whether they are empty counts.
    """
    if choice != AUTO:
        return choice == ALWAYS
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (is_terminal and environ.get("TERM") != "dumb")
