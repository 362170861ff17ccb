"""The IPython shell of this process, and its displays.

Each function imports the parts of IPython that it needs, so that scripts never load IPython.
"""

from __future__ import annotations

import sys
from typing import Any


def current_shell() -> Any:
    """Return the IPython shell of this process, or None, without importing IPython."""
    ipython = sys.modules.get("IPython.core.getipython")
    return ipython and ipython.get_ipython()


def has_kernel() -> bool:
    """Return whether this process has the IPython shell of a Jupyter kernel."""
    return hasattr(current_shell(), "kernel")


def display(data: object, *, raw: bool = False) -> None:
    """Display an object in the current cell.

    Args:
        data: The object.
        raw: Whether the object is a dict from MIME types to data.
    """
    from IPython.display import display

    display(data, raw=raw)  # type: ignore[no-untyped-call]


def new_handle() -> Any:
    """Return the handle of a new display, which can be updated."""
    from IPython.display import DisplayHandle

    return DisplayHandle()  # type: ignore[no-untyped-call]


def is_capturing(publisher: object) -> bool:
    """Return whether a display publisher captures the output of a cell, as in `%%capture`."""
    from IPython.core.displaypub import CapturingDisplayPublisher

    return isinstance(publisher, CapturingDisplayPublisher)
