"""Dask on several hosts, each behind a real SSH server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.clusters import GPUS, ask, until_free
from tests.support.engines import examples, uuids
from tests.support.hosts import Hosts, needs_ssh

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs_ssh]

DASK = """
import os, signal, subprocess, time
from tests.support.engines import look, say, visible

def groups():
    found = [one for one in client.run(look, on_error="return").values() if isinstance(one, tuple)]
    return sorted(found, key=lambda one: one[1])

worker = subprocess.Popen({line!r}.replace("SCHEDULER", cluster.scheduler_address).split())
client.wait_for_workers(6)
while set(client.run(visible).values()) != {{"0", "1"}}:
    time.sleep(0.1)
first = groups()
say([found for _, found in first])
victims = {{first[0][0], first[2][0]}}
for victim in victims:
    os.kill(victim, signal.SIGKILL)
while len(now := groups()) != 6 or victims & {{pid for pid, _ in now}}:
    time.sleep(0.1)
say([found for _, found in now])
client.shutdown()
worker.wait()
"""


@pytest.mark.needs("engines")
def test_dask(tmp_path: Path) -> None:
    """The page's SSHCluster, and `dask worker` by ssh, give each worker a GPU of its host.

    Two workers that are killed come back with theirs. When the cluster is shut down all are free.
    """
    cluster, line = examples("Dask on several hosts")
    with Hosts(tmp_path, "lab1", "lab2", "lab3", gpus=GPUS) as hosts:
        found, again = ask(hosts, "-c", cluster + DASK.format(line=line))
        assert found == again == [[uuid] for number in range(3) for uuid in uuids(number, GPUS)]
        for name in hosts.machines:
            until_free(hosts, name)
