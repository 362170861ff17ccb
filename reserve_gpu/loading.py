"""How this package is loaded: at the start of every shell, and while a person waits."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def definitions() -> Iterator[None]:
    """Keep the garbage collector from looking again and again through what is being loaded.

    Thousands of definitions that are there to stay: that is a third of the time. They go to its
    oldest generation, as frozen objects do once thawed; not if somebody else has frozen some
    (https://docs.python.org/3/library/gc.html#gc.unfreeze), nor where all had been loaded before:
    garbage would be moved there as well, each time, and never be seen again.
    """
    if not gc.isenabled():
        yield
        return
    before = len(sys.modules)
    try:
        gc.disable()
        yield
    finally:
        gc.enable()  # first: an interrupt may end this at any call
        if len(sys.modules) > before and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
