"""`reserve-gpu run` in child processes, and other holders of both GPUs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tests.support.machine import Child
from tests.support.processes import US

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.support.here import Here


def run_command(here: Here, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `reserve-gpu run WORDS` in a child process, and return the result."""
    return here.command(*US, "run", *words, **extra)


@contextmanager
def start_python(here: Here, *options: str, **extra: str) -> Iterator[Child]:
    """Start Python with `reserve-gpu run OPTIONS --`, and kill it at the end."""
    child = Child(here.environ(**extra), here.folder, *US, "run", *options, "--")
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def both_reserved(here: Here) -> Iterator[ExitStack]:
    """Reserve GPU1, then GPU0, for other holders, until the stack is closed."""
    with ExitStack() as rivals:
        for number in "10":
            rivals.enter_context(here.rival(number))
        yield rivals
