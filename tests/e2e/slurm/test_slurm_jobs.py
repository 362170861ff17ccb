"""Jobs of a real Slurm: overlapping steps, and the end of their time."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import wait_for
from tests.support.slurm import cluster, needs_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.slurm import Slurm

pytestmark = [needs_slurm, pytest.mark.xdist_group("slurm: jobs")]

END = "SLURM_JOB_END_TIME"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a cluster of two nodes, each with six GPUs."""
    with cluster(tmp_path_factory.mktemp("slurm"), 2, 6) as made:
        yield made


@pytest.fixture
def slurm(nodes: Slurm) -> Iterator[Slurm]:
    """Return the cluster, without a job."""
    yield nodes
    nodes.cancel()


# Newer versions of Slurm set this variable.
WITH_END = f"""
{END}=$(date -d "$(squeue --noheader --jobs=$SLURM_JOB_ID --format=%e)" +%s) && export {END}
"""
SAVES = f"""
import os, time, reserve_gpu

@reserve_gpu.before_end
def save():
    name = os.environ["SLURM_JOB_ID"]
    with open(f"{{name}}.draft", "w") as file:
        print(time.time(), os.environ.get("{END}"), file=file)
    os.rename(file.name, f"{{name}}.saved")

reserve_gpu.reserve()
while True: pass
"""


def test_jobs_save_before_their_end(slurm: Slurm) -> None:
    """Each of twelve busy jobs saves before its end, without being killed.

    Half of them know their end from the environment, the others from squeue.
    """
    (slurm.folder / "saves.py").write_text(SAVES)
    srun = ["srun", "--time=1", "--gres=gpu:1", "sh", "-c"]
    with ExitStack() as stack:
        for number in range(12):
            line = f"{WITH_END if number % 2 else ''}exec {sys.executable} saves.py"
            process = subprocess.Popen(
                [*srun, line], env=slurm.environ(), cwd=slurm.folder, stdin=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        wait_for(lambda: len([*slurm.folder.glob("*.saved")]) == 12, 0.2)
        rows = slurm.run("squeue", "--noheader", "--format=%i %T %e").splitlines()
        slurm.cancel()
    assert len(rows) == 12
    informed = 0
    for row in rows:
        job, state, end = row.split()
        at, told = (slurm.folder / f"{job}.saved").read_text().split()
        ends = time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S"))
        assert state == "RUNNING"
        assert float(at) < ends
        assert told in {"None", f"{ends:.0f}"}
        informed += told != "None"
    assert informed == 6


RESERVED = "[device.uuid for device in reserve_gpu.reserve(count={}).devices]"


def test_steps_that_overlap(slurm: Slurm) -> None:
    """Overlapping steps share the job's GPUs, and a killed step frees its GPUs."""
    options = (f"--jobid={slurm.start_job('--gres=gpu:4')}", "--overlap", "--ntasks=1")
    with ExitStack() as stack:
        steps = [stack.enter_context(slurm.job(*options)) for _ in range(4)]
        for each, count in zip(steps, (2, 1, 1), strict=False):
            each.send(RESERVED.format(count))
        got = [uuid for each in steps[:3] for uuid in each.answer().value]
        assert len({*got}) == 4
        assert steps[3].reserve().error == "NoFreeDeviceError"
        steps[0].kill()
        freed = steps[3].run(RESERVED.format("2, wait='1m'"))  # when Slurm has ended the step
        assert freed.error is None, freed
        assert set(freed.value) == {*got[:2]}
