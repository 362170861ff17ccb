"""Jobs of a real Slurm, on one node with four GPUs of the stand-in driver; no cgroups."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.engines import GPUS, examples, host
from tests.hosts import free_port
from tests.machine import LIMIT_S, Child, program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.machine import Machine

PROGRAMS = {name: program(name) for name in ("munged", "slurmctld", "slurmd", "srun")}
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        os.getuid() != 0 or not all(PROGRAMS.values()), reason="needs root, Slurm and munge"
    ),
]

NODE = socket.gethostname().partition(".")[0]
SLURM = """\
ClusterName=tests
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName={node} NodeAddr=127.0.0.1 CPUs=4 Gres=gpu:{gpus}
PartitionName=all Nodes=ALL Default=YES
"""
GPU = "NodeName={node} Name=gpu File={folder}/gpu[0-{last}] Flags=nvidia_gpu_env\n"


class Slurm:
    """A cluster of one node."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.folder = folder

    def environ(self) -> dict[str, str]:
        environ = self.machine.environ(SLURM_CONF=f"{self.folder}/slurm.conf")
        programs = os.path.dirname(sys.executable)
        return environ | {"PATH": f"{programs}{os.pathsep}{environ['PATH']}"}

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            argv, env=self.environ(), cwd=self.folder, capture_output=True, text=True,
            check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.stdout

    def until(self, expected: str, *argv: str) -> None:
        """Wait until a command says that, and nothing else."""
        deadline = time.monotonic() + LIMIT_S
        while (answer := self.run(*argv).strip()) != expected:
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)

    @contextmanager
    def job(self, *options: str) -> Iterator[Child]:
        """Make a job of one Python process, which does what it is told."""
        child = Child(self.environ(), self.folder, "srun", "--unbuffered", *options)
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def daemon(slurm: Slurm, name: str, *options: str) -> Iterator[None]:
    with (slurm.folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [str(PROGRAMS[name]), *options], env=slurm.environ(), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """Make a cluster whose node has four GPUs."""
    made = Slurm(host(tmp_path / "node"), tmp_path)
    values = {"node": NODE, "folder": tmp_path, "gpus": GPUS, "last": GPUS - 1}
    ports = {name: free_port("127.0.0.1") for name in ("controller", "daemon")}
    (tmp_path / "slurm.conf").write_text(SLURM.format(**values, **ports))
    (tmp_path / "gres.conf").write_text(GPU.format(**values))
    for number in range(GPUS):
        (tmp_path / f"gpu{number}").symlink_to("/dev/null")  # it has to be a device
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    key = tmp_path / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    names = {"socket": "munge", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
    files = [f"--{option}={tmp_path / name}" for option, name in names.items()]
    with ExitStack() as stack:
        stack.enter_context(daemon(made, "munged", "--foreground", "--force", *files))
        until_listens(tmp_path / "munge")
        for name in ("slurmctld", "slurmd"):
            stack.enter_context(daemon(made, name, "-D"))
        made.until("idle", "sinfo", "--noheader", "--format=%T")
        stack.callback(made.until, "", "squeue", "--noheader")
        stack.callback(made.run, "scancel", "--signal=KILL", "--user=root")
        yield made


def until_listens(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    with closing(socket.socket(socket.AF_UNIX)) as client:
        while client.connect_ex(str(path)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


INSIDE = """
import subprocess, sys
given = dict(os.environ)
def say(*argv):
    done = subprocess.run([sys.executable, "-m", *argv], env=given, capture_output=True, text=True)
    return done.stdout + done.stderr
"""


def test_jobs(slurm: Slurm) -> None:
    """Each job reserves among the GPUs that Slurm gave it; everybody on the node sees that.

    Two programs in one job get different GPUs, by the magic as by `reserve-gpu run`. A job that is
    cancelled frees its GPUs.
    """
    magic = ("IPython", "--ext=reserve_gpu", "-c", "%reserve_gpu")
    run = ("reserve_gpu", "run", "-q", "--", "printenv", "CUDA_VISIBLE_DEVICES")
    with (
        slurm.job("--gres=gpu:2") as one,
        slurm.job("--gres=gpu:2") as other,
        slurm.machine.child() as outside,
    ):
        jobs = sorted((one, other), key=lambda job: str(job.visible()))
        assert [job.visible() for job in jobs] == ["0,1", "2,3"]
        first, second = jobs
        assert first.run(INSIDE).error is None
        assert first.reserve().value == "0"
        assert "CUDA_VISIBLE_DEVICES = '1'" in first.run(f"say(*{magic})").value
        assert first.run(f"say(*{run})").value == "1\n"
        assert second.reserve("count=2").value == "2,3"
        refused = second.run("reserve_gpu.reserve(count=3)")
        assert refused.text.startswith("There are 2 GPUs here; you asked for 3.")
        assert outside.reserve().value == "1"
        refusal = first.run(f"say(*{run})").value
        assert refusal.startswith("No free GPU devices: 2 of 2 reserved.")
        slurm.run("scancel", "--signal=KILL", "--user=root")
        slurm.until("", "squeue", "--noheader")
        assert outside.reserve("count=4").value == "0,1,2,3"


def test_a_command(slurm: Slurm) -> None:
    """The page's `srun` runs a command on one of the job's GPUs."""
    (line,) = examples("Slurm")
    (slurm.folder / "train.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert slurm.run(*line.split()) == "0\n"
