"""ipyparallel, Ray, Dask and plain commands on several hosts, each with a real SSH server."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines import LIMIT_S, examples, reported, uuids
from tests.support.hosts import Hosts, free_port, needs_ssh

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [needs_ssh, pytest.mark.needs("engines")]

GPUS = 2  # of each host


def run_on_client(hosts: Hosts, *argv: str) -> list[Any]:
    """Run Python on the machine of the user, and return its reports."""
    done = subprocess.run(
        [sys.executable, *argv], env=hosts.environ(), cwd=hosts.asking.folder, text=True,
        capture_output=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return reported(done.stdout)


def holders(hosts: Hosts, name: str) -> list[int]:
    """Return the pids of the holders of a host's GPUs."""
    status = json.loads(hosts.run(name, "reserve-gpu status --format json").stdout)
    return [holder["pid"] for row in status["devices"] for holder in row["holders"]]


def until_free(hosts: Hosts, name: str) -> None:
    """Wait until a host has no holders."""
    deadline = time.monotonic() + LIMIT_S
    while found := holders(hosts, name):
        assert time.monotonic() < deadline, found


def read_until_line(process: subprocess.Popen[str], text: str) -> str:
    """Return the output of a process up to a line with this text."""
    assert process.stdout
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    pytest.fail(output)


@contextmanager
def run_over_ssh(hosts: Hosts, name: str, command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command on a host, and kill it at the end."""
    process = subprocess.Popen(
        ["ssh", name, command], env=hosts.environ(), text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        assert process.stdout
        process.stdout.close()


TRAIN = """
import os, time
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Start the two hosts of the page, with two idle GPUs each."""
    with Hosts(tmp_path, "lab1", "lab2", gpus=GPUS) as made:
        yield made


def test_ssh_line_of_the_page(hosts: Hosts) -> None:
    """The `ssh -t` line of the page reserves a GPU of the host until ssh is killed."""
    (line, *_) = examples("A command on another machine")
    (hosts.machines["lab1"].home / "train.py").write_text(TRAIN)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal, os.fdopen(theirs) as stdin:
        ssh = subprocess.Popen(
            line.split(), env=hosts.environ(), stdin=stdin, stdout=stdin, start_new_session=True
        )
        seen = b""
        while b"'0'\r\n0\r\n" not in seen:
            seen += terminal.read(1000)
        assert len(holders(hosts, "lab1")) == 1
        ssh.kill()
        ssh.wait(LIMIT_S)
        until_free(hosts, "lab1")


IPYPARALLEL = """
import os, signal, time
from ipyparallel.client.magics import ParallelMagics
from tests.support.engines import pid_and_gpus, report
ParallelMagics.stream_output = False  # late streamed output is lost
"""
ENGINES = """
v = rc[:]
found = sorted(v.apply_sync(pid_and_gpus), key=lambda one: one[1])
report([gpus for _, gpus in found])
os.kill(found[0][0], signal.SIGKILL)
while len(rc.ids) != 2:
    time.sleep(0.1)
report(os.popen("ssh lab1 reserve-gpu run -- printenv CUDA_VISIBLE_DEVICES").read().split()[-1])
rc.cluster.stop_cluster_sync()
"""


def test_ipyparallel(hosts: Hosts) -> None:
    """Each engine of the page gets a GPU of its host, and a killed engine frees its GPU."""
    (code,) = examples("ipyparallel on several hosts")
    (hosts.asking.folder / "lines.ipy").write_text(IPYPARALLEL + code + ENGINES)
    found, free = run_on_client(hosts, "-m", "IPython", "--colors=NoColor", "lines.ipy")
    assert found == [[uuid] for uuid in (*uuids(0, GPUS), *uuids(1, 1))]
    assert free == "0"
    for name in hosts.machines:
        until_free(hosts, name)


# A raylet aborts if its agents report their ports too late, unless the ports are given.
AGENTS = (
    *("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port"),
    *("--runtime-env-agent-port", "--metrics-export-port"),
)
RAY = """
import ray
from tests.support.engines import pid_and_gpus, report
ray.init(address={address!r}, log_to_driver=False)
Looker = ray.remote(num_gpus=1)(type("Looker", (), {{"pid_and_gpus": lambda self: pid_and_gpus()}}))
lookers = [Looker.remote() for _ in range(4)]
report(sorted(found for _, found in ray.get([one.pid_and_gpus.remote() for one in lookers])))
"""


def test_ray(tmp_path: Path) -> None:
    """Each node of the page gets the free GPUs of its host, until its raylet is killed."""
    head, node = examples("Ray on several hosts")
    settings = "PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 RAY_raylet_start_wait_time_s=300"
    size = "--num-cpus 2 --object-store-memory 80000000"
    folder = tempfile.mkdtemp(prefix="ray")  # short, because of the limit for paths of sockets
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        hosts = stack.enter_context(Hosts(tmp_path, "lab1", "lab2", gpus=3))
        for machine in hosts.machines.values():
            assert stack.enter_context(machine.child()).reserve("1").value == "1"

        def start(name: str, line: str) -> tuple[subprocess.Popen[str], str]:
            host = hosts.addresses[name]
            ports = " ".join(f"{option} {free_port(host)}" for option in AGENTS)
            command = f"{settings} {line} --node-ip-address {host} {ports} {size}"
            process = stack.enter_context(run_over_ssh(hosts, name, command))
            return process, read_until_line(process, "--block")

        more = f"--port 0 --include-dashboard=false --temp-dir {folder}"
        _, told = start("lab1", f"{head.strip()} {more}")
        address = told.partition("--address='")[2].partition("'")[0]
        process, _ = start("lab2", node.strip().replace("HEAD:6379", address))
        (hosts.machines["lab1"].home / "pid_and_gpus.py").write_text(RAY.format(address=address))
        with run_over_ssh(hosts, "lab1", "python pid_and_gpus.py") as script:
            (found,) = reported(script.communicate(timeout=LIMIT_S)[0])
        idle = [uuid for number in range(2) for uuid in uuids(number, 3)[::2]]
        assert found == [[uuid] for uuid in idle]  # not GPU 1, which another process holds
        raylet = next(one for one in hosts.processes("lab2") if one.name() == "raylet")
        raylet.kill()
        process.wait(LIMIT_S)
        assert len(holders(hosts, "lab2")) == 1


DASK = """
import os, signal, subprocess, time
from tests.support.engines import pid_and_gpus, report, visible

def groups():
    found = client.run(pid_and_gpus, on_error="return").values()
    found = [one for one in found if isinstance(one, tuple)]
    return sorted(found, key=lambda one: one[1])

worker = subprocess.Popen({line!r}.replace("SCHEDULER", cluster.scheduler_address).split())
client.wait_for_workers(6)
while set(client.run(visible).values()) != {{"0", "1"}}:
    time.sleep(0.1)
first = groups()
report([found for _, found in first])
victims = {{first[0][0], first[2][0]}}
for victim in victims:
    os.kill(victim, signal.SIGKILL)
while len(now := groups()) != 6 or victims & {{pid for pid, _ in now}}:
    time.sleep(0.1)
report([found for _, found in now])
client.shutdown()
worker.wait()
"""


def test_dask(tmp_path: Path) -> None:
    """The cluster of the page gives each worker a GPU of its host, even after kill -9."""
    cluster, line = examples("Dask on several hosts")
    with Hosts(tmp_path, "lab1", "lab2", "lab3", gpus=GPUS) as hosts:
        found, again = run_on_client(hosts, "-c", cluster + DASK.format(line=line))
        assert found == again == [[uuid] for number in range(3) for uuid in uuids(number, GPUS)]
        for name in hosts.machines:
            until_free(hosts, name)
