"""Access this process's IPython shell, and display output in it.

IPython is only imported inside the functions that need it, so that scripts never load it.
"""

from __future__ import annotations

import sys
from typing import Any


def current_shell() -> Any:
    """Return this process's IPython shell, if any. This does not import IPython."""
    ipython = sys.modules.get("IPython.core.getipython")
    return ipython and ipython.get_ipython()


def has_kernel() -> bool:
    """Return whether this process's IPython shell belongs to a Jupyter kernel."""
    return hasattr(current_shell(), "kernel")


def display(data: object, *, raw: bool = False) -> None:
    """Display an object in the current cell.

    Args:
        data: The object.
        raw: Whether the object is a dict that maps MIME types to data.
    """
    from IPython.display import display

    display(data, raw=raw)  # type: ignore[no-untyped-call]


def new_handle() -> Any:
    """Return a handle for a new display, which can be updated later."""
    from IPython.display import DisplayHandle

    return DisplayHandle()  # type: ignore[no-untyped-call]


def is_capturing(publisher: object) -> bool:
    """Return whether a display publisher is capturing a cell's output, as under `%%capture`."""
    from IPython.core.displaypub import CapturingDisplayPublisher

    return isinstance(publisher, CapturingDisplayPublisher)
