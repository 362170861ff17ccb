"""What helps in a job of a batch system, or in a pod, that has no GPU."""

from __future__ import annotations

import glob
import os

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.model import errors
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import subprocesses

NONE = ("", "-1", "NoDevFiles")  # as Slurm, Flux and old Slurms write CUDA_VISIBLE_DEVICES
# What Slurm sets where a job, or a step of it, has GPUs. https://slurm.schedmd.com/srun.html
HAS_GPUS = {"SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"}
GPUS_OF_POD = "/dev/nvidia[0-9]*"  # which the node puts there, whatever else in the image is wrong
LIMIT_S = 3.0  # for one of Slurm's programs to answer


def explained(error: errors.ReserveGPUError) -> errors.ReserveGPUError:
    """Return an error that says what to type, where the job has no GPU; else the same."""
    is_none = os.environ.get(cuda_environment.VISIBLE) in NONE
    is_hidden = isinstance(error, errors.NoVisibleDeviceError) and is_none
    is_absent = is_hidden or isinstance(error, (errors.NoDriverError, errors.NoDeviceError))
    if not is_absent or not HAS_GPUS.isdisjoint(os.environ):
        return error
    job = os.environ.get("SLURM_JOB_ID")
    if job and (wanted := _wanted()):
        text = f"Job {sanitize(job)} has no GPU. Start one that has: srun {wanted} ..."
    elif "FLUX_JOB_ID" in os.environ and is_none:
        text = "This job has no GPU. Start one that has: flux run --gpus-per-task=1 ..."
    elif job or "FLUX_JOB_ID" in os.environ or glob.glob(GPUS_OF_POD):
        return error
    else:
        text = (
            "This pod has no GPU. Ask for one in its spec: "
            "resources: {limits: {nvidia.com/gpu: 1}}. "
            "What is seen here is this pod's alone."
        )
    return errors.ImpossibleError(text)


def _wanted() -> str:
    """Return srun's options for a GPU, in the job's partition, else in the first with some.

    Empty where Slurm says that no partition has any.
    """
    own = os.environ.get("SLURM_JOB_PARTITION")
    said = subprocesses.output(("sinfo", "--noheader", "--format=%R %G"), LIMIT_S)
    rows = (line.split() for line in said.splitlines())
    with_gpus = [name for name, *kinds in rows if kinds and "gpu:" in kinds[0]]
    if said and not with_gpus:
        return ""
    partition = own if own in with_gpus or not said else with_gpus[0]
    return f"-p {sanitize(partition)} --gres=gpu:1" if partition else "--gres=gpu:1"
