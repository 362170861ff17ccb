"""Only the kernel for which a Slurm job was started ends with its reservation."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.system import procfs, settings
from tests.support.locked import held
from tests.support.machine import LIMIT_S
from tests.support.processes import US, is_running, wait_for
from tests.support.slurm_kernels import TcpKernel

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.machine import Machine

pytest.importorskip("ipykernel.kernelspec")


def test_kernel_of_a_job_ends_with_its_reservation(machine: Machine) -> None:
    with closing(TcpKernel(machine, None, "--for", "10s", TEST_JOB="4711")) as kernel:
        assert kernel.process.wait(LIMIT_S) == 1


@pytest.mark.parametrize("inherited", ["own pid", "of its parent", "by its parent"])
def test_inherited_variable_ends_no_process(here: Here, inherited: str) -> None:
    """A process that only inherits the variable releases its GPU at the end, and continues."""
    parent = procfs.stamp(os.getpid())
    values = {"of its parent": parent, "by its parent": f"{settings.STARTED_BY}{parent}"}
    with here.child(SLURM_JOB_ID="4711") as child:
        own = f"{child.pid} 1"  # the pid, with the start time of an earlier process
        value = own if inherited == "own pid" else values.get(inherited, inherited)
        child.run(f"os.environ[{settings.JOB_KERNEL!r}] = {value!r}")
        child.run("reserve_gpu.reserve(for_=1)")
        wait_for(lambda: not held(here), 0.05)
        child.run("reserve_gpu.current()")
        child.run("import threading")
        names = child.run("[thread.name for thread in threading.enumerate()]").value
        assert "reserve_gpu end" not in names
        assert is_running(child.pid)


@pytest.mark.parametrize("prefix", [settings.STARTED_BY, ""])
def test_nested_kernel_is_not_the_kernel_of_the_job(machine: Machine, prefix: str) -> None:
    """A kernel takes the mark of the job from the job, and not from another kernel."""
    mark = f"{prefix}{procfs.stamp(os.getpid())}"
    code = f"import os; print(os.getpid(), os.environ[{settings.JOB_KERNEL!r}])"
    line = (*US, "kernel", "start", "--", sys.executable, "-c", code)
    pid, marked = machine.command(*line, **{settings.JOB_KERNEL: mark}).stdout.split(" ", 1)
    assert (marked.partition(" ")[0] == pid) == bool(prefix)
    assert (marked.strip() == mark) == (not prefix)
