"""The Slurm job of a kernel: its kernelspec, its start and end, and the reason for a wait."""

from __future__ import annotations

import math
import os
import subprocess
import time
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from reserve_gpu import request_options
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.parsing import parse_duration
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import durations
from reserve_gpu.system import spawn, subprocesses

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

PROVISIONER = "reserve-gpu-slurm"
HANDED = "RESERVE_GPU_SRUN"  # descriptors of srun's streams, and its pid, for who goes on with it
SQUEUE_S = 10.0  # for squeue to answer
END_S = 2.0  # for a job to end by itself
COLUMNS = 7  # of squeue's rows, with what follows the last sign


def kernel(spec: dict[str, Any], wishes: Namespace, given: Sequence[str]) -> dict[str, Any]:
    """Return a kernelspec that starts the kernel in a job. given: options for srun.

    Raises RequestError if Slurm is missing.
    """
    try:
        srun = spawn.program("srun")
    except FileNotFoundError as error:
        raise RequestError(
            "There is no Slurm here: no srun is found. Install it where you use srun."
        ) from error
    kind = f"{wishes.name}:" if wishes.name else ""
    line = [srun, "--ntasks=1", "--nodes=1", "--job-name=jupyter"]
    line.append(f"--gres=gpu:{kind}{wishes.count or len(wishes.devices) or 1}")
    if for_ := getattr(wishes, "for_", None):
        line.append(f"--time={math.ceil(parse_duration(for_) / 60)}")
    if wishes.note:
        line.append(f"--comment={wishes.note}")
    wishes.name = wishes.for_ = None
    if any(getattr(wishes, option.attribute) for option in request_options.WHEN):
        wishes.end_kernel = True  # and the job with it, which holds the GPU for Slurm
    start = spawn.python("-m", "reserve_gpu", "kernel", "slurm", "-f", "{connection_file}")
    metadata = {**spec["metadata"], "kernel_provisioner": {"provisioner_name": PROVISIONER}}
    metadata.pop("supported_encryption", None)
    argv = [*start, *request_options.words(wishes), "--", *line, *given]
    return {**spec, "argv": argv, "interrupt_mode": "message", "metadata": metadata}


def start(
    line: Sequence[str], environ: Mapping[str, str], folder: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a job, whose standard streams are srun's. Raises OSError."""
    if "SLURM_JOB_ID" in environ:  # of a job that this is in itself: else it would be a step of it
        own = {name for name in environ if name.startswith("SLURM_")} - {"SLURM_CONF"}
        environ = {name: value for name, value in environ.items() if name not in own}
    command = [*line, *spawn.python("-m", "reserve_gpu", "kernel", "node")]
    command[0] = spawn.program(command[0])
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        stdin=pipe, stdout=pipe, stderr=pipe, env=environ, cwd=folder, start_new_session=True,
    )  # fmt: skip


def streams(job: subprocess.Popen[bytes]) -> list[int]:
    """Return the descriptors of a job's stdin, stdout and stderr."""
    return [stream.fileno() for stream in (job.stdin, job.stdout, job.stderr) if stream]


def handed() -> tuple[list[int], int]:
    """Return the descriptors of a job's streams, and srun's pid, as the provisioner hands them."""
    *descriptors, pid = map(int, os.environ.pop(HANDED, "0").split())
    return descriptors, pid


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job: if it runs it ends with its streams."""
    for stream in (job.stdin, job.stdout, job.stderr):
        if stream:
            stream.close()
    for stop in (int, job.terminate):
        stop()
        with suppress(subprocess.TimeoutExpired):
            job.wait(END_S)
            return


def waits(srun: str, pid: int) -> str:
    """Return Slurm's reason for the wait of a job, and its expected start; empty if unknown.

    Its place is among the jobs that this user may see, in the same partition.
    pid: of srun, which begins a session of its own; Slurm keeps its number.
    """
    squeue = (
        *(f"{srun.removesuffix('srun')}squeue", "--noheader", "--states=PENDING", "--sort=-p"),
        "--Format=UserID:|,AllocSID:|,JobID:|,Partition:|,StartTime:|,Reason:|",
    )
    said = subprocesses.output(squeue, SQUEUE_S, SLURM_TIME_FORMAT="standard")
    rows = [row for line in said.splitlines() if len(row := line.split("|")) == COLUMNS]
    for row in rows:
        if row[:2] == [str(os.getuid()), str(pid)]:
            _, _, job, partition, expected, reason, _ = row
            queue = [each for each in rows if each[3] == partition]
            place = f" (place {queue.index(row) + 1} of {len(queue)})"
            text = f"Job {sanitize(job)} waits: {sanitize(reason)}{place}"
            with suppress(ValueError, OverflowError):  # it does not know
                at = datetime.fromisoformat(expected).timestamp()
                text += f"; Slurm expects {durations.moment(at, time.time())}"
            return text
    return ""
