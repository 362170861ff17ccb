"""Engines of ipyparallel, each with a GPU of its own: a real controller and real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines import examples, host, run, said, uuids

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Make a host with four idle GPUs."""
    return host(tmp_path)


def ipython(machine: Machine, code: str, **extra: str) -> tuple[str, list[Any]]:
    """Run lines in a fresh IPython: all that they show, and what they say."""
    (machine.folder / "lines.ipy").write_text(code)
    done = run(machine, "-m", "IPython", "--colors=NoColor", "lines.ipy", **extra)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    return shown, said(done.stdout)


PRELUDE = """
import glob, os, signal, time
from IPython import get_ipython
from ipyparallel.client.magics import ParallelMagics
from tests.support.engines import look, say, visible
ParallelMagics.stream_output = False  # output that is streamed is lost where it comes late
"""

MAGIC = """
v = rc[:]
say([found for _, found in sorted(v.apply_sync(look), key=lambda one: one[1])])

victim = v.apply_sync(os.getpid)[2]
os.kill(victim, signal.SIGKILL)
while len(rc.ids) != 3:
    time.sleep(0.1)
rc.cluster.start_engines_sync(n=2)
rc.wait_for_engines(5, timeout=100)
v = rc[:]
v.block = True
v.activate()
%px %load_ext reserve_gpu
result = get_ipython().run_cell("%px %reserve_gpu")
say(type(result.error_in_exec).__name__)
say(sorted(v.apply_sync(visible)))
say(sorted(found for _, found in v.apply_sync(look)))
rc.cluster.stop_cluster_sync()
"""


@pytest.mark.needs("engines")
def test_magic(machine: Machine) -> None:
    """The page's `%px %reserve_gpu` gives each engine its GPU, also one that replaces a killed one.

    The fifth has none, shows why, and fails the cell.
    """
    (magic, _) = examples("ipyparallel")
    shown, (first, error, visible, found) = ipython(machine, PRELUDE + magic + MAGIC)
    assert first == [[one] for one in uuids()]
    assert shown.count("Reserving GPU") == 8
    assert shown.count("No free GPU: 4 reserved.") == 1
    assert error != "NoneType"
    assert visible == ["", "0", "1", "2", "3"]
    assert found == [[], *first]


PROFILE = """
import ipyparallel as ipp
rc = ipp.Cluster(n=5, log_level=30).start_and_connect_sync(activate=True)
v = rc[:]
say(sorted(v.apply_sync(visible)))
import reserve_gpu
say([(h.notebook, h.record.who.command) for r in reserve_gpu.status().rows for h in r.holders])
say(rc.cluster.cluster_id)
logs = [open(path).read() for path in glob.glob(os.path.expanduser(
    "~/.ipython/profile_default/log/ipengine-*.log"))]
say(sorted(log.count("Reserving GPU") for log in logs))
say(sorted(log.count("Continuing without a GPU.") for log in logs))
get_ipython().run_cell("%px %reserve_gpu")
rc.cluster.stop_cluster_sync()
"""


@pytest.mark.needs("engines")
def test_profile(machine: Machine) -> None:
    """With the page's profile each engine has its GPU when it starts; the fifth none, and says so.

    Each is called by its number and its cluster, not by the notebook that has started it.
    """
    profile = machine.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    (_, config) = examples("ipyparallel")
    (profile / "ipengine_config.py").write_text(config)
    shown, (visible, holders, cluster, reserved, without) = ipython(
        machine, PRELUDE + PROFILE, JPY_SESSION_NAME="/home/alice/train.ipynb"
    )
    assert visible == ["", "0", "1", "2", "3"]
    assert {notebook for notebook, _ in holders} == {None}
    numbers = {name.partition(f" of cluster {cluster}")[0] for _, name in holders}
    assert len(numbers) == 4
    assert numbers < {f"engine {number}" for number in range(5)}
    assert reserved == [0, 1, 1, 1, 1]
    assert without == [0, 0, 0, 0, 1]
    assert "No free GPU: 4 reserved." in shown
