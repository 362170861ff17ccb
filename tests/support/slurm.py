"""A real Slurm on this machine: its daemons, and nodes of the stand-in driver; no cgroups."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.engines import GPUS, host
from tests.support.hosts import free_port
from tests.support.machine import LIMIT_S, Child, program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.machine import Machine

PROGRAMS = {name: program(name) for name in ("munged", "slurmctld", "slurmd", "srun")}
needs_slurm = pytest.mark.skipif(
    os.getuid() != 0 or not all(PROGRAMS.values()), reason="needs root, Slurm and munge"
)
HERE = socket.gethostname().partition(".")[0]
SLURM = """\
ClusterName=tests
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/prolog
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PartitionName=all Nodes=ALL Default=YES
"""
# Several slurmd on one machine: https://slurm.schedmd.com/faq.html#multi_slurmd
NODE = (
    "NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={port} CPUs=16 Gres=gpu:{gpus}\n"
)
GPU = "NodeName={name} Name=gpu File={folder}/gpu[0-{last}] Flags=nvidia_gpu_env\n"
# What is of the node, and not of who starts a job: its driver, and its lock directory.
OF_NODE = ("RESERVE_GPU_LOCK_DIR", "STAND_IN_SCENARIO", "STAND_IN_LOG")
PROLOG = '#!/bin/sh\nexec cat "{folder}/of-$SLURMD_NODENAME"\n'


class Slurm:
    """A cluster. machines: its nodes, which are called n0, n1 and so on; the first asks, too."""

    def __init__(self, machines: Sequence[Machine], folder: Path) -> None:
        self.machines = machines
        self.machine = machines[0]
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}  # by name, as slurmd-n0

    def environ(self, **extra: str) -> dict[str, str]:
        environ = self.machine.environ(SLURM_CONF=f"{self.folder}/slurm.conf", **extra)
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

    def jobs(self, *options: str) -> list[str]:
        """Return the numbers of the jobs that wait, run or come to their end."""
        return self.run("squeue", "--noheader", "--format=%i", *options).split()

    def until_free(self) -> None:
        """Wait until there is no job any more."""
        self.until("", "squeue", "--noheader")

    def cancel(self) -> None:
        """Cancel all jobs at once."""
        self.run("scancel", "--signal=KILL", "--user=root")  # those that run
        self.run("scancel", "--user=root")  # those that wait
        self.until_free()

    @contextmanager
    def job(self, *options: str, **extra: str) -> Iterator[Child]:
        """Make a job of one Python process, which does what it is told."""
        child = Child(self.environ(**extra), self.folder, "srun", "--unbuffered", *options)
        try:
            yield child
        finally:
            child.kill()

    def start(self, name: str, *argv: str) -> None:
        """Start a daemon. name: of its log, too."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                argv, env=self.environ(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start_node(self, number: int) -> None:
        """Start the slurmd of a node."""
        self.start(f"slurmd-n{number}", str(PROGRAMS["slurmd"]), "-D", "-N", f"n{number}")

    def close(self) -> None:
        """End the daemons, the last one first."""
        for process in reversed(self.daemons.values()):
            process.terminate()
            process.wait(LIMIT_S)


@contextmanager
def cluster(folder: Path, nodes: int = 1, gpus: int = GPUS) -> Iterator[Slurm]:
    """Make a cluster of so many nodes, each with so many GPUs."""
    machines = [host(folder / f"n{number}", number, gpus) for number in range(nodes)]
    slurm = Slurm(machines, folder)
    about = {"folder": folder, "here": HERE, "gpus": gpus, "last": gpus - 1}
    conf = [SLURM.format(port=free_port("127.0.0.1"), **about)]
    devices = []
    for number, machine in enumerate(machines):
        name = f"n{number}"
        conf.insert(0, NODE.format(name=name, port=free_port("127.0.0.1"), **about))
        devices.append(GPU.format(name=name, **about))
        (folder / f"spool-{name}").mkdir()
        environ = machine.environ()
        own = "".join(f"export {each}={environ[each]}\n" for each in OF_NODE)
        (folder / f"of-{name}").write_text(own)
    (folder / "slurm.conf").write_text("".join(conf))
    (folder / "gres.conf").write_text("".join(devices))
    for number in range(gpus):
        (folder / f"gpu{number}").symlink_to("/dev/null")  # it has to be a device
    (folder / "state").mkdir()
    (folder / "prolog").write_text(PROLOG.format(folder=folder))
    (folder / "prolog").chmod(0o755)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    names = {"socket": "munge", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
    files = [f"--{option}={folder / name}" for option, name in names.items()]
    with ExitStack() as stack:
        stack.callback(slurm.close)
        slurm.start("munged", str(PROGRAMS["munged"]), "--foreground", "--force", *files)
        until_listens(folder / "munge")
        slurm.start("slurmctld", str(PROGRAMS["slurmctld"]), "-D")
        for number in range(nodes):
            slurm.start_node(number)
        slurm.until("\n".join(["idle"] * nodes), "sinfo", "--noheader", "--Node", "--format=%T")
        stack.callback(slurm.cancel)
        yield slurm


def until_listens(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    with closing(socket.socket(socket.AF_UNIX)) as client:
        while client.connect_ex(str(path)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
