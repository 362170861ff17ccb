"""Jobs of a real Slurm: their reservations, steps and arrays, and the end of their time."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import Child
from tests.support.processes import US, wait_for
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


def test_steps_of_a_job(slurm: Slurm) -> None:
    """Two steps with separate GPUs have all GPUs of the job, and no others."""
    job = slurm.start_job("--gres=gpu:4", "--cpus-per-task=4")
    options = (f"--jobid={job}", "--exact", "--ntasks=1", "--cpus-per-task=1", "--gres=gpu:2")
    with slurm.job(*options) as one, slurm.job(*options) as other:
        refused = one.run("reserve_gpu.reserve(count=3)")
        assert "There are 2 GPUs here" in refused.text
        got = [uuid for step_ in (one, other) for uuid in step_.run(RESERVED.format(2)).value]
        assert len({*got}) == 4


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


def test_srun_within_salloc(slurm: Slurm) -> None:
    """A step of salloc gets all GPUs of its allocation, and no others."""
    allocate = ("salloc", "--quiet", "--gres=gpu:3", "srun", "--unbuffered")
    child = Child(slurm.environ(), slurm.folder, *allocate)
    try:
        refused = child.run("reserve_gpu.reserve(count=4)")
        assert "There are 3 GPUs here" in refused.text
        assert len(set(child.run(RESERVED.format(3)).value)) == 3
    finally:
        child.kill()


TASK = f"""\
#!/bin/sh
exec {sys.executable} -c "
import os, time, reserve_gpu
(device,) = reserve_gpu.reserve().devices
name = 'task-' + os.environ['SLURM_ARRAY_TASK_ID']
with open(name + '.draft', 'w') as file:
    print(device.uuid, os.environ['SLURMD_NODENAME'], file=file)
os.rename(file.name, name + '.got')
time.sleep(1000)
"
"""


def test_array(slurm: Slurm) -> None:
    """Each task of an array gets a different GPU, and the status shows the task's number."""
    (slurm.folder / "task.sh").write_text(TASK)
    submit = ("sbatch", "--parsable", "--array=1-12", "--gres=gpu:1", "--output=/dev/null")
    array = slurm.run(*submit, "task.sh").strip()
    wait_for(lambda: len([*slurm.folder.glob("task-*.got")]) == 12, 0.1)
    got = [path.read_text() for path in slurm.folder.glob("task-*.got")]
    assert len({*got}) == 12
    shown = "".join(machine.command(*US, "status").stdout for machine in slurm.machines)
    named = re.findall(rf"job {array}_([0-9]+), part of task\.sh", shown)
    assert sorted(map(int, named)) == [*range(1, 13)]


def test_job_without_a_gpu(slurm: Slurm) -> None:
    """The error in a job without a GPU names the partition that has GPUs."""
    with slurm.job() as child:
        child.run("os.environ['CUDA_VISIBLE_DEVICES'] = ''")
        job = child.run("os.environ['SLURM_JOB_ID']").value
        text = child.reserve().text
        assert job in text
        assert "srun -p all --gres=gpu:1" in text
