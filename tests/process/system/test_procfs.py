"""Tests of what is read about processes: children, commands, notebooks and directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.model.devices import Process
from reserve_gpu.system import procfs
from tests.support.machine import Child
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here

PYTHON = os.path.basename(sys.executable)
SCRIPT = """
import json, sys
import reserve_gpu
reserve_gpu.reserve("0")
print(json.dumps(reserve_gpu.status().to_dict()["devices"][0]["holders"]))
"""


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


def test_a_script(here: Here) -> None:
    """A script's holder has a command and a directory, but no notebook."""
    (here.folder / "train.py").write_text(SCRIPT)
    done = here.command(sys.executable, str(here.folder / "train.py"), "--epochs", "3")
    (holder,) = json.loads(done.stdout)
    assert holder["notebook"] is None
    assert holder["command"] == f"{PYTHON} train.py --epochs 3"
    assert holder["cwd"] == str(here.folder)


def test_a_deleted_directory(here: Here) -> None:
    """A process in a deleted directory can reserve, and its holder has no directory."""
    code = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    done = here.python(code + SCRIPT)
    (holder,) = json.loads(done.stdout)
    assert holder["cwd"] is None
    assert holder["command"].startswith(f"{PYTHON} -c import os;")


def test_a_notebooks_name_is_not_inherited(here: Here) -> None:
    """A notebook's name counts only if the process that started the kernel does not have it."""
    code = "from reserve_gpu.system import process_identity; print(process_identity.notebook())"
    name = {"JPY_SESSION_NAME": "/home/alice/train.ipynb"}
    with here.child(**name) as starter:
        for pid, notebook in ((starter.pid, "None"), (os.getpid(), "train.ipynb")):
            done = here.python(code, **name, JPY_PARENT_PID=str(pid))
            assert done.stdout == f"{notebook}\n"


def test_the_command_of_run(here: Here) -> None:
    """The holder of `reserve-gpu run` has the name of the command, and no notebook."""
    environ = here.environ(JPY_SESSION_NAME="/home/alice/train.ipynb")
    child = Child(environ, here.folder, sys.executable, "-m", "reserve_gpu", "run", "--")
    try:
        (holder,) = reserve_gpu.status().rows[0].holders
    finally:
        child.kill()
    assert holder.notebook is None
    assert (holder.pid, holder.record.who.command) == (child.pid, f"{PYTHON} child.py")


def test_a_process_without_a_reservation(here: Here) -> None:
    """A process that uses a GPU without a reservation has the short form of its command."""
    with here.child() as child:
        here.write(f"gpu\n compute {child.pid} 300")
        (process,) = reserve_gpu.status().rows[0].processes
    assert process.command == f"{PYTHON} child.py"
