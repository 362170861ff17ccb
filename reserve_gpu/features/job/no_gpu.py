"""Error messages for processes in a batch job or a pod that has no GPU."""

from __future__ import annotations

import glob
import os

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.model import errors
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.system import subprocesses

# In a job without a GPU, Slurm sets CUDA_VISIBLE_DEVICES to the first of these values, Flux to the
# second, and older versions of Slurm to the third.
NONE = ("", "-1", "NoDevFiles")
# Slurm sets these variables if a job or a job step has GPUs (https://slurm.schedmd.com/srun.html).
HAS_GPUS = {"SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"}
# A pod with GPUs has these device files, even if its image has no working driver library.
GPUS_OF_POD = "/dev/nvidia[0-9]*"
LIMIT_S = 3.0  # timeout for Slurm commands in seconds


def explained(error: errors.ReserveGPUError) -> errors.ReserveGPUError:
    """Explain how to request a GPU if the batch job or pod has none.

    Args:
        error: The error raised when a GPU was requested.

    Returns:
        An error with the explanation, or the given error if the explanation does not apply.
    """
    is_none = os.environ.get(cuda_environment.VISIBLE) in NONE
    is_hidden = isinstance(error, errors.NoVisibleDeviceError) and is_none
    is_absent = is_hidden or isinstance(error, (errors.NoDriverError, errors.NoDeviceError))
    if not is_absent or not HAS_GPUS.isdisjoint(os.environ):
        return error
    job = os.environ.get("SLURM_JOB_ID")
    if job and (options := _srun_options()):
        text = f"Job {sanitize(job)} has no GPU. Start a job that has one: srun {options} ..."
    elif "FLUX_JOB_ID" in os.environ and is_none:
        text = "This job has no GPU. Start a job that has one: flux run --gpus-per-task=1 ..."
    elif job or "FLUX_JOB_ID" in os.environ or glob.glob(GPUS_OF_POD):
        return error
    else:
        text = (
            "This pod has no GPU. Request one in its spec: "
            "resources: {limits: {nvidia.com/gpu: 1}}. "
            "A pod sees only its own GPUs."
        )
    return errors.ImpossibleError(text)


def _srun_options() -> str:
    """Return srun options that request a GPU, or `""` if sinfo lists no partition with GPUs.

    The job's own partition is preferred. If it has no GPUs, the first partition with GPUs is used.
    """
    job_partition = os.environ.get("SLURM_JOB_PARTITION")
    output = subprocesses.read_output(("sinfo", "--noheader", "--format=%R %G"), LIMIT_S)
    rows = (line.split() for line in output.splitlines())
    with_gpus = [name for name, *kinds in rows if kinds and "gpu:" in kinds[0]]
    if output and not with_gpus:
        return ""
    partition = job_partition if job_partition in with_gpus or not output else with_gpus[0]
    return f"-p {sanitize(partition)} --gres=gpu:1" if partition else "--gres=gpu:1"
