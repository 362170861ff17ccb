"""Kernels in jobs of a real Slurm: running kernels, waiting kernels, and their ends."""

from __future__ import annotations

import re
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT
from tests.support.processes import US, is_running, wait_for
from tests.support.slurm import PRINT_JOB, JobKernel, Slurm, cluster, needs_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator


pytest.importorskip("ipykernel.kernelspec")
pytestmark = [
    needs_slurm,
    pytest.mark.xdist_group("slurm: kernels"),
]

PRINT_AND_SLEEP = "import time; print('on', flush=True)\nwhile True: time.sleep(0.05)"
ALL_GPUS = "--gres=gpu:4"  # of the node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start a cluster of one node with four GPUs, and install the kernel."""
    with cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        slurm.run(*US, "kernel", "install", "--slurm", "--prefix", ".")
        yield slurm


@pytest.fixture
def slurm(node: Slurm) -> Iterator[Slurm]:
    """Return the cluster, without a job."""
    yield node
    node.cancel()


def waiting_jobs(slurm: Slurm) -> list[str]:
    """Return the ids of the jobs of waiting kernels."""
    return slurm.jobs("--states=PENDING", "--name=jupyter")


def occupy_gpus(slurm: Slurm) -> str:
    """Start a job with all GPUs, and return its id."""
    return slurm.start_job(ALL_GPUS)


# -- a kernel that runs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(node: Slurm) -> Iterator[JobKernel]:
    with closing(JobKernel(node)) as kernel:
        yield kernel


def test_kernel_has_a_gpu(node: Slurm, running: JobKernel) -> None:
    """A kernel runs in a job with one GPU, which it reserves and announces once."""
    job = running.run(PRINT_JOB)
    assert job.stdout.split() == [*node.jobs("--states=RUNNING"), "0"]
    assert "This kernel has GPU0" in job.shown
    cell = running.run("6 * 7")
    assert (cell.shown, cell.stdout, cell.stderr) == ("42", "", "")
    assert running.run("1 / 0").error == "ZeroDivisionError"
    assert f"job {job.stdout.split()[0]}, part of jupyter" in node.run(*US, "status")


def test_interrupt(running: JobKernel) -> None:
    """An interrupt ends only the running cell."""
    before = running.visible()
    message = running.start(PRINT_AND_SLEEP)
    running.wait_for_message(message)
    running.manager.interrupt_kernel()
    assert running.reply(message)["ename"] == "KeyboardInterrupt"
    assert running.visible() == before


def test_large_messages(running: JobKernel) -> None:
    """A message of 20 MB is complete in both directions."""
    size = 20_000_000
    opened = running.client.session.msg(
        "comm_open", {"comm_id": "1", "target_name": "big", "data": {}}
    )
    handler = (
        "sizes = []\nget_ipython().kernel.comm_manager.register_target("
        "'big', lambda comm, message: sizes.append(sum(map(sum, message['buffers']))))"
    )
    assert not running.run(handler).error
    session, channel = running.client.session, running.client.shell_channel
    session.send(channel.socket, opened, buffers=[b"\1" * size])
    assert running.run("print(sizes)").stdout == f"[{size}]\n"
    cell = running.run(f"print('x' * {size})")
    assert (len(cell.stdout), {*cell.stdout}) == (size + 1, {"x", "\n"})


def test_restart(running: JobKernel) -> None:
    """A restarted kernel is a new process in the same job, with the same GPU."""
    before, pid = running.visible(), running.pid
    running.run("kept = True")
    running.restart()
    assert running.run("kept").error == "NameError"
    assert running.visible() == before
    assert running.pid != pid


def test_shutdown(node: Slurm, running: JobKernel) -> None:
    """The job of a kernel ends when the kernel is shut down."""
    running.close()
    node.until_free()


def test_scancel_while_a_cell_runs(slurm: Slurm) -> None:
    """After scancel, the running cell fails with the reason, and a restart starts a new job."""
    with closing(JobKernel(slurm)) as kernel:
        job, _ = kernel.visible()
        message = kernel.start(PRINT_AND_SLEEP)
        kernel.wait_for_message(message)
        slurm.run("scancel", job)
        assert kernel.error(message).startswith("The job has ended: ")
        assert "CANCELLED" in kernel.error(kernel.start("1 + 1"))
        assert kernel.manager.is_alive()
        kernel.restart()
        again, _ = kernel.visible()
        assert again != job


# -- in the queue ----------------------------------------------------------------------------------


def test_waiting_kernel(slurm: Slurm) -> None:
    """The first cell shows why and where the job waits; then all cells run in order."""
    job = occupy_gpus(slurm)
    slurm.run("sbatch", "--output=/dev/null", ALL_GPUS, "--wrap=true")
    with closing(JobKernel(slurm)) as kernel:
        first, *more = (kernel.start(f"print({number})") for number in range(3))
        text = kernel.wait_for_message(first, pattern=r"is waiting: \w+ \(position")
        (own,) = waiting_jobs(slurm)
        pattern = rf"Job {own} is waiting: (Priority|Resources) \(position 2 of 2\).*"
        assert re.fullmatch(pattern, text)
        slurm.run("scancel", job)
        kernel.wait_for_message(first, "clear_output")
        printed = [kernel.finish(each).stdout.split()[-1] for each in (first, *more)]
        assert printed == ["0", "1", "2"]
        assert [kernel.reply(each)["status"] for each in (first, *more)] == ["ok"] * 3
        assert kernel.visible()[0] == own


def test_interrupt_restart_and_scancel_in_the_queue(slurm: Slurm) -> None:
    """In the queue, an interrupt ends the cells, and a restart keeps the job."""
    occupy_gpus(slurm)
    with closing(JobKernel(slurm)) as kernel:
        wait_for(lambda: waiting_jobs(slurm), 0.05)
        own = waiting_jobs(slurm)
        message = kernel.start("1")
        kernel.wait_for_message(message)
        kernel.manager.interrupt_kernel()
        assert kernel.error(message) == "The job is still waiting."
        kernel.restart()
        assert waiting_jobs(slurm) == own
        message = kernel.start("1")
        kernel.wait_for_message(message)
        slurm.run("scancel", *own)
        assert kernel.error(message).startswith("Slurm could not start a job: ")
        assert not waiting_jobs(slurm)


# -- without a job ---------------------------------------------------------------------------------


def test_no_job(slurm: Slurm) -> None:
    """If Slurm starts no job, the error of the cell has Slurm's reason."""
    with closing(JobKernel(slurm, "--partition=nowhere")) as kernel:
        text = kernel.error(kernel.start("1"))
        assert text.startswith("Slurm could not start a job: ")
        assert "invalid partition specified: nowhere" in text
        assert "\n" not in text
        assert kernel.manager.is_alive()


# -- killed clients --------------------------------------------------------------------------------

# A client in another process.
CLIENT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.support.slurm import JobKernel, Slurm
from tests.support.engines import host
slurm = Slurm([host(Path.cwd() / "n0")], Path.cwd())
kernel = JobKernel(slurm)
"""


@pytest.mark.parametrize("is_queued", [False, True])
def test_killed_client(slurm: Slurm, *, is_queued: bool) -> None:
    """The job of a killed client ends, whether it runs or waits."""
    jobs = [occupy_gpus(slurm)] if is_queued else []
    with slurm.machine.child(SLURM_CONF=f"{slurm.folder}/slurm.conf") as client:
        assert client.run(f"os.chdir({str(slurm.folder)!r})").error is None
        answer = client.run(CLIENT)
        assert answer.error is None, answer
        if is_queued:
            wait_for(lambda: waiting_jobs(slurm), 0.05)
        else:
            assert client.run("kernel.visible()").value[1] == "0"
        relay = client.run("kernel.relay").value
        client.kill()
        slurm.until("\n".join(jobs), "squeue", "--noheader", "--format=%i")
        wait_for(lambda: not is_running(relay), 0.05)
