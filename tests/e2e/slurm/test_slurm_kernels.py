"""Kernels in jobs of a real Slurm: running kernels, waiting kernels, and their ends."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, closing, suppress
from queue import Empty
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.machine import LIMIT_S, ROOT
from tests.support.processes import US, is_running, wait_for
from tests.support.slurm import (
    PRINT_JOB,
    JobKernel,
    Slurm,
    cluster,
    kernel_manager_of,
    kernelspec,
    needs_slurm,
)

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


def test_input(running: JobKernel) -> None:
    """A cell receives the input that the client sends."""
    message = running.client.execute("print(input('who? ')[::-1])", allow_stdin=True)
    asked = running.client.get_stdin_msg(timeout=LIMIT_S)
    assert asked["content"]["prompt"] == "who? "
    running.client.input("olleh")
    assert running.finish(message).stdout.endswith("hello\n")


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


def test_crash(node: Slurm, running: JobKernel) -> None:
    """A crashed kernel is dead for Jupyter, and restarts in the same job."""
    before = running.visible()
    running.start("import os; os._exit(3)")
    wait_for(lambda: not running.manager.is_alive(), 0.05)
    running.restart()
    assert running.visible() == before


def test_killed_relay(node: Slurm, running: JobKernel) -> None:
    """If the process on the client's machine is killed, Jupyter restarts the kernel in the job."""
    before = running.visible()
    os.kill(running.relay, signal.SIGKILL)
    wait_for(lambda: not running.manager.is_alive(), 0.05)
    running.restart()
    assert running.visible() == before
    assert len(node.jobs()) == 1


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


# -- as a plain command ----------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Return ports outside the range of other programs' connections."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            while not each.getsockname()[1]:
                with suppress(OSError):
                    each.bind(("127.0.0.1", random.randrange(20_000, 32_000)))  # noqa: S311
        return [each.getsockname()[1] for each in sockets]


class PlainKernel(JobKernel):
    """A kernel that the command of its kernelspec starts, as in VS Code."""

    def __init__(self, slurm: Slurm) -> None:
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        shell, iopub, stdin, hb, control = free_ports(5)
        file = slurm.folder / f"plain-{time.monotonic_ns()}.json"
        path, _ = write_connection_file(str(file), shell, iopub, stdin, hb, control_port=control)
        argv = [word.replace("{connection_file}", path) for word in kernelspec(slurm)["argv"]]
        self.process = subprocess.Popen(
            argv, env=slurm.environ(), cwd=slurm.folder, start_new_session=True
        )
        self.client = BlockingKernelClient(connection_file=path)
        self.client.load_connection_file()
        self.client.start_channels(hb=False)  # a slow start would count as dead
        try:
            self.client.wait_for_ready(timeout=LIMIT_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.client.stop_channels()
        self.process.kill()
        self.process.wait(LIMIT_S)


def test_plain_command(slurm: Slurm) -> None:
    """Without our provisioner, a kernel runs, is interrupted by a message, and is shut down."""
    with closing(PlainKernel(slurm)) as kernel:
        assert kernel.visible()[1] == "0"
        message = kernel.start(PRINT_AND_SLEEP)
        kernel.wait_for_message(message)
        client = kernel.client
        client.control_channel.send(client.session.msg("interrupt_request", {}))
        assert kernel.reply(message)["ename"] == "KeyboardInterrupt"
        client.shutdown()
        kernel.process.wait(LIMIT_S)
        slurm.until_free()


@pytest.mark.parametrize("how", ["kill", "crash"])
def test_end_of_a_plain_command(slurm: Slurm, how: str) -> None:
    """The job ends when the command is killed or the kernel crashes."""
    with closing(PlainKernel(slurm)) as kernel:
        kernel.visible()
        if how == "kill":
            kernel.process.kill()
        else:
            kernel.start("import os; os._exit(3)")
        assert kernel.process.wait(LIMIT_S) != 0
        slurm.until_free()


def test_plain_command_killed_in_the_queue(slurm: Slurm) -> None:
    """If the command is killed while it waits, the job ends as soon as it starts."""
    job = occupy_gpus(slurm)
    with closing(PlainKernel(slurm)) as kernel:
        wait_for(lambda: waiting_jobs(slurm), 0.05)
        kernel.process.kill()
        kernel.process.wait(LIMIT_S)
        slurm.run("scancel", job)
        slurm.until_free()


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


def test_shutdown_in_the_queue(slurm: Slurm) -> None:
    """A waiting kernel that is shut down leaves no job."""
    job = occupy_gpus(slurm)
    with closing(JobKernel(slurm)):
        wait_for(lambda: waiting_jobs(slurm), 0.05)
    slurm.until(job, "squeue", "--noheader", "--format=%i")


# -- without a job ---------------------------------------------------------------------------------


def without_srun(line: list[str]) -> list[str]:
    at = line.index("--") + 1
    return [*line[:at], "/nowhere/srun", *line[at + 1 :]]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("--partition=nowhere", "invalid partition specified: nowhere"),
        ("", "/nowhere/srun: No such file or directory"),
    ],
)
def test_no_job(slurm: Slurm, given: str, reason: str) -> None:
    """If Slurm starts no job, the error of the cell has Slurm's reason."""
    options = (given,) if given else ()
    changed = {} if given else {"changed": without_srun}
    with closing(JobKernel(slurm, *options, **changed)) as kernel:
        text = kernel.error(kernel.start("1"))
        assert text.startswith("Slurm could not start a job: ")
        assert reason in text
        assert "\n" not in text
        assert kernel.manager.is_alive()


# Mounts in a namespace of the job, invisible to this machine.
READ_ONLY = "for each in /tmp /var/tmp; do mount --bind $each $each; mount -o remount,bind,ro $each"
READ_ONLY = f"{READ_ONLY}; done; cd /proc"
FULL = "mount -t tmpfs -o nr_inodes=2 full /var/tmp; export TMPDIR=/var/tmp"


@pytest.mark.parametrize(
    ("script", "reason"),
    [(READ_ONLY, "No usable temporary directory"), (FULL, "No space left on device")],
    ids=["read-only", "full"],
)
def test_full_node(slurm: Slurm, script: str, reason: str) -> None:
    """If the node has no space for the kernel's files, the error is one line with the reason."""
    can = subprocess.run(["unshare", "--mount", "true"], check=False, stderr=subprocess.DEVNULL)
    if can.returncode:
        pytest.skip("needs mount namespaces")
    inside = ("unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh")
    with closing(JobKernel(slurm, *inside)) as kernel:
        text = kernel.error(kernel.start("1"))
        assert reason in text
        assert "\n" not in text
    slurm.until_free()


def test_gpu_held_outside_slurm(slurm: Slurm) -> None:
    """If a process outside Slurm holds the GPU, the kernel starts and reports that."""
    with slurm.machine.child() as outside:
        assert not outside.reserve("count=4").error
        with closing(JobKernel(slurm)) as kernel:
            shown = kernel.run("1").all
            assert "This kernel was started without a GPU of its own." in shown


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


# -- many kernels ----------------------------------------------------------------------------------

KERNELS = int(os.environ.get("KERNELS", "12"))  # tried with 20
# Evaluated in the reply to a cell, which is never lost, unlike output.
JOB_AND_GPU = {"has": "(os.environ['SLURM_JOB_ID'], reserve_gpu.current().devices[0].uuid)"}


def test_many_kernels_for_four_gpus(slurm: Slurm) -> None:
    """Each of many kernels gets a GPU that no other kernel has, and no job is left."""
    kernels: dict[str, Any] = {}
    has: dict[str, tuple[str, str]] = {}
    done = set[str]()
    try:
        for _ in range(KERNELS):
            started = kernel_manager_of(slurm, kernelspec(slurm))
            started.start_kernel(env=slurm.environ(), cwd=str(slurm.folder))
            client = started.client()
            client.start_channels(hb=False)
            message = client.execute("import os, reserve_gpu", user_expressions=JOB_AND_GPU)
            kernels[message] = started, client
        deadline = time.monotonic() + 200
        while len(done) < KERNELS:
            assert time.monotonic() < deadline
            for message, (_, client) in kernels.items():
                if message in done or message in has:
                    continue
                with suppress(Empty):
                    reply = client.get_shell_msg(timeout=0.02)
                    assert reply["content"]["status"] == "ok", reply["content"]
                    text = reply["content"]["user_expressions"]["has"]["data"]["text/plain"]
                    job, uuid = re.findall(r"'(.*?)'", text)
                    assert uuid not in {each for _, each in has.values()}
                    assert len(has) < 4
                    has[message] = job, uuid
            if len(has) == min(4, KERNELS - len(done)):  # no more fit at the same time
                for message in [*has]:
                    close(*kernels[message])
                    del has[message]
                    done.add(message)
        slurm.until_free()
    finally:
        for message, each in kernels.items():
            if message not in done:
                close(*each)


def close(started: Any, client: Any) -> None:
    client.stop_channels()
    started.shutdown_kernel()
    started.cleanup_resources()
