"""A real Slurm: its daemons, nodes with the stand-in driver, and kernels in jobs."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines import GPUS, host
from tests.support.hosts import free_port
from tests.support.machine import LIMIT_S, Child, Kernel, kernel_manager, program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from jupyter_client.manager import KernelManager

    from tests.support.machine import Machine

PROGRAMS = {name: program(name) for name in ("munged", "slurmctld", "slurmd", "srun")}
needs_slurm = pytest.mark.skipif(
    os.getuid() != 0 or not all(PROGRAMS.values()), reason="needs root, Slurm and munge"
)
HOST_NAME = socket.gethostname().partition(".")[0]
CONFIGURATION = """\
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
# Variables of the node, not of the user who starts a job: the driver and the lock directory.
OF_NODE = ("RESERVE_GPU_LOCK_DIR", "STAND_IN_SCENARIO", "STAND_IN_LOG")
PROLOG = '#!/bin/sh\nexec cat "{folder}/of-$SLURMD_NODENAME"\n'


class Slurm:
    """A cluster. `machines` are its nodes n0, n1 and so on; commands run on the first one."""

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
        """Run a command on the first node, and return its output."""
        done = subprocess.run(
            argv, env=self.environ(), cwd=self.folder, capture_output=True, text=True,
            check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return done.stdout

    def until(self, expected: str, *argv: str) -> None:
        """Wait until the output of a command equals the text."""
        deadline = time.monotonic() + LIMIT_S
        while (answer := self.run(*argv).strip()) != expected:
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)

    def jobs(self, *options: str) -> list[str]:
        """Return the ids of the waiting, running and ending jobs."""
        return self.run("squeue", "--noheader", "--format=%i", *options).split()

    def until_free(self) -> None:
        """Wait until all jobs have ended."""
        self.until("", "squeue", "--noheader")

    def cancel(self) -> None:
        """Cancel all jobs, and wait for their end."""
        self.run("scancel", "--signal=KILL", "--user=root")  # the running jobs
        self.run("scancel", "--user=root")  # the waiting jobs
        self.until_free()

    def start_job(self, *options: str) -> str:
        """Start a batch job that sleeps, wait until it runs, and return its id."""
        sbatch = ("sbatch", "--parsable", "--output=/dev/null", "--wrap=exec sleep 1000")
        job = self.run(*sbatch, *options).strip()
        self.until("RUNNING", "squeue", "--noheader", f"--jobs={job}", "--format=%T")
        return job

    @contextmanager
    def job(self, *options: str, **extra: str) -> Iterator[Child]:
        """Start a job of one Python process, which runs code."""
        child = Child(self.environ(**extra), self.folder, "srun", "--unbuffered", *options)
        try:
            yield child
        finally:
            child.kill()

    def start(self, name: str, *argv: str) -> None:
        """Start a daemon; its log has the same name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                argv, env=self.environ(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def close(self) -> None:
        """End the daemons, the last one first."""
        for process in reversed(self.daemons.values()):
            process.terminate()
            process.wait(LIMIT_S)


@contextmanager
def cluster(folder: Path, nodes: int = 1, gpus: int = GPUS) -> Iterator[Slurm]:
    """Start a cluster with this number of nodes, and of GPUs of each node."""
    machines = [host(folder / f"n{number}", number, gpus) for number in range(nodes)]
    slurm = Slurm(machines, folder)
    about = {"folder": folder, "here": HOST_NAME, "gpus": gpus, "last": gpus - 1}
    conf = [CONFIGURATION.format(port=free_port("127.0.0.1"), **about)]
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
        (folder / f"gpu{number}").symlink_to("/dev/null")  # a device file, as Slurm requires
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
            slurm.start(f"slurmd-n{number}", str(PROGRAMS["slurmd"]), "-D", "-N", f"n{number}")
        slurm.until("\n".join(["idle"] * nodes), "sinfo", "--noheader", "--Node", "--format=%T")
        stack.callback(slurm.cancel)
        yield slurm


def until_listens(path: Path) -> None:
    """Wait until a daemon listens on the socket."""
    deadline = time.monotonic() + LIMIT_S
    with closing(socket.socket(socket.AF_UNIX)) as client:
        while client.connect_ex(str(path)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


# -- kernels in jobs ---------------------------------------------------------------------------

KERNEL_NAME = "python3-gpu-slurm"
PRINT_JOB = "import os; print(os.environ['SLURM_JOB_ID'], os.environ['CUDA_VISIBLE_DEVICES'])"


def kernelspec(slurm: Slurm) -> dict[str, Any]:
    """Return the content of the installed kernelspec."""
    path = slurm.folder / "share/jupyter/kernels" / KERNEL_NAME / "kernel.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def kernel_manager_of(slurm: Slurm, found: dict[str, Any]) -> KernelManager:
    """Return a manager of a kernel with this kernelspec."""
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

    class Specs(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:  # noqa: ARG002
            return KernelSpec(resource_dir="", **found)

    return kernel_manager(slurm.folder, kernel_name=KERNEL_NAME, kernel_spec_manager=Specs())


class JobKernel(Kernel):
    """A kernel that Jupyter starts with our provisioner, as in JupyterLab.

    Args:
        slurm: The cluster.
        given: Further options of srun.
    """

    def __init__(self, slurm: Slurm, *given: str) -> None:
        found = kernelspec(slurm)
        found["argv"] += given
        self.manager = kernel_manager_of(slurm, found)
        self._begin(slurm.environ(), slurm.folder)

    @property
    def relay(self) -> int:
        """Return the pid of the process that Jupyter considers the kernel."""
        return int(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def close(self) -> None:
        """Shut the kernel down, and wait for the end of srun, which ends the job."""
        job = self.manager.provisioner and self.manager.provisioner.job  # type: ignore[attr-defined]
        super().close()
        if job:
            job.wait(LIMIT_S)

    def wait_for_message(self, message: str, kind: str = "stream", pattern: str = "") -> str:
        """Wait until a cell gets such a message whose text has the pattern; return the text."""
        while True:
            part = self.client.get_iopub_msg(timeout=LIMIT_S)
            text = str(part["content"].get("text", part["content"].get("evalue", "")))
            is_own = part["parent_header"].get("msg_id") == message
            if is_own and part["msg_type"] == kind and re.search(pattern, text):
                return text

    def error(self, message: str) -> str:
        """Return the error of a cell, which its reply repeats."""
        text = self.wait_for_message(message, "error")
        reply = self.reply(message)
        assert (reply["status"], reply["evalue"]) == ("error", text)
        return text

    def visible(self) -> tuple[str, str]:
        """Return the id of the kernel's job, and its visible GPU."""
        cell = self.run(PRINT_JOB)
        assert not cell.error, cell.all
        job, visible = cell.stdout.split()
        return job, visible
