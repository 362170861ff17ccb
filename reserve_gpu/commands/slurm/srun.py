"""Build the kernelspec for a kernel in a Slurm job, and start, end, and query that job."""

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
# environment variable that passes srun's stream descriptors and process ID to the relay
STREAMS = "RESERVE_GPU_SRUN"
SQUEUE_S = 10.0  # timeout for squeue, in seconds
END_S = 2.0  # seconds to wait for srun to exit
COLUMNS = 7  # number of fields in a line from squeue, including the empty last field


def kernel(spec: dict[str, Any], request: Namespace, srun_options: Sequence[str]) -> dict[str, Any]:
    """Return a kernelspec that starts the kernel in a Slurm job.

    Args:
        spec: The kernelspec of a kernel on this machine.
        request: The parsed request options. The options that srun handles are reset.
        srun_options: Additional options for srun.

    Raises:
        RequestError: srun is not installed.
    """
    try:
        srun = spawn.program("srun")
    except FileNotFoundError as error:
        raise RequestError(
            "srun was not found on PATH. Install the kernel on a machine where you use srun."
        ) from error
    gpu_type = f"{request.name}:" if request.name else ""
    line = [srun, "--ntasks=1", "--nodes=1", "--job-name=jupyter"]
    line.append(f"--gres=gpu:{gpu_type}{request.count or len(request.devices) or 1}")
    if for_ := getattr(request, "for_", None):
        line.append(f"--time={math.ceil(parse_duration(for_) / 60)}")
    if request.note:
        line.append(f"--comment={request.note}")
    request.name = request.for_ = None
    if any(getattr(request, option.attribute) for option in request_options.WHEN):
        # Slurm frees the GPU only when the job ends, and the job ends only when the kernel does.
        request.end_kernel = True
    start = spawn.python("-m", "reserve_gpu", "kernel", "slurm", "-f", "{connection_file}")
    metadata = {**spec["metadata"], "kernel_provisioner": {"provisioner_name": PROVISIONER}}
    metadata.pop("supported_encryption", None)
    argv = [*start, *request_options.words(request), "--", *line, *srun_options]
    return {**spec, "argv": argv, "interrupt_mode": "message", "metadata": metadata}


def start(
    line: Sequence[str], environ: Mapping[str, str], folder: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a job with srun, which connects the job's standard streams to its own.

    Args:
        line: The srun command without the program to run.
        environ: The environment for srun.
        folder: The working directory for srun.

    Raises:
        OSError: srun can't be started.
    """
    if "SLURM_JOB_ID" in environ:
        # This process is running in a job. With that job's variables, srun would start a step of
        # the job instead of a new job.
        job_variables = {name for name in environ if name.startswith("SLURM_")} - {"SLURM_CONF"}
        environ = {name: value for name, value in environ.items() if name not in job_variables}
    command = [*line, *spawn.python("-m", "reserve_gpu", "kernel", "node")]
    command[0] = spawn.program(command[0])
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        stdin=pipe, stdout=pipe, stderr=pipe, env=environ, cwd=folder, start_new_session=True,
    )  # fmt: skip


def streams(job: subprocess.Popen[bytes]) -> list[int]:
    """Return the file descriptors of a job's stdin, stdout and stderr."""
    return [stream.fileno() for stream in (job.stdin, job.stdout, job.stderr) if stream]


def inherited_streams() -> tuple[list[int], int]:
    """Return the job's stream descriptors and srun's process ID, if a provisioner passed them.

    Without a provisioner, the result is `([], 0)`.
    """
    *descriptors, pid = map(int, os.environ.pop(STREAMS, "0").split())
    return descriptors, pid


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job. Closing the streams ends a running job, but a waiting job needs SIGTERM."""
    for stream in (job.stdin, job.stdout, job.stderr):
        if stream:
            stream.close()
    for stop in (int, job.terminate):
        stop()
        with suppress(subprocess.TimeoutExpired):
            job.wait(END_S)
            return


def pending_reason(srun: str, pid: int) -> str:
    """Return a message about a waiting job, with the reason and the expected start time.

    Args:
        srun: The path of srun. squeue is expected in the same directory.
        pid: The process ID of srun, which is also its session ID. squeue lists the session ID.

    Returns:
        The message, or an empty string if the job is not pending. The message includes the job's
        position among the partition's pending jobs, as far as this user can see them.
    """
    squeue = (
        *(f"{srun.removesuffix('srun')}squeue", "--noheader", "--states=PENDING", "--sort=-p"),
        "--Format=UserID:|,AllocSID:|,JobID:|,Partition:|,StartTime:|,Reason:|",
    )
    output = subprocesses.read_output(squeue, SQUEUE_S, SLURM_TIME_FORMAT="standard")
    rows = [row for line in output.splitlines() if len(row := line.split("|")) == COLUMNS]
    for row in rows:
        if row[:2] == [str(os.getuid()), str(pid)]:
            _, _, job, partition, expected, reason, _ = row
            queue = [each for each in rows if each[3] == partition]
            position = f" (position {queue.index(row) + 1} of {len(queue)})"
            text = f"Job {sanitize(job)} is waiting: {sanitize(reason)}{position}"
            with suppress(ValueError, OverflowError):  # Slurm does not know the start time
                at = datetime.fromisoformat(expected).timestamp()
                text += f"; expected start: {durations.moment(at, time.time())}"
            return text
    return ""
