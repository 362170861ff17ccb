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
