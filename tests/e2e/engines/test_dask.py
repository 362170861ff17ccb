"""Dask workers, each with a GPU of its own: real schedulers, nannies and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines import GPUS, examples, host, run, said, uuids
from tests.support.machine import LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Machine


def engines(test: Any) -> Any:
    """Mark a test that needs Dask, and takes long."""
    return pytest.mark.full(pytest.mark.needs("engines")(test))


PRELUDE = '''
import os, signal, time, warnings
import reserve_gpu
from distributed import Client, LocalCluster
from distributed.comm import CommClosedError
from reserve_gpu.dask import ReserveGPU
from tests.support.engines import cuda, look, say, visible

def cluster(n, **more):
    return LocalCluster(n_workers=n, threads_per_worker=2, dashboard_address=None, **more)

def run(client, function):
    """On all workers; again if the connection to one that Dask replaces breaks meanwhile."""
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
    """Make a host with four idle GPUs."""
    return host(tmp_path)


# Else Dask gives up a worker that is killed within 15 s of a restart and slow to come back.
PATIENT = {"DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT": "600s"}


def script(machine: Machine, code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run code that starts a cluster; a task and a warning each say what they see."""
    done = run(machine, "-c", PRELUDE + code, **PATIENT, **extra)
    assert done.returncode == 0, done.stderr
    return done


PLUGIN = """
shown = []
warnings.showwarning = lambda message, *_: shown.append(str(message))
say(seen(client))
holders = [h for r in reserve_gpu.status().rows for h in r.holders]
say(sorted((h.record.who.command, h.notebook, h.note) for h in holders))
say(client.scheduler.address)

client.restart()
say(seen(client))

old = set(run(client, os.getpid))
tasks = client.gather(client.map(look, range(50), pure=False))
os.kill(next(iter(old)), signal.SIGKILL)
while {pid for pid, _ in tasks} <= old:  # until the one that replaces it has had a task
    tasks += client.gather(client.map(look, range(50), pure=False))
say(sorted({tuple(found) for _, found in tasks}))
say(sorted(found for _, found in run(client, look)))

client.cluster.scale(5)
client.wait_for_workers(5)
deadline = time.monotonic() + 60
while None in seen(client) or seen(client).count("") != 1:
    assert time.monotonic() < deadline, seen(client)
    time.sleep(0.1)
say(seen(client))
say([found for _, found in run(client, look) if len(found) != 1])
while not shown:
    assert time.monotonic() < deadline
    time.sleep(0.1)
say(shown)
say([line for log in client.get_worker_logs().values() for _, line in log if "no GPU" in line])
client.close()
client.cluster.close()
"""


@engines
def test_plugin(machine: Machine) -> None:
    """The page's plugin gives each worker its GPU, again after restart and kill -9; the fifth none.

    No task ever sees another number of GPUs than one, and who got none says so, in its log and in
    the client. Each is called by its name and its scheduler, not by the notebook that started it.
    """
    (plugin, _) = examples("Dask")
    done = script(machine, plugin + PLUGIN, JPY_SESSION_NAME="/home/alice/train.ipynb")
    first, holders, address, restarted, tasks, replaced, scaled, others, warned, logs = said(
        done.stdout
    )
    named = [f"Dask worker {number} of {address}" for number in range(GPUS)]
    assert holders == [[name, None, None] for name in named]
    assert first == restarted == ["0", "1", "2", "3"]
    assert tasks == replaced == [[one] for one in uuids()]
    assert scaled == ["", "0", "1", "2", "3"]
    assert others == [[]]
    (log,) = logs
    assert "got no GPU: Timed out after 10 s. No free GPU: 4 reserved." in log
    assert [one in log for one in warned] == [True]


REQUIRED = """
import subprocess, sys
shown = []
warnings.showwarning = lambda message, *_: shown.append(str(message))
tasks = []

def until_left(count):
    while sum(nanny.status.name == "closed" for nanny in local.workers.values()) != count:
        tasks.extend(client.gather(client.map(look, range(20), pure=False)))

def slow(_):
    found = visible()
    time.sleep(0.01)
    return found

with cluster(5) as local, Client(local) as client:
    early = client.map(slow, range(1000))
    client.gather(early[0])
    client.register_plugin(ReserveGPU(required=True, wait=1))
    say(client.gather(early))
    until_left(1)
    say(seen(client))
    rival = [sys.executable, "-m", "reserve_gpu", "run", "--wait", "--", "sleep", "600"]
    rival = subprocess.Popen(rival)
    while not reserve_gpu.status().waiting:
        time.sleep(0.1)
    os.kill(next(iter(run(client, os.getpid))), signal.SIGKILL)
    until_left(2)
    say(len(seen(client)))
    say(sorted({len(found) for _, found in tasks}))
    while len(shown) != 2:
        time.sleep(0.1)
    say(shown)
    rival.kill()
"""


@engines
def test_required(machine: Machine) -> None:
    """A worker that gets no GPU leaves with its nanny, whether it has joined, or comes back.

    It begins no task, and the clients are told why. The others stay.
    """
    early, first, left, seen, warned = said(script(machine, REQUIRED).stdout)
    assert set(early) - {""} == {None, "0", "1", "2", "3"}  # all, until the plugin came
    assert early.count("") <= 5 * 2  # what each thread of a worker was at just then
    assert first == ["0", "1", "2", "3"]
    assert left == 3
    assert seen == [1]
    refusal = "Timed out after 1 s. No free GPU: 4 reserved."
    text = f"got no GPU and leaves the cluster: {refusal}"
    assert [text in one for one in warned] == [True, True]


@engines
def test_required_on_the_command_line(machine: Machine) -> None:
    """`dask worker` goes on with the workers that got a GPU, and ends if none did."""
    preload = ("--preload", "reserve_gpu.dask", "--required", "--wait", "0.5s")
    code = """
client = Client({address!r})
client.wait_for_workers(4)
while seen(client) != list("0123"):
    time.sleep(0.1)
say(sorted({{tuple(found) for _, found in client.gather(client.map(look, range(50)))}}))
"""
    with scheduler(machine) as (address, _):
        argv = ("dask", "worker", address, "--no-dashboard")
        with program(machine, *argv, "--nworkers", "5", *preload) as worker:
            done = script(machine, code.format(address=address))
            assert said(done.stdout) == [[[one] for one in uuids()]]
            for more in ((), ("--no-nanny",)):
                late = machine.command(sys.executable, "-m", *argv, *more, *preload)
                assert late.returncode == 0
                assert "got no GPU and leaves the cluster: " in late.stderr
            assert worker.poll() is None


TIMED = """
terms = lambda: [str(value) for value in reserve_gpu.current().lease[2:4]]
until = lambda: round((reserve_gpu.current().lease.until - time.time()) / 60)
with cluster(2) as local, Client(local) as client:
    client.register_plugin(ReserveGPU(for_="4h", idle="1h", if_wanted=True))
    say(list(client.run(terms).values()))
    say(list(client.run(until).values()))
    client.restart()
    say(list(client.run(until).values()))
"""


@engines
def test_reservations_that_end(machine: Machine) -> None:
    """Each worker holds its GPU for as long as the plugin says, counted from its own start."""
    terms, minutes, again = said(script(machine, TIMED).stdout)
    assert terms == [["3600.0", "True"]] * 2
    assert minutes == again == [240, 240]


PARTS = """
with cluster(3) as local, Client(local) as client:
    client.register_plugin(ReserveGPU(memory="2GiB"))
    say(seen(client))
    say(sorted(client.run(lambda: os.environ["CUDA_DEVICE_MEMORY"]).values()))
"""


@engines
def test_parts(machine: Machine) -> None:
    """Workers that ask for parts share one GPU, as the fullest that has room is taken."""
    first, sizes = said(script(machine, PARTS).stdout)
    assert (first, sizes) == (["0", "0", "0"], ["2048"] * 3)


@contextmanager
def program(machine: Machine, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Make a program of Dask in a session of its own, which is killed at the end with all in it."""
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
def scheduler(machine: Machine, *options: str) -> Iterator[tuple[str, str]]:
    """Make a scheduler: its address, and what it had to say until it was there."""
    argv = ("dask", "scheduler", "--port", "0", "--host", "127.0.0.1", "--no-dashboard", *options)
    with program(machine, *argv) as process:
        assert process.stdout
        told = ""
        for line in process.stdout:
            told += line
            if "Registering Worker plugin" in line:  # Dask's own, at the end of the start
                break
        yield told.partition("Scheduler at:")[2].split()[0], told


HOSTS = """
def groups():
    found = [one for one in client.run(look, on_error="return").values() if isinstance(one, tuple)]
    return sorted(found, key=lambda one: one[1])

client = Client({address!r})
client.wait_for_workers(8)
first = groups()
say([found for _, found in first])
victims = [first[0][0], first[4][0]]
for victim in victims:
    os.kill(victim, signal.SIGKILL)
while len(now := groups()) != 8 or set(victims) & {{pid for pid, _ in now}}:
    time.sleep(0.1)
say([found for _, found in now])
client.close()
"""


@engines
def test_two_hosts(tmp_path: Path) -> None:
    """The page's `--preload` on two hosts of four GPUs: eight workers, eight GPUs, each its host's.

    Two that are killed with -9 come back with the same. The scheduler, told to preload it too,
    reserves nothing and says so.
    """
    one, other = (host(tmp_path / name, number) for number, name in enumerate(("one", "other")))
    (_, line) = examples("Dask")
    with ExitStack() as stack:
        preload = ("--preload", "reserve_gpu.dask")
        address, told = stack.enter_context(scheduler(one, *preload))
        for machine in (one, other):
            argv = line.replace("SCHEDULER", address).split()
            stack.enter_context(program(machine, *argv, "--no-dashboard", "--nthreads", "1"))
        done = script(one, HOSTS.format(address=address))
        first, again = said(done.stdout)
    assert first == again == [[uuid] for uuid in uuids(0) + uuids(1)]
    assert "it does nothing for a Scheduler" in told


@engines
@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--min-memory fast", "'fast' is not a valid size."),
        ("--frobnicate", "Unknown option --frobnicate. Choose from: "),
        ("-n two", "'two' is not a valid number of GPUs. Example: -n 2.\n"),
        ("--wait soon", "'soon' is not a valid duration."),
        ("--for ever", "'ever' is not a valid duration."),
    ],
)
def test_preload_refuses_bad_options_at_once(machine: Machine, argument: str, told: str) -> None:
    """`dask worker` ends with a usage error, before any worker starts and sees every GPU."""
    preload = ("worker", "tcp://127.0.0.1:1", "--preload", "reserve_gpu.dask")
    done = machine.command(sys.executable, "-m", "dask", *preload, *argument.split())
    assert done.returncode == 2
    assert f"Error: {told}" in done.stderr
    assert machine.calls() == []


TOO_LATE = """
with cluster(1) as local, Client(local) as client:
    client.run(cuda)
    try:
        client.register_plugin(ReserveGPU())
    except reserve_gpu.TooLateError as error:
        say(str(error))
    say(seen(client))
    client.restart()
    say(seen(client))
    local.scale(0)

with LocalCluster(n_workers=0, dashboard_address=None, preload="starts.py") as local:
    with Client(local) as client:
        client.register_plugin(ReserveGPU())
        local.scale(1)
        while not os.path.exists("started"):
            time.sleep(0.1)
        pid = int(open("started").read())
        while os.path.exists(f"/proc/{pid}/fd/0"):
            time.sleep(0.1)
        while client.scheduler_info()["workers"]:  # the scheduler hears of it a little later
            time.sleep(0.1)
        say(client.run(visible, on_error="ignore"))
"""
STARTS = """
import ctypes, os
def dask_setup(worker):
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    with open("draft", "w") as file:
        file.write(str(os.getpid()))
    os.rename("draft", "started")
"""


@engines
def test_too_late(machine: Machine) -> None:
    """Where CUDA has started, registering raises and restarting helps; a worker joining so ends."""
    (machine.folder / "starts.py").write_text(STARTS)
    done = script(machine, TOO_LATE)
    error, unchanged, restarted, joined = said(done.stdout)
    assert "Too late: CUDA has already started" in error
    assert error.endswith("To restart it, call client.restart().")
    assert unchanged == [None]
    assert restarted == ["0"]
    assert joined == {}
    assert "leaves the cluster: Too late: CUDA has already started" in done.stderr


THREADS = """
with cluster(3, processes=False) as local, Client(local) as client:
    client.register_plugin(ReserveGPU())
    say(seen(client))
    say([device.label for device in reserve_gpu.current().devices])
    client.register_plugin(ReserveGPU(name='none', wait=None))
    say(seen(client))
say(visible())
"""


@engines
def test_workers_that_are_threads(machine: Machine) -> None:
    """Workers in one process share its one reservation, which outlives them and a bad request."""
    one, labels, kept, after = said(script(machine, THREADS).stdout)
    assert one == kept == ["0", "0", "0"]
    assert labels == ["GPU0"]
    assert after == "0"


HOLDER = """
reserve_gpu.reserve()
with cluster(1) as local, Client(local) as client:
    client.register_plugin(ReserveGPU())
    say(seen(client))
    reserve_gpu.release()
    client.restart()
    say(seen(client))
"""


@engines
def test_cluster_of_a_process_that_holds_a_gpu(machine: Machine) -> None:
    """Workers whose parent holds what they may use get none and are told so; letting go helps."""
    done = script(machine, HOLDER)
    assert said(done.stdout) == [[""], ["0"]]
    assert "the process that started it has reserved all GPUs that it may use." in done.stderr


@engines
@pytest.mark.parametrize(
    ("setting", "value"),
    [("RESERVE_GPU_IDLE_MEMORY", "rubbish"), ("RESERVE_GPU_LOCK_DIR", "/proc/none")],
)
def test_any_error_leaves_no_gpu(machine: Machine, setting: str, value: str) -> None:
    """A worker sees no GPU also where reserving fails with an error that changes no variable."""
    code = """
with cluster(1) as local, Client(local) as client:
    client.register_plugin(ReserveGPU())
    say(seen(client))
"""
    done = script(machine, code, **{setting: value})
    assert said(done.stdout) == [[""]]
    assert "got no GPU: " in done.stderr
    assert value in done.stderr


@engines
def test_interrupting_a_wait(machine: Machine) -> None:
    """Ctrl-C ends a worker that waits for a GPU without a limit."""
    with scheduler(machine) as (address, _), machine.child() as holder:
        holder.reserve(f"count={GPUS}")
        options = ("--no-nanny", "--preload", "reserve_gpu.dask", "--wait")
        with program(machine, "dask", "worker", address, *options) as worker:
            deadline = time.monotonic() + LIMIT_S
            while holder.run("len(reserve_gpu.status().waiting)").value != 1:
                assert time.monotonic() < deadline
            worker.send_signal(signal.SIGINT)
            assert worker.wait(LIMIT_S) == 0


@engines
def test_request_is_checked_where_it_is_made(machine: Machine) -> None:
    """A plugin that makes no sense is refused in the notebook, before it reaches a worker."""
    code = """
for arguments in ({"count": 0}, {"devices": "x"}, {"wait": "soon"}, {"nonsense": 3}):
    try:
        ReserveGPU(**arguments)
    except (reserve_gpu.RequestError, TypeError) as error:
        say(str(error))
"""
    count, name, wait, unknown = said(script(machine, code).stdout)
    assert count == "The number of GPUs must be 1 or more, not 0."
    assert name.startswith("'x' is not a GPU name.")
    assert wait.startswith("'soon' is not a valid duration.")
    assert unknown == "ReserveGPU() got unexpected keyword arguments: nonsense."


@engines
def test_a_plugin_takes_what_reserve_takes(machine: Machine) -> None:
    """A plugin has the keywords of reserve(), but for the one that shows a wait."""
    code = """
import inspect
from reserve_gpu.dask import RequestKeywords
taken = {*inspect.signature(ReserveGPU).parameters, *RequestKeywords.__annotations__}
say(sorted(taken ^ {*inspect.signature(reserve_gpu.reserve).parameters}))
"""
    assert said(script(machine, code).stdout) == [["keywords", "progress", "required"]]
