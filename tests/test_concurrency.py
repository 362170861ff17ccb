"""One process, many at work in it: threads, tasks and worker processes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.test_cli import free, wait_for

if TYPE_CHECKING:
    from tests.machine import Machine


def test_two_threads_with_the_same_gpu(machine: Machine) -> None:
    """Two threads that are each in a `with` have one reservation; it ends with the last of them."""
    code = """
import threading
first_out, second_out, entered = threading.Event(), threading.Event(), threading.Barrier(3)
def work(out):
    with reserve_gpu.reserve():
        entered.wait()
        out.wait()
threads = [threading.Thread(target=work, args=(out,)) for out in (first_out, second_out)]
[thread.start() for thread in threads]
entered.wait()
first_out.set()
threads[0].join()
"""
    with machine.child() as child:
        child.run(code)
        assert free(machine) == [1]
        child.run("second_out.set(); threads[1].join()")
        assert free(machine) == [0, 1]
        assert child.visible() is None


def test_two_tasks_with_the_same_gpu(machine: Machine) -> None:
    """Two asyncio tasks that are each in a `with` have one reservation, until the last one ends."""
    code = """
import asyncio
async def work(ready, out):
    with reserve_gpu.reserve() as held:
        ready.set()
        await out.wait()
        return held
async def main():
    events = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(work(*events[n:n + 2])) for n in (0, 2)]
    [await events[n].wait() for n in (0, 2)]
    events[1].set()
    first = await tasks[0]
    between = reserve_gpu.current() is first
    events[3].set()
    return between, await tasks[1] is first, reserve_gpu.current()
asyncio.run(main())
"""
    with machine.child() as child:
        assert child.run(code).value == [True, True, None]
        assert child.visible() is None


WAITING_TASK = """
import asyncio
async def beat(beats):
    while True:
        beats.append(1)
        await asyncio.sleep(0.01)
async def main():
    beats = []
    heart = asyncio.create_task(beat(beats))
    asking = asyncio.create_task(asyncio.to_thread(reserve_gpu.reserve, wait=60, progress=told))
    while not shown or len(beats) < 10:
        await asyncio.sleep(0.01)
    open("waits", "w").close()
    with await asking as held:
        inside = os.environ["CUDA_VISIBLE_DEVICES"], repr(held)
    heart.cancel()
    return inside, reserve_gpu.current()
shown = []
told = shown.append
asyncio.run(main())
"""


def test_a_task_that_waits_in_a_thread(machine: Machine) -> None:
    """`with await asyncio.to_thread(reserve, wait=...)` lets the loop go on while it waits."""
    with machine.child() as holder, machine.child(CUDA_VISIBLE_DEVICES="1") as child:
        holder.reserve("1")
        child.send(WAITING_TASK)
        wait_for((machine.folder / "waits").exists)
        holder.kill()
        assert child.answer().value == [["1", "<Reservation of GPU1>"], None]
        assert child.visible() == "1"
        assert free(machine) == [0, 1]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_see_the_gpu_and_hold_nothing(machine: Machine, method: str) -> None:
    """Worker processes have the variables; at the end of the `with` the GPU is free nonetheless."""
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
