"""Jobs of a real Slurm, on one node with four GPUs of the stand-in driver; no cgroups."""

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
    with cluster(tmp_path) as made:
        yield made


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
        assert refusal.startswith("No free GPU: 2 reserved.")
        slurm.cancel()
        assert outside.reserve("count=4").value == "0,1,2,3"


def test_a_command(slurm: Slurm) -> None:
    """The page's `srun` runs a command on one of the job's GPUs."""
    (line,) = examples("Slurm")
    (slurm.folder / "train.py").write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert slurm.run(*line.split()) == "0\n"
