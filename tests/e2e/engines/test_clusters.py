"""ipyparallel, Ray and plain commands on several hosts, each behind a real SSH server."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.engines import LIMIT_S, examples, said, uuids
from tests.support.hosts import Hosts, free_port, needs_ssh

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

from tests.support.clusters import GPUS, ask, holders, until_free

pytestmark = [needs_ssh]


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what a process says until a line with that text."""
    assert process.stdout
    told = ""
    for line in process.stdout:
        told += line
        if text in line:
            return told
    pytest.fail(told)


@contextmanager
def over_ssh(hosts: Hosts, name: str, command: str) -> Iterator[subprocess.Popen[str]]:
    """Make a command at work on a host; what it says can be read."""
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
    """Make the two hosts of the page, with two idle GPUs each."""
    with Hosts(tmp_path, "lab1", "lab2", gpus=GPUS) as made:
        yield made


def test_a_command(hosts: Hosts) -> None:
    """The page's `ssh -t` runs a command on a GPU of that host, free when ssh is killed."""
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
from tests.support.engines import look, say
ParallelMagics.stream_output = False  # output that is streamed is lost where it comes late
"""
ENGINES = """
v = rc[:]
found = sorted(v.apply_sync(look), key=lambda one: one[1])
say([gpus for _, gpus in found])
os.kill(found[0][0], signal.SIGKILL)
while len(rc.ids) != 2:
    time.sleep(0.1)
say(os.popen("ssh lab1 reserve-gpu run -- printenv CUDA_VISIBLE_DEVICES").read().split()[-1])
rc.cluster.stop_cluster_sync()
"""


@pytest.mark.needs("engines")
def test_ipyparallel(hosts: Hosts) -> None:
    """Each engine that the page starts has a GPU of its host; that of a killed one is free."""
    (code,) = examples("ipyparallel on several hosts")
    (hosts.asking.folder / "lines.ipy").write_text(IPYPARALLEL + code + ENGINES)
    found, free = ask(hosts, "-m", "IPython", "--colors=NoColor", "lines.ipy")
    assert found == [[uuid] for uuid in (*uuids(0, GPUS), *uuids(1, 1))]
    assert free == "0"
    for name in hosts.machines:
        until_free(hosts, name)


# A raylet aborts if its agents don't tell it their ports in time, as on busy cores. It does not ask
# for ports that are given.
AGENTS = (
    *("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port"),
    *("--runtime-env-agent-port", "--metrics-export-port"),
)
RAY = """
import ray
from tests.support.engines import look, say
ray.init(address={address!r}, log_to_driver=False)
Looker = ray.remote(num_gpus=1)(type("Looker", (), {{"look": lambda self: look()}}))
lookers = [Looker.remote() for _ in range(4)]
say(sorted(found for _, found in ray.get([one.look.remote() for one in lookers])))
"""


@pytest.mark.needs("engines")
def test_ray(tmp_path: Path) -> None:
    """Each node that the page starts has the GPUs of its host that nobody else has.

    They are free when the node's raylet is killed.
    """
    head, node = examples("Ray on several hosts")
    settings = "PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 RAY_raylet_start_wait_time_s=300"
    size = "--num-cpus 2 --object-store-memory 80000000"
    folder = tempfile.mkdtemp(prefix="ray")  # a short name, as sockets need
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        hosts = stack.enter_context(Hosts(tmp_path, "lab1", "lab2", gpus=3))
        for machine in hosts.machines.values():
            assert stack.enter_context(machine.child()).reserve("1").value == "1"

        def start(name: str, line: str) -> tuple[subprocess.Popen[str], str]:
            host = hosts.addresses[name]
            ports = " ".join(f"{option} {free_port(host)}" for option in AGENTS)
            command = f"{settings} {line} --node-ip-address {host} {ports} {size}"
            process = stack.enter_context(over_ssh(hosts, name, command))
            return process, read_until(process, "--block")

        more = f"--port 0 --include-dashboard=false --temp-dir {folder}"
        _, told = start("lab1", f"{head.strip()} {more}")
        address = told.partition("--address='")[2].partition("'")[0]
        process, _ = start("lab2", node.strip().replace("HEAD:6379", address))
        (hosts.machines["lab1"].home / "look.py").write_text(RAY.format(address=address))
        with over_ssh(hosts, "lab1", "python look.py") as script:
            (found,) = said(script.communicate(timeout=LIMIT_S)[0])
        idle = [uuid for number in range(2) for uuid in uuids(number, 3)[::2]]
        assert found == [[uuid] for uuid in idle]  # not GPU 1, which somebody else has
        raylet = next(one for one in hosts.processes("lab2") if one.name() == "raylet")
        raylet.kill()
        process.wait(LIMIT_S)
        assert len(holders(hosts, "lab2")) == 1
