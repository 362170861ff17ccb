"""What helps in a job of a batch system, or in a pod, that has no GPU."""

from __future__ import annotations

import os

from reserve_gpu import programs
from reserve_gpu.core import environment
from reserve_gpu.errors import (
    DriverError,
    ImpossibleError,
    NoFreeDeviceError,
    ReserveGPUError,
    shown,
)

NONE = ("", "-1", "NoDevFiles")  # as Slurm, Flux and old Slurms write CUDA_VISIBLE_DEVICES
# What Slurm sets where a job, or a step of it, has GPUs. https://slurm.schedmd.com/srun.html
HAS_GPUS = {"SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"}
LIMIT_S = 3.0  # for sinfo to answer


def explained(error: ReserveGPUError) -> ReserveGPUError:
    """Return an error that says what to type, where the job has no GPU; else the same."""
    is_none = os.environ.get(environment.VISIBLE) in NONE
    is_refused = isinstance(error, NoFreeDeviceError) and not error.rows and is_none
    if not (is_refused or isinstance(error, DriverError)) or not HAS_GPUS.isdisjoint(os.environ):
        return error
    if job := os.environ.get("SLURM_JOB_ID"):
        text = f"Job {shown(job)} has no GPU. Start one that has: srun {_wanted()} ..."
    elif "FLUX_JOB_ID" in os.environ:
        if not is_none:
            return error
        text = "This job has no GPU. Start one that has: flux run --gpus-per-task=1 ..."
    else:
        text = (
            "This pod has no GPU. Ask for one in its spec: "
            "resources: {limits: {nvidia.com/gpu: 1}}. "
            "What is seen here is this pod's alone."
        )
    return ImpossibleError(text)


def _wanted() -> str:
    """Return the options of srun for a GPU: in the job's partition, else in the first with some."""
    own = os.environ.get("SLURM_JOB_PARTITION")
    said = programs.output(("sinfo", "--noheader", "--format=%R %G"), LIMIT_S)
    rows = (line.split() for line in said.splitlines())
    with_gpus = [name for name, *kinds in rows if kinds and "gpu:" in kinds[0]]
    partition = own if own in with_gpus or not with_gpus else with_gpus[0]
    return f"-p {shown(partition)} --gres=gpu:1" if partition else "--gres=gpu:1"
