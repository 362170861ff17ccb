"""Reservations in jobs of a real Slurm on one node with four GPUs, without cgroups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.engines import examples
from tests.support.slurm import Slurm, cluster, needs_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [needs_slurm]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """Start a cluster of one node."""
    with cluster(tmp_path) as slurm:
        yield slurm


RUN_PROGRAM = """
import subprocess, sys
given = dict(os.environ)
def run_program(*argv):
    done = subprocess.run([sys.executable, "-m", *argv], env=given, capture_output=True, text=True)
    return done.stdout + done.stderr
"""


def test_jobs(slurm: Slurm) -> None:
    """A job reserves only GPUs that Slurm gave it, and other processes on the node respect that.

    Two programs in a job get different GPUs, and a cancelled job frees its GPUs.
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
        assert first.run(RUN_PROGRAM).error is None
        assert first.reserve().value == "0"
        assert "CUDA_VISIBLE_DEVICES = '1'" in first.run(f"run_program(*{magic})").value
        assert first.run(f"run_program(*{run})").value == "1\n"
        assert second.reserve("count=2").value == "2,3"
        refused = second.run("reserve_gpu.reserve(count=3)")
        assert "There are 2 GPUs here" in refused.text
        assert outside.reserve().value == "1"
        refusal = first.run(f"run_program(*{run})").value
        assert "No free GPU" in refusal
        slurm.cancel()
        assert outside.reserve("count=4").value == "0,1,2,3"


def test_srun_line_of_the_page(slurm: Slurm) -> None:
    """The `srun` line of the page runs a command on one GPU of the job."""
    (line,) = examples("Slurm")
    (slurm.folder / "train.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert slurm.run(*line.split()) == "0\n"
