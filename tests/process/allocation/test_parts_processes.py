"""Parts of a GPU that several processes hold: their use, kill -9, exec and containers."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from tests.support.locked import locked
from tests.support.parts import CUDA, ONE, TOTAL, part, room
from tests.support.platforms import CONTAINER, behind, on_a_host, pid_outside
from tests.support.processes import US, is_running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Answer, Child, Machine


CONTEXT_MIB = 300


@pytest.fixture
def one(here: Here) -> Here:
    """Return a machine with one GPU whose memory processes can allocate."""
    here.write(f"contexts {here.folder}\n{ONE}")
    return here


@contextmanager
def part_holder(machine: Machine, mib: int, use_mib: int | None = None) -> Iterator[Child]:
    """Run a process with a part, which allocates this much memory in addition to its context."""
    with machine.child() as child:
        assert reserve_part(child, mib).value == "0"
        if use_mib is not None:
            assert child.run(f"{CUDA}\nuse({use_mib}) > 2").value is True
        yield child


def reserve_part(child: Child, mib: float) -> Answer:
    """Let the process reserve a part."""
    return child.reserve(f"memory='{mib}MiB'")


def available(child: Child) -> Any:
    """Return the memory that is available for the process, which is refused a full-size part."""
    child.run("try: reserve_gpu.reserve(memory='10000MiB')\nexcept Exception as e: refused = e")
    return child.run("[r.promisable_mib for r in refused.rows]").value


def records(folder: Path) -> dict[int, float]:
    """Return the size in each locked file of a part, by the PID in the file."""
    texts = [(folder / name).read_text() for name in locked(folder) if ".share-" in name]
    return {record["pid"]: record.get("part_mib") for record in map(json.loads, texts)}


# -- what is used ----------------------------------------------------------------------------------


@pytest.mark.promise
@on_a_host
@pytest.mark.parametrize("use_mib", [None, 1, 3700, 5000], ids=["none", "little", "all", "over"])
def test_the_greater_of_size_and_use_counts(one: Here, use_mib: int | None) -> None:
    """An unused part counts in full, and so does use above the size of the part."""
    with part_holder(one, 4000, use_mib):
        used = 0 if use_mib is None else CONTEXT_MIB + use_mib
        assert room(TOTAL) == TOTAL - max(4000, used)


@on_a_host
def test_the_use_of_a_holders_children_counts_towards_its_part(one: Here) -> None:
    with part_holder(one, 4000) as child:
        code = f"{CUDA}\nuse(2000)\nprint('there', flush=True)\ninput()"
        child.run(
            f"import subprocess\nstarted = subprocess.Popen([sys.executable, '-c', {code!r}],"
            " stdin=-1, stdout=-1, text=True)\nline = started.stdout.readline()"
        )
        assert reserve_gpu.status().rows[0].usage.used_mib == CONTEXT_MIB + 2000  # type: ignore[union-attr]
        assert room(TOTAL) == TOTAL - 4000
        child.run("started.kill(); started.wait()")


# -- once CUDA has started -------------------------------------------------------------------------


@on_a_host
def test_a_part_can_grow_and_shrink_after_cuda_has_started(one: Here) -> None:
    """If there is too little memory, the part stays."""
    with part_holder(one, 4000, 1000) as child, part_holder(one, 3000, 500):
        assert reserve_part(child, 7000).value == "0"
        assert child.run("os.environ['CUDA_DEVICE_MEMORY']").value == "7000"
        assert records(one.locks)[child.pid] == 7000
        refused = reserve_part(child, 7001)
        assert refused.error == "NoFreeDeviceError"
        assert available(child) == [7000]
        assert "reserve_gpu.reserve('0', memory=" in child.run("str(refused)").value
        assert records(one.locks)[child.pid] == 7000
        assert reserve_part(child, 5000).value == "0"
        assert part(2000) == "0"


# -- kill -9 ---------------------------------------------------------------------------------------


@pytest.mark.promise
def test_a_killed_holders_part_is_available_at_once(one: Here) -> None:
    """Its memory can be reserved as soon as the process is killed."""
    with part_holder(one, 4000, 1000) as child, part_holder(one, 5000) as other:
        assert reserve_part(other, 6001).error == "NoFreeDeviceError"
        child.kill()
        assert reserve_part(other, 10_000).value == "0"
        assert records(one.locks) == {other.pid: 10_000}
        other.kill()
        assert part(TOTAL) == "0"


# -- exec ------------------------------------------------------------------------------------------


@pytest.mark.promise
def test_a_command_keeps_the_part(machine: Machine) -> None:
    """The program that `reserve-gpu run --memory` executes holds the part."""
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
        assert reserve_part(child, 6001).error == "NoFreeDeviceError"
        assert reserve_part(child, 6000).value == "0"


CHILD_REQUESTS = """
import multiprocessing, os

def ask(tell):
    import reserve_gpu
    try:
        reserve_gpu.reserve()
    except reserve_gpu.ReservedAboveError:
        tell.send(dict(os.environ))

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    import reserve_gpu
    environ = reserve_gpu.reserve(memory="4000MiB").environ
    told, tell = context.Pipe(duplex=False)
    second = context.Process(target=ask, args=(tell,))
    second.start()
    given = told.recv()
    second.join()
    values = {**environ, "RESERVE_GPU_CAPS": os.environ.get("RESERVE_GPU_CAPS")}
    print({name for name in values if values[name] != given.get(name)} or "the same")
"""


def test_a_child_process_gets_its_parents_variables(machine: Machine) -> None:
    """A child that requests a GPU gets the parent's part and memory caps."""
    machine.write(ONE)
    script = machine.folder / "asking.py"
    script.write_text(CHILD_REQUESTS)
    done = machine.command(sys.executable, str(script))
    assert done.stdout.strip() == "the same", done


# -- containers ------------------------------------------------------------------------------------


def test_parts_count_across_containers(machine: Machine) -> None:
    """All processes that share the lock directory count each other's parts."""
    machine.write(ONE)
    with (
        behind(machine, *CONTAINER) as inside,
        behind(machine, *CONTAINER) as other,
        machine.child() as outside,
    ):
        assert reserve_part(inside, 4000).value == "0"
        assert reserve_part(outside, 3000).value == "0"
        assert available(other) == [3000]
        assert reserve_part(other, 3000).value == "0"
        assert reserve_part(outside, 3001).error == "NoFreeDeviceError"
        pid = pid_outside(inside)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_running(pid))
        assert reserve_part(outside, 7000).value == "0"


def test_use_counts_towards_parts_in_a_container(machine: Machine) -> None:
    """A container can't tell processes apart, so all use counts towards the parts."""
    machine.write(f"{ONE}  compute 4321000 5000\n")
    with machine.child() as outside, behind(machine, *CONTAINER) as inside:
        outside.run("import warnings; warnings.simplefilter('ignore')")
        assert reserve_part(outside, 3000).value == "0"
        assert available(inside) == [5000]
        machine.write(f"{ONE}  compute 4321000 2000\n")
        assert available(inside) == [7000]
