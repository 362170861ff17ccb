"""Reservations in a batch job or a pod, with stand-ins for Slurm's programs.

tests/e2e runs the real Slurm.
"""

from __future__ import annotations

import json
import os
import sys
import time
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.job.job_end import Job
from reserve_gpu.model.errors import ReserveGPUError
from reserve_gpu.reservation.session import session
from tests.support.here import feature
from tests.support.locked import held
from tests.support.processes import US, is_running, wait_for
from tests.support.run_command import run_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Machine

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train"}
END = "SLURM_JOB_END_TIME"
FAR_S = 30 * 3600  # not today, and less than six days, so texts show the weekday
PROGRAM = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"{folder}/calls"
. "$0.does"
"""


class Batch:
    """Stand-ins for Slurm's programs, which run given scripts and log their calls.

    Attributes:
        folder: The folder of the programs.
        environ: The variables of a process in a job. Its PATH contains the programs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.environ = {**JOB, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        for name in ("squeue", "sinfo", "scancel"):
            self.set_script(name, "exit 1")
            (folder / name).write_text(PROGRAM.format(folder=folder))
            (folder / name).chmod(0o755)

    def set_script(self, name: str, script: str) -> None:
        """Let a program run this shell script from now on."""
        draft = self.folder / "draft"
        draft.write_text(f"{script}\n")
        draft.replace(self.folder / f"{name}.does")

    def set_end(self, at: float) -> float:
        """Let squeue report that end, in whole seconds, if it is asked for the standard format."""
        text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
        self.set_script("squeue", f'[ "$SLURM_TIME_FORMAT" = standard ] && echo {text}')
        return float(int(at))

    def calls(self, name: str) -> list[str]:
        """Return the arguments of each call of a program."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


@pytest.fixture
def batch(here: Here) -> Iterator[Batch]:
    """Put this process into a job whose end squeue does not report yet."""
    made = Batch(here.folder / "batch")
    os.environ.update(made.environ)
    yield made
    reserve_gpu.release()
    # A process is in one job only, so the feature doesn't expect another one in the next test.
    session().features = {n: f for n, f in session().features.items() if n != "Job"}


def set_end_variable(seconds: float) -> float:
    """Let the job of this process end so many seconds from now, and return that time."""
    os.environ[END] = str(int(time.time() + seconds))
    return float(os.environ[END])


def until() -> float | None:
    """Return the end of the current reservation."""
    reservation = reserve_gpu.current()
    assert reservation
    return reservation.lease.until


def step() -> None:
    """Let all features take their next step."""
    session().run(session()._step)


# -- the end of a job ------------------------------------------------------------------------------


def test_end_in_the_environment_limits_a_reservation(batch: Batch) -> None:
    end = set_end_variable(FAR_S)
    lease = reserve_gpu.reserve().lease
    assert (lease.until, lease.is_jobs) == (end, True)
    step()
    assert until() == end  # squeue, which fails here, is not needed


def test_end_from_squeue_limits_a_reservation(batch: Batch) -> None:
    end = batch.set_end(time.time() + FAR_S)
    os.environ["SLURM_TIME_FORMAT"] = "relative"
    assert reserve_gpu.reserve().lease.until == end
    assert batch.calls("squeue")[0] == "--noheader --jobs 4711 --format=%e"


def test_end_from_squeue_replaces_the_end_in_the_environment(batch: Batch) -> None:
    end = batch.set_end(set_end_variable(FAR_S) + 3600)
    reserve_gpu.reserve()
    wait_for(lambda: until() == end)


@pytest.mark.parametrize(("left_s", "pause_s"), [(7200, 6540), (600, 200), (30, 15)])
def test_squeue_is_called_more_often_near_the_end(
    batch: Batch, left_s: float, pause_s: float
) -> None:
    batch.set_end(set_end_variable(left_s))
    reserve_gpu.reserve()
    step()
    assert len(batch.calls("squeue")) == 1
    assert feature(Job)._look_in_s() == pytest.approx(pause_s, abs=10)


@pytest.mark.promise
def test_end_in_the_past_is_ignored(here: Here, batch: Batch) -> None:
    """A job's end in the past limits nothing, calls no functions, and leads to one warning."""
    set_end_variable(-FAR_S)
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as caught:
        lease = reserve_gpu.reserve(for_="1h").lease
    assert not lease.is_jobs
    assert lease.until == pytest.approx(time.time() + 3600, abs=30)
    (warning,) = caught
    assert "unset SLURM_JOB_ID SLURM_JOB_END_TIME" in str(warning.message)
    saved = list[str]()
    reserve_gpu.before_end(lambda: saved.append("saved"))
    step()
    assert feature(Job)._save_in_s() == inf
    assert not saved


@pytest.mark.parametrize("job_s", [-60, 1])
def test_rule_applies_after_the_end_of_the_job(here: Here, batch: Batch, job_s: float) -> None:
    here.rules.write_text('[limits]\ntime = "3s"\n')
    set_end_variable(job_s)
    with here.child(**batch.environ, **{END: os.environ[END]}) as child:
        child.run("import warnings; warnings.simplefilter('ignore'); reserve_gpu.reserve()")
        assert held(here) == [0]
        wait_for(lambda: not held(here), 0.05)
        assert child.visible() == ""


def test_own_end_is_kept_over_exec(here: Here, batch: Batch) -> None:
    environ = {**batch.environ, END: f"{(end := set_end_variable(3600)):.0f}"}
    code = "import reserve_gpu as r; lease = r.current().lease; print(lease.until, lease.own.until)"
    line = (*US, "run", "--for", "10h", "--", sys.executable, "-c", code)
    done = here.command(*line, **environ)
    assert done.returncode == 0, done
    first, own = map(float, done.stdout.split())
    assert first == end
    assert own == pytest.approx(time.time() + 36_000, abs=60)
    assert "The job and the command end" in done.stderr


@pytest.mark.parametrize("script", ["echo rubbish", "echo 0001-01-01T00:00:00", "exec sleep 1000"])
def test_failing_squeue_does_not_prevent_a_reservation(batch: Batch, script: str) -> None:
    batch.set_script("squeue", script)
    assert reserve_gpu.reserve().lease.until is None
    assert batch.calls("squeue")


def test_missing_squeue_does_not_prevent_a_reservation(batch: Batch) -> None:
    os.environ["PATH"] = str(batch.folder / "none")
    assert reserve_gpu.reserve().lease.until is None
    reserve_gpu.release()
    (batch.folder / "squeue").chmod(0)
    (batch.folder / "squeue").write_bytes(b"\0")
    os.environ["PATH"] = str(batch.folder)
    assert reserve_gpu.reserve().lease.until is None


@pytest.mark.parametrize("value", ["soon", "\u0661", "9" * 400], ids=range(3))
def test_invalid_end_in_the_environment_is_ignored(batch: Batch, value: str) -> None:
    os.environ[END] = value
    end = batch.set_end(time.time() + FAR_S)
    reserve_gpu.reserve()
    wait_for(lambda: until() == end)


def test_slurm_is_not_used_outside_a_job(here: Here, batch: Batch) -> None:
    del os.environ["SLURM_JOB_ID"]
    assert reserve_gpu.reserve().lease.until is None
    shell = here.shell()
    assert "Slurm" not in shell.run("%reserve_gpu --release").all
    assert "Slurm" not in shell.run("%reserve_gpu\n%reserve_gpu --release").all
    assert not (batch.folder / "calls").exists()


# -- messages and data -----------------------------------------------------------------------------


@pytest.mark.promise
def test_job_and_its_end_are_shown(here: Here, batch: Batch) -> None:
    """The magic, status and list show the job, its name, and that the reservation ends with it."""
    end = set_end_variable(FAR_S)
    moment = time.strftime("%a %H:%M", time.localtime(end))
    assert f"{moment}, the job's end" in here.shell().run("%reserve_gpu").all
    for command in ("status", "list"):
        shown = here.command(*US, command).stdout
        assert f"(pid {os.getpid()}, job 4711, part of train)" in shown
        assert f"{moment}, the job's end" in shown
    status = json.loads(here.command(*US, "status", "--json").stdout)
    (listed,) = json.loads(here.command(*US, "list", "--json").stdout)["reservations"]
    for holder in (status["devices"][0]["holders"][0], listed):
        assert (holder["job"], holder["job_name"], holder["until"]) == ("4711", "train", end)


def test_release_names_the_job_to_cancel(here: Here, batch: Batch) -> None:
    """A release shows how to end the job. A task of an array is named by the array's job."""
    os.environ.update(SLURM_ARRAY_JOB_ID="4711", SLURM_ARRAY_TASK_ID="3", SLURM_JOB_ID="4714")
    shell = here.shell()
    shell.run("%reserve_gpu")
    assert shell.run("%reserve_gpu --release").stdout.endswith("\n!scancel 4711_3\n")
    assert not held(here)
    assert "Slurm" not in shell.run("%reserve_gpu --release").stdout  # no device was held
    assert not batch.calls("scancel")


FOREIGN = "\x1b]0;owned\x07\x1b[31m\r\n\u202e" + "x" * 10_000


def test_name_of_a_job_is_sanitized(machine: Machine) -> None:
    with machine.child(SLURM_JOB_ID="4711" + FOREIGN, SLURM_JOB_NAME=FOREIGN) as child:
        child.reserve()
        for command in ("status", "list"):
            shown = machine.command(*US, command).stdout
            assert "part of \ufffd]0;owned\ufffd\ufffd[31m\ufffd\ufffd\ufffdxx" in shown
            assert all(each.isprintable() for each in shown.replace("\n", ""))
            assert max(map(len, shown.splitlines())) < 400


@pytest.mark.parametrize("value", [7, ["4711"], {"a": 1}, None, "x" * 10_000], ids=range(5))
def test_invalid_job_in_a_record_is_ignored(here: Here, value: Any) -> None:
    with here.rival("0", job=value, job_name=value):
        done = here.command(*US, "status")
    assert done.returncode == 0
    assert "rival.ipynb" in done.stdout
    assert not done.stderr


# -- saving work -----------------------------------------------------------------------------------

# A job of 8 seconds that is busy beyond its end, because no Slurm ends it here.
BUSY = """
import time, reserve_gpu
os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 8)
began, end, saved = time.time(), float(os.environ["SLURM_JOB_END_TIME"]), []
reserve_gpu.before_end(lambda: saved.append(time.time()))
first = reserve_gpu.reserve()
while time.time() < end + 0.5: pass
"""


def assert_saved(began: float, end: float, saved: list[float]) -> None:
    """Check that a function was called once, about halfway through the job."""
    (at,) = saved
    assert (began + end) / 2 <= at + 0.5
    assert at < end - (end - began) / 4


def test_script_saves_before_the_end_of_its_job(here: Here, batch: Batch) -> None:
    """A before_end() function is called once in a short job, and nothing else changes."""
    with here.child(**batch.environ) as child:
        assert child.run(BUSY).error is None
        assert_saved(*child.run("began, end, saved").value)
        assert child.run("reserve_gpu.current() is first").value
        assert held(here) == [0]
        assert is_running(child.pid)


# -- a job without a GPU ---------------------------------------------------------------------------


def refused() -> ReserveGPUError:
    """Return the error of a request in this process, which changes no other variables."""
    before = dict(os.environ)
    with pytest.raises(ReserveGPUError) as caught:
        reserve_gpu.reserve()
    assert os.environ["CUDA_VISIBLE_DEVICES"] in {"", before["CUDA_VISIBLE_DEVICES"]}
    os.environ["CUDA_VISIBLE_DEVICES"] = before["CUDA_VISIBLE_DEVICES"]
    assert dict(os.environ) == before
    return caught.value


@pytest.mark.parametrize(
    ("visible", "own", "script", "options"),
    [
        ("-1", "cpu", "echo 'cpu (null)'; echo 'gpu gpu:a100:4(S:0-1)'", "-p gpu --gres=gpu:1"),
        ("NoDevFiles", "old", "echo 'new cray:1,gpu:8'; echo 'old gpu:4'", "-p old --gres=gpu:1"),
        ("", "cpu", "exit 1", "-p cpu --gres=gpu:1"),
        ("", "", "exit 1", "--gres=gpu:1"),
    ],
)
def test_job_without_a_gpu_names_the_options_for_one(
    here: Here, batch: Batch, visible: str, own: str, script: str, options: str
) -> None:
    """The error suggests the job's own partition, or the first one with GPUs."""
    batch.set_script("sinfo", script)
    os.environ.update(CUDA_VISIBLE_DEVICES=visible, SLURM_JOB_PARTITION=own)
    error = refused()
    assert f" srun {options} " in str(error)
    assert error.exit_code == 2


def test_cluster_without_gpus_suggests_no_options(here: Here, batch: Batch) -> None:
    batch.set_script("sinfo", "echo 'cpu (null)'")
    os.environ.update(CUDA_VISIBLE_DEVICES="", SLURM_JOB_PARTITION="cpu")
    assert "srun" not in str(refused())


@pytest.mark.promise
@pytest.mark.parametrize(
    ("variable", "advice"),
    [("FLUX_JOB_ID", "flux run"), ("KUBERNETES_SERVICE_HOST", "nvidia.com/gpu: 1")],
)
def test_other_job_without_a_gpu_prints_one_line(
    machine: Machine, variable: str, advice: str
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "-1", variable: "x"}
    done = machine.command(*US, "run", "--", "echo", "ran", **environ)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert advice in line


@pytest.mark.parametrize(
    ("variable", "code", "word"),
    [("KUBERNETES_SERVICE_HOST", 2, "pod"), ("FLUX_JOB_ID", 69, "driver")],
)
def test_pod_without_a_driver_has_no_gpu(here: Here, variable: str, code: int, word: str) -> None:
    """Without a driver, a pod has no GPU, but a Flux job might have another problem."""
    done = run_command(here, "--", "true", LD_LIBRARY_PATH="/nowhere", **{variable: "x"})
    assert done.returncode == code
    assert word in done.stderr


@pytest.mark.parametrize("gpus", ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"])
def test_job_with_gpus_keeps_the_original_error(here: Here, batch: Batch, gpus: str) -> None:
    environ = {**batch.environ, gpus: "1", "CUDA_VISIBLE_DEVICES": ""}
    with here.child(**environ) as child:
        assert child.reserve().error == "NoVisibleDeviceError"
    assert not batch.calls("sinfo")


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        ("count 0\ngpu", reserve_gpu.ImpossibleError),
        ("gpu\nfail nvmlInitWithFlags * 18", reserve_gpu.DriverError),
    ],
)
def test_failing_driver_is_not_a_missing_gpu(
    here: Here, batch: Batch, scenario: str, error: type[ReserveGPUError]
) -> None:
    here.write(scenario)
    with pytest.raises(error) as caught:
        reserve_gpu.reserve()
    assert type(caught.value) is error
    assert ("srun" in str(caught.value)) == (error is reserve_gpu.ImpossibleError)
