"""Ray hands out the GPUs that the notebook reserved; a worker can lock what Ray gave it."""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.engines import examples, host, run, said, uuids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Make a host with four idle GPUs."""
    return host(tmp_path)


@pytest.fixture
def environ() -> Iterator[dict[str, str]]:
    """Make a small and quiet Ray; its folder has a short name, as sockets need."""
    folder = tempfile.mkdtemp(prefix="ray")
    yield {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
        "RAY_raylet_start_wait_time_s": "300",  # on busy cores it takes long
    }
    shutil.rmtree(folder, ignore_errors=True)


def ipython(machine: Machine, code: str, environ: dict[str, str]) -> list[Any]:
    """Run lines in a fresh IPython with the extension; what they say."""
    (machine.folder / "lines.ipy").write_text(code)
    options = ("--colors=NoColor", "--ext=reserve_gpu")
    done = run(machine, "-m", "IPython", *options, "lines.ipy", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return said(done.stdout)


PRELUDE = """
import os, signal
from tests.support.engines import look, say, visible

def refused():
    import reserve_gpu
    try:
        reserve_gpu.reserve()
    except reserve_gpu.NoFreeDeviceError as error:
        return str(error), visible()
"""

LIMITED = """
say(ray.cluster_resources()["GPU"])
Looker = ray.remote(num_gpus=1)(type("Looker", (), {"look": lambda self: look()}))
lookers = [Looker.remote() for _ in range(2)]
say(sorted(found for _, found in ray.get([one.look.remote() for one in lookers])))
say(ray.get(ray.remote(num_cpus=0)(visible).remote()))
del lookers
say(ray.get(ray.remote(num_gpus=1)(refused).remote()))
say(os.getpid())
ray.shutdown()
"""


@pytest.mark.needs("engines")
def test_reserved_before_init(machine: Machine, environ: dict[str, str]) -> None:
    """The page's notebook limits Ray to its two GPUs; a worker that reserves too keeps its one."""
    (notebook, _, _) = examples("Ray")
    code = PRELUDE + notebook + LIMITED
    count, found, none, (error, left), pid = ipython(machine, code, environ)
    assert count == 2
    assert found == [[one] for one in uuids()[:2]]
    assert none == ""
    assert f"(pid {pid})" in error
    assert "The process that started this one has already reserved GPU" in error
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
say(sorted(first))
say(sorted(ray.get([one.__ray_call__.remote(lambda self: look()[1]) for one in actors])))
holders = [row.holders[0].pid for row in reserve_gpu.status().rows]
say(holders == [pid for _, pid in sorted(zip(first, old))])
say([row.holders[0].name for row in reserve_gpu.status().rows])
os.kill(old[1], signal.SIGKILL)
say(gpus() == first)
say([one == other for one, other in zip(old, pids())])
ray.shutdown()
"""


@pytest.mark.needs("engines")
def test_reserve_in_workers(machine: Machine, environ: dict[str, str]) -> None:
    """The page's actors lock the GPU that Ray gave each, also one that was killed and replaced."""
    (_, actor, _) = examples("Ray")
    code = PRELUDE + actor + ACTORS
    first, found, holders, names, again, same = ipython(machine, code, environ)
    assert first == ["0", "1", "2", "3"]
    assert found == [[one] for one in uuids()]
    assert holders is True
    assert names == ["ray::Trainer.__init__"] * 4  # and no `python default_worker.py`
    assert again is True
    assert same == [True, False, True, True]


HALVES = """
ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, object_store_memory=80_000_000)
halves = [Half.remote() for _ in range(2)]
say(ray.get([one.gpu.remote() for one in halves]))
say([len(row.holders) for row in reserve_gpu.status().rows])
ray.shutdown()
"""


@pytest.mark.needs("engines")
def test_a_fraction_of_a_gpu(machine: Machine, environ: dict[str, str]) -> None:
    """The page's actors of half a GPU each are two on one GPU, and share it."""
    (_, _, half) = examples("Ray")
    gpus, holders = ipython(machine, PRELUDE + half + HALVES, environ)
    assert gpus == ["0", "0"]
    assert holders == [2, 0, 0, 0]
