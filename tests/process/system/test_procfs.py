"""Tests of what is read about processes: children, commands, notebooks and directories."""

from __future__ import annotations

import os
import subprocess
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model.devices import Process
from reserve_gpu.system import procfs
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here


@pytest.mark.promise
def test_child_processes(tmp_path: Path) -> None:
    """Children and their children are listed while they run, whatever their program's name is."""
    program = tmp_path / "a)S(b"  # like the fields of /proc/PID/stat
    program.symlink_to("/bin/sh")
    code = "sleep 60 & echo; read line; kill $!"
    with subprocess.Popen([program, "-c", code], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        # After the fork, the shell's child has the shell's name for a moment.
        wait_for(lambda: any(name.startswith("sleep 60") for name in procfs.children()))
        names = procfs.children()
        assert f"a)S(b -c {code} (pid {child.pid})" in names
        (grandchild,) = (int(x.split()[-1].rstrip(")")) for x in names if x[:8] == "sleep 60")
        assert procfs.lineage(grandchild)[:3] == [grandchild, child.pid, os.getpid()]
        assert procfs.with_identity(Process(child.pid)).command == f"a)S(b -c {code}"
        child.communicate(b"\n")
    assert procfs.lineage(child.pid) == [child.pid]
    assert procfs.start_time(child.pid) is None
    assert procfs.with_identity(Process(child.pid)) == Process(child.pid, has_ended=True)


def test_zombies_are_not_listed() -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not [name for name in procfs.children() if f"(pid {ended.pid})" in name]


def test_a_notebooks_name_is_not_inherited(here: Here) -> None:
    """A notebook's name counts only if the process that started the kernel does not have it."""
    code = "from reserve_gpu.system import process_identity; print(process_identity.notebook())"
    name = {"JPY_SESSION_NAME": "/home/alice/train.ipynb"}
    with here.child(**name) as starter:
        for pid, notebook in ((starter.pid, "None"), (os.getpid(), "train.ipynb")):
            done = here.python(code, **name, JPY_PARENT_PID=str(pid))
            assert done.stdout == f"{notebook}\n"
