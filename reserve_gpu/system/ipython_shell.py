"""The IPython shell of this process, and its displays.

A script without IPython never loads it: each function imports what it needs.
"""

from __future__ import annotations

import sys
from typing import Any


def current_shell() -> Any:
    """Return the IPython shell of this process, None without one. Never imports IPython."""
    ipython = sys.modules.get("IPython.core.getipython")
    return ipython and ipython.get_ipython()


def has_kernel() -> bool:
    """Return whether the shell of this process is a kernel's, as in a notebook."""
    return hasattr(current_shell(), "kernel")


def display(data: object, *, raw: bool = False) -> None:
    """Display an object in the current cell. raw: It is a dict from MIME types to data."""
    from IPython.display import display

    display(data, raw=raw)  # type: ignore[no-untyped-call]


def new_handle() -> Any:
    """Return the handle of a display that can be updated."""
    from IPython.display import DisplayHandle

    return DisplayHandle()  # type: ignore[no-untyped-call]


def is_capturing(publisher: object) -> bool:
    """Return whether a publisher keeps the output of a cell, as `%%capture` does."""
    from IPython.core.displaypub import CapturingDisplayPublisher

    return isinstance(publisher, CapturingDisplayPublisher)
