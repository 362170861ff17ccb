"""ipyparallel engines that each reserve a GPU: a real controller and real engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines import examples, host, reported, run_python, uuids

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a host with four idle GPUs."""
    return host(tmp_path)


def run_ipython(machine: Machine, code: str, **extra: str) -> tuple[str, list[Any]]:
    """Run code in a new IPython; return its output and its reports."""
    (machine.folder / "lines.ipy").write_text(code)
    done = run_python(machine, "-m", "IPython", "--colors=NoColor", "lines.ipy", **extra)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    return shown, reported(done.stdout)


PRELUDE = """
import glob, os, signal, time
from IPython import get_ipython
from ipyparallel.client.magics import ParallelMagics
from tests.support.engines import pid_and_gpus, report, visible
ParallelMagics.stream_output = False  # late streamed output is lost
"""

MAGIC = """
v = rc[:]
report([found for _, found in sorted(v.apply_sync(pid_and_gpus), key=lambda one: one[1])])

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
report(type(result.error_in_exec).__name__)
report(sorted(v.apply_sync(visible)))
report(sorted(found for _, found in v.apply_sync(pid_and_gpus)))
rc.cluster.stop_cluster_sync()
"""


@pytest.mark.needs("engines")
def test_magic(machine: Machine) -> None:
    """The page's `%px %reserve_gpu` gives each engine a GPU, and fails if one gets none."""
    (magic, _) = examples("ipyparallel")
    shown, (first, error, visible, found) = run_ipython(machine, PRELUDE + magic + MAGIC)
    assert first == [[one] for one in uuids()]
    assert shown.count("Reserving GPU") == 8
    assert shown.count("No free GPU") >= 1
    assert error != "NoneType"
    assert visible == ["", "0", "1", "2", "3"]
    assert found == [[], *first]


PROFILE = """
import ipyparallel as ipp
rc = ipp.Cluster(n=5, log_level=30).start_and_connect_sync(activate=True)
v = rc[:]
report(sorted(v.apply_sync(visible)))
import reserve_gpu
report([(h.notebook, h.record.who.command) for r in reserve_gpu.status().rows for h in r.holders])
report(rc.cluster.cluster_id)
logs = [open(path).read() for path in glob.glob(os.path.expanduser(
    "~/.ipython/profile_default/log/ipengine-*.log"))]
report(sorted(log.count("Reserving GPU") for log in logs))
report(sorted(log.count("Continuing without a GPU.") for log in logs))
get_ipython().run_cell("%px %reserve_gpu")
rc.cluster.stop_cluster_sync()
"""


@pytest.mark.needs("engines")
def test_profile(machine: Machine) -> None:
    """With the page's profile, each engine has a GPU from its start, and its name in the status."""
    profile = machine.home / ".ipython" / "profile_default"
    profile.mkdir(parents=True)
    (_, config) = examples("ipyparallel")
    (profile / "ipengine_config.py").write_text(config)
    shown, (visible, holders, cluster, reserved, without) = run_ipython(
        machine, PRELUDE + PROFILE, JPY_SESSION_NAME="/home/alice/train.ipynb"
    )
    assert visible == ["", "0", "1", "2", "3"]
    assert {notebook for notebook, _ in holders} == {None}
    numbers = {name.partition(f" of cluster {cluster}")[0] for _, name in holders}
    assert len(numbers) == 4
    assert numbers < {f"engine {number}" for number in range(5)}
    assert reserved == [0, 1, 1, 1, 1]
    assert without == [0, 0, 0, 0, 1]
    assert "No free GPU" in shown
