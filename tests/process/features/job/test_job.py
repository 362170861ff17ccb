"""Reservations in a job: until its end, by its name, and where it has no GPU.

Programs that answer as they are told stand in for Slurm's; test_real_jobs.py has the real one.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.job.job_end import Job
from reserve_gpu.reservation.session import session
from tests.support.here import feature
from tests.support.locked import held
from tests.support.main import run
from tests.support.platforms import CONTAINER, behind
from tests.support.processes import US, is_running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Machine

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train"}
END = "SLURM_JOB_END_TIME"
# 30 hours are never over today, and less than six days: people read the day of the week.
FAR_S = 30 * 3600
PROGRAM = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"{folder}/calls"
. "$0.does"
"""


class Batch:
    """Programs of Slurm's that do what they are told, and note their calls.

    environ: of a process in a job, which finds them first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        self.environ = {**JOB, "PATH": path}
        for name in ("squeue", "sinfo", "scancel"):
            self.does(name, "exit 1")
            (folder / name).write_text(PROGRAM.format(folder=folder))
            (folder / name).chmod(0o755)

    def does(self, name: str, script: str) -> None:
        """Let a program do that from now on: lines of a shell."""
        draft = self.folder / "draft"
        draft.write_text(f"{script}\n")
        draft.replace(self.folder / f"{name}.does")

    def ends(self, at: float) -> None:
        """Let squeue tell that end, as it does where nobody wants another form of times."""
        told = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
        self.does("squeue", f'[ "$SLURM_TIME_FORMAT" = standard ] && echo {told}')

    def calls(self, name: str) -> list[str]:
        """Return with what words a program was called."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


@pytest.fixture
def batch(here: Here) -> Iterator[Batch]:
    """Put this process into a job, of which squeue tells nothing yet.

    It is in another one than in the test before, and in none after it, which no process ever is.
    """
    made = Batch(here.folder / "batch")
    os.environ.update(made.environ)
    yield made
    reserve_gpu.release()
    session().features = {n: f for n, f in session().features.items() if n != "Job"}


def ends_in(seconds: float) -> float:
    """Let the job of this process end then, as its environment tells; returns the moment."""
    os.environ[END] = str(int(time.time() + seconds))
    return float(os.environ[END])


def until() -> float | None:
    """Return until when this process holds what it holds."""
    reservation = reserve_gpu.current()
    assert reservation
    return reservation.lease.until


def told(at: float) -> str:
    """Return a moment as people read it that is not today."""
    return time.strftime("%a %H:%M", time.localtime(at))


def step() -> None:
    """Let features do what is due."""
    session().run(session()._step)


# -- when it ends ----------------------------------------------------------------------------------


def test_the_end_in_the_environment(batch: Batch) -> None:
    """Where the environment tells the job's end, what is reserved lasts until then."""
    end = ends_in(FAR_S)
    reservation = reserve_gpu.reserve()
    assert reservation.lease.until == end
    assert reservation.lease.is_jobs
    step()
    assert until() == end  # squeue, which fails here, is not needed


def test_squeue_tells_the_end(batch: Batch) -> None:
    """Without it squeue is asked, before the reservation, for this job and in a form of its own."""
    end = float(int(time.time()) + FAR_S)
    batch.ends(end)
    os.environ["SLURM_TIME_FORMAT"] = "relative"
    assert reserve_gpu.reserve().lease.until == end
    assert batch.calls("squeue")[0] == "--noheader --jobs 4711 --format=%e"


@pytest.mark.parametrize("is_later", [True, False])
def test_an_end_that_was_moved(batch: Batch, *, is_later: bool) -> None:
    """Where squeue tells another end than the environment, which is older, that one counts."""
    end = ends_in(FAR_S) + (3600 if is_later else -3600)
    batch.ends(end)
    reserve_gpu.reserve()
    wait_for(lambda: until() == end)


def test_the_end_is_moved_below_a_person_s(batch: Batch) -> None:
    """A person's own end counts again once the job's has been moved behind it."""
    end = ends_in(FAR_S)
    own = reserve_gpu.reserve(for_="10h").lease.until
    assert own
    for moved, expected in ((own - 3600, own - 3600), (end, own)):
        batch.ends(moved := float(int(moved)))
        feature(Job)._looked_at = -inf
        step()
        assert until() == pytest.approx(expected, abs=1)
        assert reserve_gpu.current().lease.is_jobs == (moved != end)  # type: ignore[union-attr]


@pytest.mark.parametrize(("left_s", "pause_s"), [(7200, 6540), (600, 200), (30, 15)])
def test_it_is_asked_again(batch: Batch, left_s: float, pause_s: float) -> None:
    """The end is asked for again before the first warning, and the nearer it is, the more often."""
    batch.ends(ends_in(left_s))
    reserve_gpu.reserve()
    step()
    assert len(batch.calls("squeue")) == 1
    assert feature(Job)._look_in_s() == pytest.approx(pause_s, abs=10)


@pytest.mark.parametrize(("own_s", "is_jobs"), [(3600, False), (3 * 3600, True)])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_end_counts(batch: Batch, own_s: float, *, is_first: bool, is_jobs: bool) -> None:
    """Of a person's end and the job's the first one counts, whichever is said first."""
    end = ends_in(2 * 3600)
    if not is_first:
        assert reserve_gpu.reserve().lease.until == end
    lease = reserve_gpu.reserve(for_=own_s).lease
    assert lease.is_jobs == is_jobs
    assert lease.until == pytest.approx(end if is_jobs else time.time() + own_s, abs=30)


@pytest.mark.promise
def test_an_end_in_the_past(here: Here, batch: Batch) -> None:
    """A job's end in the past limits nothing, and a warning says so; the own end counts."""
    ends_in(-FAR_S)
    with pytest.warns(reserve_gpu.ReserveGPUWarning) as told:
        lease = reserve_gpu.reserve(for_="1h").lease
    assert not lease.is_jobs
    assert lease.until == pytest.approx(time.time() + 3600, abs=30)
    (warning,) = told
    assert str(warning.message).startswith("Job 4711 should have ended at ")
    assert str(warning.message).endswith("first run: unset SLURM_JOB_ID SLURM_JOB_END_TIME")
    saved = list[str]()
    reserve_gpu.before_end(lambda: saved.append("saved"))
    step()
    assert feature(Job)._save_in_s() == inf
    assert not saved


def test_an_end_in_the_past_that_was_moved(batch: Batch) -> None:
    """If squeue reports a later end, it counts, and there is no warning."""
    ends_in(-60)
    batch.ends(end := float(int(time.time()) + FAR_S))
    assert reserve_gpu.reserve().lease.until == end


def test_a_command_after_the_end_of_its_job(here: Here, batch: Batch) -> None:
    """A command with `--for` runs until then in a shell that has outlived its job."""
    environ = {**batch.environ, END: f"{ends_in(-60):.0f}"}
    done = here.command(*US, "run", "--for", "1h", "--", *US, "list", "--json", **environ)
    assert done.returncode == 0, done
    (listed,) = json.loads(done.stdout)["reservations"]
    assert listed["until"] == pytest.approx(time.time() + 3600, abs=60)
    assert not listed["is_job_end"]
    assert "Job 4711 should have ended at " in done.stderr


@pytest.mark.parametrize("job_s", [-60, 1])
def test_a_rule_after_the_end_of_a_job(here: Here, batch: Batch, job_s: float) -> None:
    """The administrator's time ends a reservation whose job should have ended before."""
    here.rules.write_text('[limits]\ntime = "3s"\n')
    ends_in(job_s)
    with here.child(**batch.environ, **{END: os.environ[END]}) as child:
        child.run("import warnings; warnings.simplefilter('ignore'); reserve_gpu.reserve()")
        assert held(here) == [0]
        wait_for(lambda: not held(here), 0.05)
        assert child.run("os.environ['CUDA_VISIBLE_DEVICES']").value == ""


def test_an_own_end_over_exec(here: Here, batch: Batch) -> None:
    """The program that `run` becomes knows the end that was asked for behind the job's."""
    environ = {**batch.environ, END: f"{(end := ends_in(3600)):.0f}"}
    code = "import reserve_gpu as r; lease = r.current().lease; print(lease.until, lease.own.until)"
    line = (*US, "run", "--for", "10h", "--", sys.executable, "-c", code)
    done = here.command(*line, **environ)
    assert done.returncode == 0, done
    first, own = map(float, done.stdout.split())
    assert first == end
    assert own == pytest.approx(time.time() + 36_000, abs=60)
    assert "The job and the command end at " in done.stderr


def test_an_own_end_over_a_restart(here: Here, batch: Batch) -> None:
    """A kernel that restarts in a job keeps the end that was asked for behind the job's."""
    own = "print(reserve_gpu.current().lease.own.until)"
    with here.kernel(**batch.environ, **{END: f"{ends_in(3600):.0f}"}) as kernel:
        kernel.run("import reserve_gpu\nreserve_gpu.reserve(for_='10h')")
        before = kernel.run(own).stdout
        assert float(before) == pytest.approx(time.time() + 36_000, abs=60)
        kernel.restart()
        kernel.load()
        kernel.run("import reserve_gpu\nreserve_gpu.reserve()")
        assert kernel.run(own).stdout == before


@pytest.mark.parametrize(
    "does",
    [
        *("exit 1", "echo rubbish", "echo N/A", "printf '\\377\\376\\n'", "exec kill -9 $$"),
        *("echo 0001-01-01T00:00:00", "echo 9999-12-31T23:59:59.999999+14:00"),
        "exec sleep 1000",
    ],
)
def test_a_squeue_of_no_use(batch: Batch, does: str) -> None:
    """Where squeue fails, hangs or prints rubbish there is a reservation, which has no end."""
    batch.does("squeue", does)
    reservation = reserve_gpu.reserve()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert batch.calls("squeue")
    at = reservation.lease.until
    assert at is None or at > 2e11  # the year 9999, which is one to Python


def test_no_squeue(batch: Batch) -> None:
    """Where there is no squeue, or one that can't be run, a reservation is made without an end."""
    os.environ["PATH"] = str(batch.folder / "none")
    assert reserve_gpu.reserve().lease.until is None
    reserve_gpu.release()
    (batch.folder / "squeue").chmod(0)
    (batch.folder / "squeue").write_bytes(b"\0")
    os.environ["PATH"] = str(batch.folder)
    assert reserve_gpu.reserve().lease.until is None


@pytest.mark.parametrize(
    "told",
    [
        *("", "soon", "-1", "1e9", "\u0661"),
        pytest.param("9" * 400, id="no time"),
    ],
)
def test_rubbish_in_the_environment(batch: Batch, told: str) -> None:
    """Where the environment tells rubbish for the job's end, squeue is asked."""
    os.environ[END] = told
    end = float(int(time.time()) + FAR_S)
    batch.ends(end)
    reserve_gpu.reserve()
    wait_for(lambda: until() == end)


@pytest.mark.parametrize("variable", ["USUAL", "FLUX_JOB_ID", "KUBERNETES_SERVICE_HOST"])
def test_outside_of_a_job(here: Here, batch: Batch, variable: str) -> None:
    """Outside of a job of Slurm's it is not asked, and nothing says that it holds the GPU."""
    del os.environ["SLURM_JOB_ID"]
    os.environ[variable] = "1"
    assert reserve_gpu.reserve().lease.until is None
    shell = here.shell()
    assert "Released GPU0" in shell.run("%reserve_gpu --release").stdout
    assert "In Slurm" not in shell.run("%reserve_gpu\n%reserve_gpu --release").all
    assert not (batch.folder / "calls").exists()


# -- what is said of it ----------------------------------------------------------------------------


@pytest.mark.promise
def test_people_read_the_end(here: Here, batch: Batch) -> None:
    """The magic, a status and the list say that it is the job's end, and which job that is."""
    end = ends_in(FAR_S)
    shown = here.shell().run("%reserve_gpu").all
    assert f"GPU0 is yours until {told(end)}, the job's end." in shown
    about = re.escape(f"(pid {os.getpid()}, job 4711, part of train)")
    for words in ("status", "list"):
        done = here.command(*US, words)
        assert re.search(rf"{about} for \d+ s, until {told(end)}, the job's end", done.stdout), done


def test_people_read_their_own_end(here: Here, batch: Batch) -> None:
    """Where a person's own end comes first, nothing says that it is the job's."""
    ends_in(2 * FAR_S)
    shown = here.shell().run("%reserve_gpu --for 30h").all
    assert "GPU0 is yours until " in shown
    assert "the job's end" not in shown + here.command(*US, "list").stdout


def test_programs_read_the_job(here: Here, batch: Batch) -> None:
    """In JSON a holder has its job, the name of that, and until when it holds."""
    end = ends_in(FAR_S)
    reserve_gpu.reserve()
    status = json.loads(here.command(*US, "status", "--json").stdout)
    (listed,) = json.loads(here.command(*US, "list", "--json").stdout)["reservations"]
    for holder in (status["devices"][0]["holders"][0], listed):
        assert (holder["job"], holder["job_name"], holder["until"]) == ("4711", "train", end)


def test_a_task_of_an_array(here: Here, batch: Batch) -> None:
    """A task of an array is called as squeue and scancel call it: by the array and its number."""
    os.environ.update(SLURM_ARRAY_JOB_ID="4711", SLURM_ARRAY_TASK_ID="3", SLURM_JOB_ID="4714")
    shell = here.shell()
    shell.run("%reserve_gpu")
    assert "job 4711_3, part of train" in here.command(*US, "status").stdout
    assert shell.run("%reserve_gpu --release").stdout.endswith("\n!scancel 4711_3\n")


def test_a_release_in_a_job(here: Here, batch: Batch) -> None:
    """Who releases in a job reads that the job has the GPU still, and how to give that back."""
    shell = here.shell()
    shell.run("%reserve_gpu")
    told = shell.run("%reserve_gpu --release").stdout
    assert told.startswith("Released GPU0.")
    more = "In Slurm, job 4711 still occupies its GPUs. To free them, end the job:\n!scancel 4711\n"
    assert told.endswith(more)
    assert not held(here)
    assert "In Slurm" not in shell.run("%reserve_gpu --release").stdout  # nothing was held
    assert not batch.calls("scancel")


def test_the_end_is_near(here: Here, batch: Batch) -> None:
    """Near its end the next cell says when the job ends, and offers no more time."""
    end = ends_in(6)
    shell = here.shell()
    shell.run("%reserve_gpu")
    clock = time.strftime("%H:%M:%S", time.localtime(end))
    text = f"The job and all its processes end at {clock}. Save your work."
    cells = [""]

    def is_told() -> bool:
        cells.append(shell.run("1;").all)
        return text in cells[-1]

    wait_for(is_told, 0.05)
    assert "To keep" not in cells[-1]
    assert "--for" not in cells[-1]


def test_a_history_names_the_job(here: Here, batch: Batch) -> None:
    """What is logged of a reservation, and of a wait, has the number of the job."""
    (here.home / ".config").mkdir()
    (here.home / ".config/reserve_gpu.toml").write_text("history = true\n")
    folder = here.home / ".local/state/reserve_gpu" / os.uname().nodename
    with here.rival("0"), here.rival("1"), pytest.raises(reserve_gpu.WaitTimeoutError):
        reserve_gpu.reserve(wait=1)
    reserve_gpu.reserve()
    step()
    kinds = {}
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            kinds[entry["kind"]] = entry["job"]
    assert kinds == {"waited": "4711", "reserved": "4711"}


FOREIGN = "\x1b]0;owned\x07\x1b[31m\r\n\u202e" + "x" * 10_000


def test_a_name_that_is_no_name(machine: Machine) -> None:
    """A job's name of 10,000 characters, some of which steer terminals, is short and clean."""
    with machine.child(SLURM_JOB_ID="4711" + FOREIGN, SLURM_JOB_NAME=FOREIGN) as child:
        child.reserve()
        for words in ("status", "list"):
            done = machine.command(*US, words)
            assert "part of \ufffd]0;owned\ufffd\ufffd[31m\ufffd\ufffd\ufffdxx" in done.stdout
            assert all(each.isprintable() for each in done.stdout.replace("\n", ""))
            assert max(map(len, done.stdout.splitlines())) < 400


@pytest.mark.parametrize("rubbish", [7, ["4711"], {"a": 1}, None, "", "x" * 10_000])
def test_what_others_write_of_their_job(here: Here, rubbish: Any) -> None:
    """Whatever somebody's record says of a job, a status shows who holds the GPU."""
    with here.rival("0", job=rubbish, job_name=rubbish):
        done = here.command(*US, "status")
    assert done.returncode == 0
    assert "rival.ipynb" in done.stdout
    assert not done.stderr


# -- before the end --------------------------------------------------------------------------------

# Busy beyond the job's end, as nobody here ends it: only a stand-in tells of it.
BUSY = """
import time, reserve_gpu
os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 8)
began, end, saved = time.time(), float(os.environ["SLURM_JOB_END_TIME"]), []
reserve_gpu.before_end(lambda: saved.append(time.time()))
first = reserve_gpu.reserve()
while time.time() < end + 0.5: pass
"""


def check_saved(began: float, end: float, saved: list[float]) -> None:
    """Check that a function was called once, about at half of the time."""
    (at,) = saved
    assert (began + end) / 2 <= at + 0.5
    assert at < end - (end - began) / 4


def test_a_script_saves_before_the_end(here: Here, batch: Batch) -> None:
    """What is to be called before the end is called once, at half of a short job; nothing else."""
    with here.child(**batch.environ) as child:
        assert child.run(BUSY).error is None
        check_saved(*child.run("began, end, saved").value)
        assert child.run("reserve_gpu.current() is first").value
        assert held(here) == [0]
        assert is_running(child.pid)


def test_a_notebook_saves_before_the_end(here: Here, batch: Batch) -> None:
    """It is called while a cell runs; that cell, the kernel and the reservation go on."""
    with here.kernel(**batch.environ) as kernel:
        cell = kernel.run(f"import os\n{BUSY}\nprint([began, end, saved])")
        assert not cell.error, cell.all
        began, end, saved = json.loads(cell.stdout.splitlines()[-1])
        check_saved(began, end, saved)
        assert kernel.run("print(reserve_gpu.current() is first)").stdout == "True\n"
        assert held(here) == [0]


# -- a job without a GPU ---------------------------------------------------------------------------


def reserve_in(machine: Machine, *words: str, **extra: str) -> str:
    """Reserve in a process with that environment; returns the one line that refuses it."""
    done = machine.command(*US, "run", *words, "--", "echo", "ran", **extra)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removesuffix("\n")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
@pytest.mark.parametrize(
    ("own", "does", "options"),
    [
        ("gpu", "echo 'cpu (null)'; echo 'gpu gpu:4'", "-p gpu --gres=gpu:1"),
        ("cpu", "echo 'cpu (null)'; echo 'gpu gpu:a100:4(S:0-1)'", "-p gpu --gres=gpu:1"),
        ("old", "echo 'new craynetwork:1,gpu:8'; echo 'old gpu:4'", "-p old --gres=gpu:1"),
        ("cpu", "exit 1", "-p cpu --gres=gpu:1"),
        ("", "exit 1", "--gres=gpu:1"),
        ("", "echo 'gpu gpu:4'", "-p gpu --gres=gpu:1"),
    ],
)
def test_a_job_without_a_gpu(
    here: Here, batch: Batch, visible: str, own: str, does: str, options: str
) -> None:
    """A job without a GPU is told what to type for one, in a partition that has some."""
    batch.does("sinfo", does)
    os.environ.update(CUDA_VISIBLE_DEVICES=visible, SLURM_JOB_PARTITION=own)
    before = dict(os.environ)
    with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
        reserve_gpu.reserve()
    assert str(caught.value) == f"Job 4711 has no GPU. Start a job that has one: srun {options} ..."
    assert caught.value.exit_code == 2
    assert os.environ["CUDA_VISIBLE_DEVICES"] in {"", visible}
    assert dict(os.environ) == {
        **before,
        "CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"],
    }


@pytest.mark.parametrize("does", ["exec sleep 1000", None])
def test_a_job_without_a_gpu_and_no_sinfo(here: Here, batch: Batch, does: str | None) -> None:
    """Where sinfo hangs, or is not there, the line says to ask in the job's own partition."""
    batch.does("sinfo", does or "")
    environ = {**batch.environ, "CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_PARTITION": "own"}
    if not does:
        (batch.folder / "sinfo").unlink()
        (batch.folder / "echo").symlink_to("/bin/echo")
        environ["PATH"] = str(batch.folder)
    line = reserve_in(here, **environ)
    assert line == "Job 4711 has no GPU. Start a job that has one: srun -p own --gres=gpu:1 ..."


@pytest.mark.parametrize("does", ["echo 'cpu (null)'", "echo rubbish"])
def test_no_partition_has_gpus(here: Here, batch: Batch, does: str) -> None:
    """Where Slurm gives no GPUs to anybody, nothing is said of what it can't give."""
    batch.does("sinfo", does)
    os.environ.update(CUDA_VISIBLE_DEVICES="", SLURM_JOB_PARTITION="cpu")
    with pytest.raises(reserve_gpu.ImpossibleError, match="hides every GPU"):
        reserve_gpu.reserve()


def test_a_job_on_a_node_without_a_driver(here: Here, batch: Batch) -> None:
    """On a node without NVIDIA's driver it is the same line."""
    environ = {**batch.environ, "LD_LIBRARY_PATH": "/nowhere", "SLURM_JOB_PARTITION": "own"}
    line = reserve_in(here, **environ)
    assert line == "Job 4711 has no GPU. Start a job that has one: srun -p own --gres=gpu:1 ..."


@pytest.mark.parametrize("lacks", ["CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"])
def test_why_in_a_job_without_a_gpu(here: Here, batch: Batch, lacks: str) -> None:
    """Who asks why they would get none reads the same line, with a driver and without one."""
    nothing = {"CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": "/nowhere"}[lacks]
    environ = {**batch.environ, "SLURM_JOB_PARTITION": "own", lacks: nothing}
    done = here.command(*US, "why", **environ)
    line = "Job 4711 has no GPU. Start a job that has one: srun -p own --gres=gpu:1 ...\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


POD = (
    "This pod has no GPU. Request one in its spec: resources: {limits: {nvidia.com/gpu: 1}}. "
    "A pod sees only its own GPUs."
)


@pytest.mark.promise
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (
            "FLUX_JOB_ID",
            "This job has no GPU. Start a job that has one: flux run --gpus-per-task=1 ...",
        ),
        (
            "KUBERNETES_SERVICE_HOST",
            POD,
        ),
    ],
)
def test_others_without_a_gpu(machine: Machine, variable: str, text: str) -> None:
    """A job of Flux's and a pod that have no GPU are told, in one line, what helps there."""
    assert reserve_in(machine, CUDA_VISIBLE_DEVICES="-1", **{variable: "x"}) == text


def test_a_pod_without_a_driver(machine: Machine) -> None:
    """A pod into which no driver was put has no GPU; a job of Flux's may have other reasons."""
    done = run(machine, "--", "true", LD_LIBRARY_PATH="/nowhere", KUBERNETES_SERVICE_HOST="x")  # type: ignore[arg-type]
    assert done.returncode == 2
    assert done.stderr.startswith("This pod has no GPU.")
    done = run(machine, "--", "true", LD_LIBRARY_PATH="/nowhere", FLUX_JOB_ID="x")  # type: ignore[arg-type]
    assert done.returncode == 69
    assert "NVIDIA driver" in done.stderr


POD_WITH_A_GPU = (
    "mkdir dev; mount -t tmpfs none dev; cp -a /dev/null /dev/urandom dev; touch dev/nvidia0; "
    "mount --bind dev /dev"
)


@pytest.mark.parametrize(
    ("hidden", "error"),
    [("CUDA_VISIBLE_DEVICES", "NoVisibleDeviceError"), ("LD_LIBRARY_PATH", "NoDriverError")],
)
def test_a_pod_with_a_gpu(machine: Machine, hidden: str, error: str) -> None:
    """A pod that has a GPU is not told that it has none, where something in it hides the GPU."""
    environ = {"KUBERNETES_SERVICE_HOST": "x", hidden: ""}
    with behind(machine, *CONTAINER, script=POD_WITH_A_GPU, **environ) as child:
        refused = child.reserve()
        assert refused.error == error
        assert "This pod" not in refused.text


def test_the_magic_in_a_job_without_a_gpu(here: Here, batch: Batch) -> None:
    """In a notebook it is the same line, and no variable is changed."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", SLURM_JOB_PARTITION="own")
    before = dict(os.environ)
    cell = here.shell().run("%reserve_gpu")
    assert cell.error
    assert "Job 4711 has no GPU. Start a job that has one: srun -p own --gres=gpu:1 ..." in cell.all
    assert dict(os.environ) == before


@pytest.mark.parametrize("gpus", ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"])
def test_other_errors_stay(here: Here, batch: Batch, gpus: str) -> None:
    """In a job that has GPUs a refusal says what it says everywhere."""
    environ = {**batch.environ, gpus: "1", "CUDA_VISIBLE_DEVICES": ""}  # as a person sets it
    with here.child(**environ) as child:
        assert child.reserve().error == "NoVisibleDeviceError"
    os.environ[gpus] = "1"
    with here.rival("0"), here.rival("1"), pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    assert str(caught.value).startswith("No free GPU: 2 reserved.")
    here.add("fail nvmlInitWithFlags * 9")
    with pytest.raises(reserve_gpu.DriverError):
        reserve_gpu.reserve()
    assert not batch.calls("sinfo")


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        ("count 0\ngpu", "ImpossibleError"),
        ("gpu\nfail nvmlInitWithFlags * 9", "ImpossibleError"),
        ("gpu\nfail nvmlInitWithFlags * 18", "DriverError"),
    ],
)
def test_a_driver_that_fails_is_not_a_job_without_a_gpu(
    here: Here, batch: Batch, scenario: str, error: str
) -> None:
    """A job that sees no GPU is told so; one whose driver fails is told what is wrong with that."""
    here.write(scenario)
    with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
        reserve_gpu.reserve()
    assert type(caught.value).__name__ == error
    assert ("Job 4711 has no GPU" in str(caught.value)) == (error == "ImpossibleError")


def test_other_errors_stay_where_a_job_tells_nothing(here: Here, batch: Batch) -> None:
    """A GPU that others have, and a request that makes no sense, are refused as everywhere."""
    with here.rival("0"), here.rival("1"), pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    assert "has no GPU" not in str(caught.value)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with pytest.raises(reserve_gpu.RequestError):
        reserve_gpu.reserve(count=0)
    assert not batch.calls("sinfo")
