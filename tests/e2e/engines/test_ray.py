"""Ray workers that use the notebook's GPUs, or lock the GPUs that Ray gave them."""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines import examples, host, reported, run_python, uuids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a host with four idle GPUs."""
    return host(tmp_path)


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Return the variables of a small Ray, with a short folder because of its sockets."""
    folder = tempfile.mkdtemp(prefix="ray")
    yield {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
        "RAY_raylet_start_wait_time_s": "300",  # busy cores start it slowly
    }
    shutil.rmtree(folder, ignore_errors=True)


def run_ipython(machine: Machine, code: str, environ: dict[str, str]) -> list[Any]:
    """Run code in a new IPython with the extension, and return its reports."""
    (machine.folder / "lines.ipy").write_text(code)
    options = ("--colors=NoColor", "--ext=reserve_gpu")
    done = run_python(machine, "-m", "IPython", *options, "lines.ipy", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return reported(done.stdout)


PRELUDE = """
import os, signal
from tests.support.engines import pid_and_gpus, report, visible

def refused():
    import reserve_gpu
    try:
        reserve_gpu.reserve()
    except reserve_gpu.NoFreeDeviceError as error:
        return str(error), visible()
"""

LIMITED = """
report(ray.cluster_resources()["GPU"])
Looker = ray.remote(num_gpus=1)(type("Looker", (), {"pid_and_gpus": lambda self: pid_and_gpus()}))
lookers = [Looker.remote() for _ in range(2)]
report(sorted(found for _, found in ray.get([one.pid_and_gpus.remote() for one in lookers])))
report(ray.get(ray.remote(num_cpus=0)(visible).remote()))
del lookers
report(ray.get(ray.remote(num_gpus=1)(refused).remote()))
report(os.getpid())
ray.shutdown()
"""


@pytest.mark.needs("engines")
def test_reserved_before_init(machine: Machine, environ: dict[str, str]) -> None:
    """The page's notebook limits Ray to its two GPUs, and a reservation in a worker is refused."""
    (notebook, _, _) = examples("Ray")
    code = PRELUDE + notebook + LIMITED
    count, found, none, (error, left), pid = run_ipython(machine, code, environ)
    assert count == 2
    assert found == [[one] for one in uuids()[:2]]
    assert none == ""
    assert f"(pid {pid})" in error
    assert left in ("0", "1")


ACTORS = """
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80_000_000)
Restarting = Trainer.options(max_restarts=-1, max_task_retries=-1)
actors = [Restarting.remote() for _ in range(4)]
def gpus():
    return ray.get([one.gpu.remote() for one in actors])
def pids():
    return ray.get([one.__ray_call__.remote(lambda self: os.getpid()) for one in actors])
first, old = gpus(), pids()
report(sorted(first))
report(sorted(ray.get([one.__ray_call__.remote(lambda self: pid_and_gpus()[1]) for one in actors])))
holders = [row.holders[0].pid for row in reserve_gpu.status().rows]
report(holders == [pid for _, pid in sorted(zip(first, old))])
report([row.holders[0].name for row in reserve_gpu.status().rows])
os.kill(old[1], signal.SIGKILL)
report(gpus() == first)
report([one == other for one, other in zip(old, pids())])
ray.shutdown()
"""


@pytest.mark.needs("engines")
def test_reserve_in_workers(machine: Machine, environ: dict[str, str]) -> None:
    """The page's actors lock the GPUs that Ray gave them, even after kill -9."""
    (_, actor, _) = examples("Ray")
    code = PRELUDE + actor + ACTORS
    first, found, holders, names, again, same = run_ipython(machine, code, environ)
    assert first == ["0", "1", "2", "3"]
    assert found == [[one] for one in uuids()]
    assert holders is True
    assert names == ["ray::Trainer.__init__"] * 4  # not `python default_worker.py`
    assert again is True
    assert same == [True, False, True, True]


HALVES = """
ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=80_000_000)
halves = [Half.remote() for _ in range(2)]
report(ray.get([one.gpu.remote() for one in halves]))
report([len(row.holders) for row in reserve_gpu.status().rows])
ray.shutdown()
"""


@pytest.mark.needs("engines")
def test_half_a_gpu(machine: Machine, environ: dict[str, str]) -> None:
    """The page's two actors with half a GPU each share one GPU."""
    (_, _, half) = examples("Ray")
    gpus, holders = run_ipython(machine, PRELUDE + half + HALVES, environ)
    assert gpus == ["0", "0"]
    assert holders == [2, 0, 0, 0]
