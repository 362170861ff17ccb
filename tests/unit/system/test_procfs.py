"""What the system says of processes: their commands, notebooks and directories, and who holds."""

from __future__ import annotations

import os
import subprocess
from subprocess import PIPE
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks import holders
from reserve_gpu.model.devices import Process
from reserve_gpu.model.holders import Holder, Record
from reserve_gpu.render import phrases
from reserve_gpu.system import process_identity, procfs
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


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
