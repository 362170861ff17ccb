"""Helpers of tests: restart."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil

from reserve_gpu.system import lock_keeper

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Child, Machine

LEAVE = (
    "from reserve_gpu.reservation import restart_handover\n"
    "from reserve_gpu.reservation.session import session\n"
    "session().run({call})"
)


@contextmanager
def file_of(machine: Machine) -> Iterator[Path]:
    """Make a connection file; whatever waits for its kernel is gone at the end."""
    path = machine.folder / "kernel.json"
    path.write_text("{}")
    yield path
    for process in heirs(path):
        process.kill()


def take_over(child: Child, file: Path) -> Any:
    """Ask for what was left; the CUDA_VISIBLE_DEVICES that come of it, and what is said."""
    code = f"from reserve_gpu import api\nsaid = api.take_over({str(file)!r})"
    assert child.run(code).error is None
    return child.visible(), child.run("said").value


def heirs(file: Path) -> list[psutil.Process]:
    """Return the processes that keep something for the kernel with that connection file."""
    words = [lock_keeper.PROGRAM, str(file)]
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        found += [process] if [word for word in line if word in words] == words else []
    return found
