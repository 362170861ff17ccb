"""Messages to processes in a batch job or a pod."""

from __future__ import annotations

import glob
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.features.job import no_gpu
from reserve_gpu.features.job.job_end import Job
from reserve_gpu.model.errors import NoDeviceError

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

PAST = int(time.mktime((2001, 11, 20, 18, 0, 0, 0, 0, -1)))
SLURM = {"SLURM_JOB_ID": "4711"}
ARRAY = {"SLURM_JOB_ID": "4714", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Set the variables of a batch job."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(SLURM, id="Slurm"),
        pytest.param({**SLURM, "SLURM_JOB_PARTITION": "cpu\x1b"}, id="Slurm, partition"),
        pytest.param({"FLUX_JOB_ID": "x"}, id="Flux"),
        pytest.param({"KUBERNETES_SERVICE_HOST": "x"}, id="pod"),
    ],
)
def test_no_gpu(
    snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    if glob.glob(no_gpu.GPUS_OF_POD):
        pytest.skip("this machine has a GPU, so a pod on it is not told that it has none")
    set_environment(monkeypatch, {"CUDA_VISIBLE_DEVICES": "", **variables})
    assert str(no_gpu.explained(NoDeviceError("No GPU."))) == snapshot


@pytest.mark.parametrize("variables", [SLURM, ARRAY], ids=["job", "array"])
def test_job_after_a_release_and_after_its_end(
    snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    set_environment(monkeypatch, {"SLURM_JOB_END_TIME": f"{PAST}", **variables})
    owner: Any = SimpleNamespace()
    job = Job(owner)
    assert "\n".join([*job.begins(), job.released()]) == snapshot
