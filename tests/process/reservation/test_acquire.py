"""The Python interface: reserve, release, `with`, asking again, limits from outside."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.machine import Machine


def test_the_parent_is_named_as_such(machine: Machine) -> None:
    """A child made by spawn whose parent holds the GPU is told so, and keeps the variables."""
    script = machine.folder / "script.py"
    script.write_text(
        "import multiprocessing, reserve_gpu\n"
        "def job():\n"
        "    try: reserve_gpu.reserve()\n"
        "    except reserve_gpu.NoFreeDeviceError as error: print(error)\n"
        "if __name__ == '__main__':\n"
        "    reserve_gpu.reserve(0)\n"
        "    child = multiprocessing.get_context('spawn').Process(target=job)\n"
        "    child.start(); child.join()\n"
    )
    done = machine.command(sys.executable, str(script))
    assert "The process that started this one has already reserved GPU0 for both" in done.stdout, (
        done
    )
    assert "CUDA_VISIBLE_DEVICES = '0'" in done.stdout
