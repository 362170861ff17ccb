"""A part of a GPU among real processes: what they use of it, kill -9, containers, exec."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from tests.support.locked import locked
from tests.support.parts import ONE, TOTAL, part, room
from tests.support.platforms import CONTAINER, behind, on_a_host, pid_outside
from tests.support.processes import US, is_running, own_name, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Answer, Child, Machine

from tests.support.parts_processes import CUDA

CONTEXT_MIB = 300


@pytest.fixture
def one(here: Here) -> Here:
    """Make a machine with one GPU on which processes use memory, and the test process is on it."""
    here.write(f"contexts {here.folder}\n{ONE}")
    return here


@contextmanager
def sharer(machine: Machine, mib: int, use_mib: int | None = None) -> Iterator[Child]:
    """Make a process with a part, which uses so much besides its context."""
    with machine.child() as child:
        assert terms(child, mib).value == "0"
        if use_mib is not None:
            assert child.run(f"{CUDA}\nuse({use_mib}) > 2").value is True
        yield child


def terms(child: Child, mib: float) -> Answer:
    """Have the process reserve a part."""
    return child.reserve(f"memory='{mib}MiB'")


def most(child: Child) -> Any:
    """Return what is left for the process, which is refused the whole of the GPU as a part."""
    child.run("try: reserve_gpu.reserve(memory='10000MiB')\nexcept Exception as e: refused = e")
    return child.run("[r.promisable_mib for r in refused.rows]").value


def records(folder: Path) -> dict[int, float]:
    """Return the size in each sharer's file that is locked, by the pid in it."""
    texts = [(folder / name).read_text() for name in locked(folder) if ".share-" in name]
    return {record["pid"]: record.get("part_mib") for record in map(json.loads, texts)}


# -- what is used ----------------------------------------------------------------------------------


@pytest.mark.promise
@on_a_host
@pytest.mark.parametrize("use_mib", [None, 1, 3700, 5000], ids=["none", "little", "all", "over"])
def test_the_greater_of_promise_and_use_counts(one: Here, use_mib: int | None) -> None:
    """A part counts in full however little of it is used; what is used beyond counts as well."""
    with sharer(one, 4000, use_mib):
        used = 0 if use_mib is None else CONTEXT_MIB + use_mib
        assert room(TOTAL) == TOTAL - max(4000, used)


@on_a_host
def test_what_a_sharers_children_use_is_its_own(one: Here) -> None:
    """What the processes that a sharer has started use counts as the sharer's."""
    with sharer(one, 4000) as child:
        code = f"{CUDA}\nuse(2000)\nprint('there', flush=True)\ninput()"
        child.run(
            f"import subprocess\nstarted = subprocess.Popen([sys.executable, '-c', {code!r}],"
            " stdin=-1, stdout=-1, text=True)\nline = started.stdout.readline()"
        )
        assert reserve_gpu.status().rows[0].usage.used_mib == CONTEXT_MIB + 2000  # type: ignore[union-attr]
        assert room(TOTAL) == TOTAL - 4000
        child.run("started.kill(); started.wait()")


@on_a_host
def test_what_others_use_is_left_out(one: Here) -> None:
    """What a process uses that has reserved nothing can't be promised, and can be once it ends."""
    with sharer(one, 4000, 1000), one.child() as stranger, one.child() as child:
        stranger.run(f"{CUDA}\nuse(2000)")
        assert most(child) == [TOTAL - 4000 - CONTEXT_MIB - 2000]
        stranger.kill()
        assert most(child) == [TOTAL - 4000]


@on_a_host
def test_what_own_children_use_is_no_obstacle(one: Here) -> None:
    """What the processes use that the one who asks has started is counted as its own."""
    with sharer(one, 4000), one.child() as started:
        started.run(f"{CUDA}\nuse(2000)")
        assert room(TOTAL) == TOTAL - 4000


# -- once CUDA has started -------------------------------------------------------------------------


@on_a_host
def test_growing_and_giving_back_under_cuda(one: Here) -> None:
    """Who has started CUDA grows in place where there is room, else keeps its part."""
    with sharer(one, 4000, 1000) as child, sharer(one, 3000, 500):
        assert terms(child, 7000).value == "0"
        assert child.run("os.environ['CUDA_DEVICE_MEMORY']").value == "7000"
        assert records(one.locks)[child.pid] == 7000
        refused = terms(child, 7001)
        assert refused.error == "NoFreeDeviceError"
        assert most(child) == [7000]
        assert "reserve_gpu.reserve('0', memory=" in child.run("str(refused)").value
        assert records(one.locks)[child.pid] == 7000
        assert terms(child, 5000).value == "0"
        assert part(2000) == "0"


@on_a_host
def test_cuda_without_a_reservation(one: Here) -> None:
    """Who has started CUDA can have a part of the GPU that it is on; its use counts once."""
    with sharer(one, 3000), one.child(CUDA_VISIBLE_DEVICES="0") as child:
        child.run(f"{CUDA}\nuse(4000)")
        assert most(child) == [7000]
        assert terms(child, 7000).value == "0"
        assert records(one.locks)[child.pid] == 7000


# -- kill -9 ---------------------------------------------------------------------------------------


@pytest.mark.promise
def test_kill_frees_a_promise_at_once(one: Here) -> None:
    """What a process was promised, and what it used, can be promised as soon as it is killed."""
    with sharer(one, 4000, 1000) as child, sharer(one, 5000) as other:
        assert terms(other, 6001).error == "NoFreeDeviceError"
        child.kill()
        assert terms(other, 10_000).value == "0"
        assert records(one.locks) == {other.pid: 10_000}
        other.kill()
        assert part(TOTAL) == "0"


FORK = """
reading, writing = os.pipe()
pid = os.fork()
if not pid:
    import signal
    os.write(writing, b'.')
    signal.pause()
os.read(reading, 1) and pid
"""


def test_a_fork_has_no_part_of_its_own(one: Here) -> None:
    """The promise of a process ends with it, whatever it has forked lives on."""
    with sharer(one, 9000) as child:
        pid = child.run(FORK).value
        child.process.kill()
        child.process.wait()
        try:
            assert part(TOTAL) == "0"
        finally:
            os.kill(pid, signal.SIGKILL)


# -- exec ------------------------------------------------------------------------------------------


@pytest.mark.promise
def test_a_command_has_the_part(machine: Machine) -> None:
    """What `reserve-gpu run --memory` becomes keeps the part, and others count it."""
    machine.write(ONE)
    show = (
        "import reserve_gpu, signal\n"
        "print(reserve_gpu.current().environ['CUDA_DEVICE_MEMORY'], flush=True); signal.pause()"
    )
    argv = [*US, "run", "--memory", "4000MiB", "--", sys.executable, "-c", show]
    with (
        machine.running(*argv, environ=machine.environ(), stdout=-1, stderr=-3) as command,
        machine.child() as child,
    ):
        assert command.stdout
        with command.stdout as told:
            assert told.readline() == b"4000\n"
        assert records(machine.locks) == {command.pid: 4000}
        assert terms(child, 6001).error == "NoFreeDeviceError"
        assert terms(child, 6000).value == "0"


ASKING = """
import multiprocessing, os, sys

def ask(tell):
    import reserve_gpu
    try:
        reserve_gpu.reserve()
    except reserve_gpu.ReservedAboveError:
        tell.send(dict(os.environ))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    import reserve_gpu
    environ = reserve_gpu.reserve(memory=sys.argv[2] or None).environ
    for name in os.listdir(os.environ["RESERVE_GPU_LOCK_DIR"]) if len(sys.argv) > 3 else ():
        path = os.path.join(os.environ["RESERVE_GPU_LOCK_DIR"], name)
        with open(path) as file:
            text = file.read()
        with open(path, "w") as file:  # as another user could
            file.write(text.replace('"visible"', '"part_mib": 1, "visible"'))
    told, tell = context.Pipe(duplex=False)
    second = context.Process(target=ask, args=(tell,))
    second.start()
    given = told.recv()
    second.join()
    values = {**environ, "RESERVE_GPU_CAPS": os.environ.get("RESERVE_GPU_CAPS")}
    print({name for name in values if values[name] != given.get(name)} or "the same")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_are_told_of_the_part(machine: Machine, method: str) -> None:
    """A child of whatever kind that asks has its parent's part and caps, marked as such."""
    machine.write(ONE)
    script = machine.folder / "asking.py"
    script.write_text(ASKING)
    done = machine.command(sys.executable, str(script), method, "4000MiB")
    assert done.stdout.strip() == "the same", done


def test_a_size_that_somebody_wrote_for_a_whole_gpu(machine: Machine) -> None:
    """A child of who has a whole GPU is not told of a part that is in its lock's file."""
    script = machine.folder / "asking.py"
    script.write_text(ASKING)
    done = machine.command(sys.executable, str(script), "forkserver", "", "hostile")
    assert done.stdout.strip() == "the same", done


@on_a_host
def test_growing_once_cuda_runs_where_one_process_may_use_the_gpu(machine: Machine) -> None:
    """On a GPU for one process at a time this one is itself no reason to refuse it more."""
    machine.write(f"contexts {machine.folder}\n{ONE}  mode exclusive_process\n")
    with machine.child() as child:
        assert terms(child, 4000).value == "0"
        child.run(f"{CUDA}\nuse(1000)")
        assert terms(child, 7000).value == "0"


@on_a_host
def test_who_has_a_part_is_no_stranger_to_itself(machine: Machine) -> None:
    """Who is refused more is not told that its own process has no reservation."""
    machine.write(f"contexts {machine.folder}\n{ONE}  compute 4321000 5000\n")
    with machine.child() as child:
        child.run("import warnings; warnings.simplefilter('ignore')")
        assert terms(child, 4000).value == "0"
        child.run(f"{CUDA}\nuse(1000)")
        text = terms(child, 7000).text
        assert re.findall("without a reservation: (.*)", text) == ["pid 4321000"]
        assert f"this process: {own_name()}, " in text


@on_a_host
def test_of_who_shares_by_parts_nobody_is_warned(machine: Machine) -> None:
    """A warning tells of strangers, not of sharers; in a container it can't tell them apart."""
    machine.write(ONE)
    with machine.child() as sharer, machine.child() as other, behind(machine, *CONTAINER) as inside:
        assert terms(sharer, 4000).value == "0"
        machine.write(f"{ONE}  compute {sharer.pid} 3000\n")
        for child in (other, inside):
            child.run("import warnings; warnings.filterwarnings('error', 'You have')")
            assert terms(child, 1000).value == "0"
            child.run("reserve_gpu.release()")
        machine.write(f"{ONE}  compute {sharer.pid} 3000\n  compute 4321000 1000\n")
        assert terms(other, 1000).error == "ReserveGPUWarning"


# -- containers ------------------------------------------------------------------------------------


def test_sizes_are_seen_from_containers(machine: Machine) -> None:
    """Who shares the lock directory counts the sizes of all, inside of containers and outside."""
    machine.write(ONE)
    with (
        behind(machine, *CONTAINER) as inside,
        behind(machine, *CONTAINER) as other,
        machine.child() as outside,
    ):
        assert terms(inside, 4000).value == "0"
        assert terms(outside, 3000).value == "0"
        assert most(other) == [3000]
        assert terms(other, 3000).value == "0"
        assert terms(outside, 3001).error == "NoFreeDeviceError"
        pid = pid_outside(inside)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_running(pid))
        assert terms(outside, 7000).value == "0"


def test_uses_are_not_seen_from_containers(machine: Machine) -> None:
    """In a container it can't be told whose memory is in use: it counts as what was promised."""
    machine.write(f"{ONE}  compute 4321000 5000\n")
    with machine.child() as outside, behind(machine, *CONTAINER) as inside:
        outside.run("import warnings; warnings.simplefilter('ignore')")
        assert terms(outside, 3000).value == "0"
        assert most(inside) == [5000]
        machine.write(f"{ONE}  compute 4321000 2000\n")
        assert most(inside) == [7000]


def test_the_driver_is_asked_after_a_cell(machine: Machine) -> None:
    """After a cell the driver is asked how much is used, where a part is held, and only there."""
    end_cell = "from reserve_gpu.ipython import magic; magic.end_cell()"
    with machine.child() as child:
        assert child.run(end_cell).value == []
        before = machine.calls()
        assert before == []
        assert child.run("reserve_gpu.reserve(memory='2GB')").error is None
        before = machine.calls()
        assert child.run(end_cell).value == []
        assert machine.calls() != before


# The interpreter calls the hook before each putenv(3).
FAIL_TO_SET = """
left = [MemoryError()]
def fail(event, _):
    if event == 'os.putenv' and left:
        raise left.pop()
sys.addaudithook(fail)
"""


def test_what_can_not_be_held_is_let_go(machine: Machine) -> None:
    """Where something fails after the locks were taken, nothing stays locked unknown to all."""
    with machine.child() as child, machine.child() as other:
        child.run(FAIL_TO_SET)
        assert child.run("reserve_gpu.reserve(0, memory='2GB')").error == "MemoryError"
        assert child.run("reserve_gpu.current()").value is None
        assert other.reserve("0").value == "0"
