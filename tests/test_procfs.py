"""What the system says of processes: their commands, notebooks and directories, and who holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.locks import holders
from reserve_gpu.model.devices import Process
from reserve_gpu.model.holders import Holder, Record
from reserve_gpu.render import phrases
from reserve_gpu.system import process_identity, procfs
from tests.machine import Child
from tests.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.here import Here

SCRIPT = """
import json, sys
import reserve_gpu
reserve_gpu.reserve("0")
print(json.dumps(reserve_gpu.status().to_dict()["devices"][0]["holders"]))
"""
US = (sys.executable, "-m", "reserve_gpu")


@pytest.mark.parametrize(
    ("words", "short"),
    [
        (["/usr/bin/python3.11", "/home/alice/thesis/train.py", "--epochs", "3"],
         "python3.11 train.py --epochs 3"),
        (["python", "-u", "-X", "dev", "train.py"], "python -u -X dev train.py"),
        (["python", "-u", "/srv/train.py"], "python -u train.py"),
        (["python3", "-m", "torch.distributed.run", "/srv/train.py"],
         "python3 -m torch.distributed.run /srv/train.py"),
        (["python3", "-c", "import x\nx.y(1 / 2)"], "python3 -c import x x.y(1 / 2)"),
        (["/venv/bin/python", "/venv/bin/ipython", "--pylab"], "ipython --pylab"),
        (["/opt/app/run", "/data/set"], "run set"),
        (["python"], "python"),
        (["ray::train /data/set"], "ray::train /data/set"),
        (["/bin/python", "-m", "ipykernel_launcher", "-f", "/tmp/kernel.json"], "kernel"),
        (["", ""], None),
        ([], None),
    ],
)  # fmt: skip
def test_a_command_in_short(words: Sequence[str], short: str | None) -> None:
    """A command is called by the names of its program and its script, and by its arguments."""
    assert process_identity.command(words) == short


@pytest.mark.parametrize("argument", ["x" * 5000, "\x1b]0;title\x07", "a\n\u2028b", "\udfff"])
def test_a_command_is_fit_to_print(argument: str) -> None:
    """Whatever its arguments are, a command is one short line that can be printed."""
    command = process_identity.command(["python", "train.py", argument])
    assert command
    assert command.startswith("python train.py")
    assert command.isprintable()
    assert len(command) <= 200


@pytest.mark.process
def test_a_script(here: Here) -> None:
    """A script's holder has no notebook; its command and its directory stand apart."""
    (here.folder / "train.py").write_text(SCRIPT)
    done = here.command(sys.executable, str(here.folder / "train.py"), "--epochs", "3")
    (holder,) = json.loads(done.stdout)
    assert holder["notebook"] is None
    assert holder["command"] == f"{os.path.basename(sys.executable)} train.py --epochs 3"
    assert holder["cwd"] == str(here.folder)


@pytest.mark.process
def test_the_directory_is_gone(here: Here) -> None:
    """Who works in a directory that was deleted reserves as ever, and has none."""
    code = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    done = here.python(code + SCRIPT)
    (holder,) = json.loads(done.stdout)
    assert holder["cwd"] is None
    assert holder["command"].startswith(f"{os.path.basename(sys.executable)} -c import os;")


@pytest.mark.process
def test_a_kernel_has_no_notebook_of_the_process_that_started_it(here: Here) -> None:
    """A notebook's name counts only if the process that started the kernel does not have it."""
    ask = "from reserve_gpu.system import process_identity; print(process_identity.notebook())"
    name = {"JPY_SESSION_NAME": "/home/alice/train.ipynb"}
    with here.child(**name) as starter:
        for pid, notebook in ((starter.pid, "None"), (os.getpid(), "train.ipynb")):
            done = here.python(ask, **name, JPY_PARENT_PID=str(pid))
            assert done.stdout == f"{notebook}\n"


@pytest.mark.process
def test_what_run_has_started(here: Here) -> None:
    """Behind `reserve-gpu run` it is the command that is named, not ours nor the notebook's."""
    environ = here.environ(JPY_SESSION_NAME="/home/alice/train.ipynb")
    child = Child(environ, here.folder, *US, "run", "--")
    try:
        (holder,) = reserve_gpu.status().rows[0].holders
    finally:
        child.kill()
    assert holder.notebook is None
    assert holder.record.who.command == f"{os.path.basename(sys.executable)} child.py"
    assert f", {holder.record.who.command} (pid {child.pid})" in phrases.holder(holder)


@pytest.mark.process
def test_who_uses_a_gpu(here: Here) -> None:
    """A process that uses a GPU without having reserved it is called by its command in short."""
    with here.child() as child:
        here.write(f"gpu\n compute {child.pid} 300")
        (process,) = reserve_gpu.status().rows[0].processes
    assert process.command == f"{os.path.basename(sys.executable)} child.py"


def test_a_notebook(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook is named by its file, and so it is shown; its command is known beside it."""
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/alice/train.ipynb")
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", "/bin/jupyter", "run"])
    reserve_gpu.reserve("0")
    (holder,) = reserve_gpu.status().rows[0].holders
    assert (holder.notebook, holder.record.who.command) == ("train.ipynb", "jupyter run")
    assert holder.record.who.cwd == str(here.folder)
    assert ", train.ipynb (pid" in phrases.holder(holder)
    assert phrases.person(holder).endswith(" (train.ipynb)")


def test_a_record_of_an_older_version(here: Here) -> None:
    """A record that has the directory for a notebook, and nothing else, is read as it is."""
    with here.rival(notebook="~/thesis"):
        (holder,) = reserve_gpu.status().rows[0].holders
    assert (holder.notebook, holder.record.who.command, holder.record.who.cwd) == (
        "~/thesis",
        None,
        None,
    )
    assert ", ~/thesis (pid" in phrases.holder(holder)


@pytest.mark.parametrize(("changed", "last_cell"), [(100.5, None), (160.0, 160.0)])
def test_the_last_cell_is_told_from_the_writing(changed: float, last_cell: float | None) -> None:
    """A file that changed when its record was written tells of no cell; one that did later does."""
    record = Record(written=100.0)
    assert holders.named(record, 17, changed).last_cell == last_cell


def test_nothing_is_known() -> None:
    """Who is named by no record at all is somebody."""
    assert phrases.holder(Holder()) == "reserved by unknown user"


def test_the_processes_below_this_one_are_named(tmp_path: Path) -> None:
    """Children and theirs are told as long as they live; whatever a program is called."""
    program = tmp_path / "a)S(b"  # as in /proc/PID/stat
    program.symlink_to("/bin/sh")
    code = "sleep 60 & echo; read line; kill $!"
    with subprocess.Popen([program, "-c", code], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        # The shell's child is called like the shell until it has become another program.
        wait_for(lambda: any(name.startswith("sleep 60") for name in procfs.children()))
        named = procfs.children()
        assert f"a)S(b -c {code} (pid {child.pid})" in named
        (below,) = (int(name.split()[-1].rstrip(")")) for name in named if name[:8] == "sleep 60")
        assert procfs.lineage(below)[:3] == [below, child.pid, os.getpid()]
        assert procfs.with_identity(Process(child.pid)).command == f"a)S(b -c {code}"
        child.communicate(b"\n")
    assert procfs.lineage(child.pid) == [child.pid]
    assert procfs.start_time(child.pid) is None
    assert procfs.with_identity(Process(child.pid)) == Process(child.pid, has_ended=True)


def test_a_child_that_has_ended_is_not_named() -> None:
    """A zombie is no process that still runs: the others are told without it."""
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert not [name for name in procfs.children() if f"(pid {ended.pid})" in name]
