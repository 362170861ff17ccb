"""Child processes of a process that holds a GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.machine import Machine


@pytest.mark.promise
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_see_the_gpu_and_hold_nothing(machine: Machine, method: str) -> None:
    """At the end of the `with` block, the GPU is free although the workers run."""
    script = machine.folder / "script.py"
    script.write_text(f"""if True:
        import multiprocessing, os, reserve_gpu, subprocess, sys
        def look(_):
            return os.environ["CUDA_VISIBLE_DEVICES"], reserve_gpu.current()
        if __name__ == "__main__":
            with reserve_gpu.reserve(1):
                pool = multiprocessing.get_context("{method}").Pool(2)
                print(set(pool.map(look, range(4))), os.environ["CUDA_VISIBLE_DEVICES"])
            rows = reserve_gpu.status().rows
            print([row.holders for row in rows], os.environ.get("CUDA_VISIBLE_DEVICES"))
            pool.terminate()
    """)
    done = machine.command(sys.executable, str(script))
    assert done.stdout.splitlines() == ["{('1', None)} 1", "[(), ()] None"], done.stderr


def test_a_request_in_a_child_names_the_parents_reservation(machine: Machine) -> None:
    """The child of a holder is refused, and keeps the holder's variables."""
    script = machine.folder / "script.py"
    script.write_text(
        "import multiprocessing, os, reserve_gpu\n"
        "def job():\n"
        "    try: reserve_gpu.reserve()\n"
        "    except reserve_gpu.ReservedAboveError as error:\n"
        "        print(error.rows[0].label, os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "if __name__ == '__main__':\n"
        "    reserve_gpu.reserve(0)\n"
        "    child = multiprocessing.get_context('spawn').Process(target=job)\n"
        "    child.start(); child.join()\n"
    )
    done = machine.command(sys.executable, str(script))
    assert done.stdout.splitlines() == ["GPU0 0"], done
