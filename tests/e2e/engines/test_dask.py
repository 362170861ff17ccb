"""Dask workers that each reserve a GPU: real schedulers, nannies and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from tests.support.engines import GPUS, examples, host, reported, run_python, uuids
from tests.support.machine import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Machine


PRELUDE = '''
import os, signal, time, warnings
import reserve_gpu
from distributed import Client, LocalCluster
from distributed.comm import CommClosedError
from reserve_gpu.dask import ReserveGPU
from tests.support.engines import cuda, pid_and_gpus, report, visible

def cluster(n, **more):
    return LocalCluster(n_workers=n, threads_per_worker=2, dashboard_address=None, **more)

def run(client, function):
    """Call on all workers; repeat if a connection breaks because Dask replaces a worker."""
    while True:
        try:
            return client.run(function).values()
        except CommClosedError:
            time.sleep(0.1)

def seen(client):
    return sorted(run(client, visible))

'''


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a host with four idle GPUs."""
    return host(tmp_path)


# Otherwise Dask gives up a killed worker that takes more than 15 s to restart.
PATIENT = {"DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "600s"}


def run_script(machine: Machine, code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run code that starts a cluster."""
    done = run_python(machine, "-c", PRELUDE + code, **PATIENT, **extra)
    assert done.returncode == 0, done.stderr
    return done


PLUGIN = """
shown = []
warnings.showwarning = lambda message, *_: shown.append(str(message))
report(seen(client))
holders = [h for r in reserve_gpu.status().rows for h in r.holders]
report(sorted((h.record.who.command, h.notebook, h.note) for h in holders))
report(client.scheduler.address)

client.restart()
report(seen(client))

old = set(run(client, os.getpid))
tasks = client.gather(client.map(pid_and_gpus, range(50), pure=False))
os.kill(next(iter(old)), signal.SIGKILL)
while {pid for pid, _ in tasks} <= old:  # until the new worker has run a task
    tasks += client.gather(client.map(pid_and_gpus, range(50), pure=False))
report(sorted({tuple(found) for _, found in tasks}))
report(sorted(found for _, found in run(client, pid_and_gpus)))

client.cluster.scale(5)
client.wait_for_workers(5)
deadline = time.monotonic() + 60
while None in seen(client) or seen(client).count("") != 1:
    assert time.monotonic() < deadline, seen(client)
    time.sleep(0.1)
report(seen(client))
report([found for _, found in run(client, pid_and_gpus) if len(found) != 1])
while not shown:
    assert time.monotonic() < deadline
    time.sleep(0.1)
report(shown)
report([line for log in client.get_worker_logs().values() for _, line in log if "no GPU" in line])
client.close()
client.cluster.close()
"""


@pytest.mark.needs("engines")
def test_plugin(machine: Machine) -> None:
    """The plugin of the page gives each worker a GPU, even after a restart and kill -9.

    Every task sees one GPU. A worker without a GPU reports that in its log and to the client. Each
    holder has the name of its worker and scheduler.
    """
    (plugin, _) = examples("Dask")
    done = run_script(machine, plugin + PLUGIN, JPY_SESSION_NAME="/home/alice/train.ipynb")
    first, holders, address, restarted, tasks, replaced, scaled, others, warned, logs = reported(
        done.stdout
    )
    named = [f"Dask worker {number} of {address}" for number in range(GPUS)]
    assert holders == [[name, None, None] for name in named]
    assert first == restarted == ["0", "1", "2", "3"]
    assert tasks == replaced == [[one] for one in uuids()]
    assert scaled == ["", "0", "1", "2", "3"]
    assert others == [[]]
    (log,) = logs
    assert "got no GPU: Timed out after 10 s. No free GPU" in log
    assert [one in log for one in warned] == [True]


REQUIRED = """
import subprocess, sys
shown = []
warnings.showwarning = lambda message, *_: shown.append(str(message))
tasks = []

def until_left(count):
    while sum(nanny.status.name == "closed" for nanny in local.workers.values()) != count:
        tasks.extend(client.gather(client.map(pid_and_gpus, range(20), pure=False)))

def slow(_):
    found = visible()
    time.sleep(0.01)
    return found

with cluster(5) as local, Client(local) as client:
    early = client.map(slow, range(1000))
    client.gather(early[0])
    client.register_plugin(ReserveGPU(required=True, wait=1))
    report(client.gather(early))
    until_left(1)
    report(seen(client))
    rival = [sys.executable, "-m", "reserve_gpu", "run", "--wait", "--", "sleep", "600"]
    rival = subprocess.Popen(rival)
    while not reserve_gpu.status().waiting:
        time.sleep(0.1)
    os.kill(next(iter(run(client, os.getpid))), signal.SIGKILL)
    until_left(2)
    report(len(seen(client)))
    report(sorted({len(found) for _, found in tasks}))
    while len(shown) != 2:
        time.sleep(0.1)
    report(shown)
    rival.kill()
"""


@pytest.mark.needs("engines")
def test_required(machine: Machine) -> None:
    """With `required`, a worker without a GPU leaves the cluster with its nanny.

    It runs no task, and the clients get a warning. The other workers stay.
    """
    early, first, left, seen, warned = reported(run_script(machine, REQUIRED).stdout)
    assert set(early) - {""} == {None, "0", "1", "2", "3"}  # no plugin yet
    assert early.count("") <= 5 * 2  # the running tasks
    assert first == ["0", "1", "2", "3"]
    assert left == 3
    assert seen == [1]
    text = "got no GPU and leaves the cluster: Timed out after 1 s. No free GPU"
    assert [text in one for one in warned] == [True, True]


@pytest.mark.needs("engines")
def test_required_on_the_command_line(machine: Machine) -> None:
    """`dask worker` continues with the workers that got a GPU, and ends if none did.

    In the scheduler, `--preload` reserves nothing and reports that.
    """
    preload = ("--preload", "reserve_gpu.dask", "--required", "--wait", "0.5s")
    code = """
client = Client({address!r})
client.wait_for_workers(4)
while seen(client) != list("0123"):
    time.sleep(0.1)
report(sorted({{tuple(found) for _, found in client.gather(client.map(pid_and_gpus, range(50)))}}))
"""
    with start_scheduler(machine, *preload[:2]) as (address, output):
        assert "it does nothing for a Scheduler" in output
        argv = ("dask", "worker", address, "--no-dashboard")
        with start_program(machine, *argv, "--nworkers", "5", *preload) as worker:
            done = run_script(machine, code.format(address=address))
            assert reported(done.stdout) == [[[one] for one in uuids()]]
            for more in ((), ("--no-nanny",)):
                late = machine.command(sys.executable, "-m", *argv, *more, *preload)
                assert late.returncode == 0
                assert "got no GPU and leaves the cluster: " in late.stderr
            assert worker.poll() is None


@contextmanager
def start_program(machine: Machine, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program of Dask in a new session, which is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", *argv], env=machine.environ(), cwd=machine.folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def start_scheduler(machine: Machine, *options: str) -> Iterator[tuple[str, str]]:
    """Start a scheduler; yield its address, and its output during the start."""
    argv = ("dask", "scheduler", "--port", "0", "--host", "127.0.0.1", "--no-dashboard", *options)
    with start_program(machine, *argv) as process:
        assert process.stdout
        output = ""
        for line in process.stdout:
            output += line
            if "Registering Worker plugin" in line:  # the last line of the start
                break
        yield output.partition("Scheduler at:")[2].split()[0], output


@pytest.mark.needs("engines")
def test_invalid_options_of_preload(machine: Machine) -> None:
    """With an invalid option, `dask worker` ends before it starts a worker."""
    preload = ("worker", "tcp://127.0.0.1:1", "--preload", "reserve_gpu.dask")
    done = machine.command(sys.executable, "-m", "dask", *preload, "--frobnicate")
    assert done.returncode == 2
    assert "Error: Unknown option --frobnicate" in done.stderr
    assert machine.calls() == []


TOO_LATE = """
with cluster(1) as local, Client(local) as client:
    client.run(cuda)
    try:
        client.register_plugin(ReserveGPU())
    except reserve_gpu.TooLateError as error:
        report(str(error))
    report(seen(client))
    client.restart()
    report(seen(client))
"""


@pytest.mark.needs("engines")
def test_too_late(machine: Machine) -> None:
    """If CUDA has started, registering the plugin raises."""
    error, unchanged, restarted = reported(run_script(machine, TOO_LATE).stdout)
    assert "Too late: CUDA has already started" in error
    assert "client.restart()" in error
    assert unchanged == [None]
    assert restarted == ["0"]


THREADS = """
with cluster(3, processes=False) as local, Client(local) as client:
    client.register_plugin(ReserveGPU())
    report(seen(client))
    report([device.label for device in reserve_gpu.current().devices])
    client.register_plugin(ReserveGPU(name='none', wait=None))
    report(seen(client))
report(visible())
"""


@pytest.mark.needs("engines")
def test_threads_as_workers(machine: Machine) -> None:
    """Workers in one process share one reservation, which outlives them."""
    one, labels, kept, after = reported(run_script(machine, THREADS).stdout)
    assert one == kept == ["0", "0", "0"]
    assert labels == ["GPU0"]
    assert after == "0"


HOLDER = """
reserve_gpu.reserve()
with cluster(1) as local, Client(local) as client:
    client.register_plugin(ReserveGPU())
    report(seen(client))
    reserve_gpu.release()
    client.restart()
    report(seen(client))
"""


@pytest.mark.needs("engines")
def test_cluster_of_a_holder(machine: Machine) -> None:
    """Workers of a process that holds all its GPUs get none until the process releases them."""
    done = run_script(machine, HOLDER)
    assert reported(done.stdout) == [[""], ["0"]]
    assert "the process that started it has reserved all GPUs that it may use." in done.stderr


@pytest.mark.needs("engines")
def test_error_hides_all_gpus(machine: Machine) -> None:
    """After any error, a worker sees no GPU."""
    code = """
with cluster(1) as local, Client(local) as client:
    client.register_plugin(ReserveGPU())
    report(seen(client))
"""
    done = run_script(machine, code, RESERVE_GPU_LOCK_DIR="/proc/none")
    assert reported(done.stdout) == [[""]]
    assert "got no GPU: " in done.stderr
    assert "/proc/none" in done.stderr


@pytest.mark.needs("engines")
def test_interrupted_wait(machine: Machine) -> None:
    """Ctrl-C ends a worker that waits without a timeout."""
    with start_scheduler(machine) as (address, _), machine.child() as holder:
        holder.reserve(f"count={GPUS}")
        options = ("--no-nanny", "--preload", "reserve_gpu.dask", "--wait")
        with start_program(machine, "dask", "worker", address, *options) as worker:
            deadline = time.monotonic() + LIMIT_S
            while holder.run("len(reserve_gpu.status().waiting)").value != 1:
                assert time.monotonic() < deadline
            worker.send_signal(signal.SIGINT)
            assert worker.wait(LIMIT_S) == 0


@pytest.mark.needs("engines")
def test_keywords_of_the_plugin(machine: Machine) -> None:
    """A plugin accepts all keywords of reserve() except `progress`."""
    code = """
import inspect
from reserve_gpu.dask import RequestKeywords
taken = {*inspect.signature(ReserveGPU).parameters, *RequestKeywords.__annotations__}
report(sorted(taken ^ {*inspect.signature(reserve_gpu.reserve).parameters}))
"""
    assert reported(run_script(machine, code).stdout) == [["keywords", "progress", "required"]]
