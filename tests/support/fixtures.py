"""Fixtures that tests of several layers share."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.system.procfs import sees_all_locks
from tests.support.commandline import CommandLine
from tests.support.histories import Histories
from tests.support.hosts import Hosts
from tests.support.hosts_cases import OLDER
from tests.support.machine import ROOT, Machine
from tests.support.profiles import Home
from tests.support.queues import Queue
from tests.support.users import for_users
from tests.support.versions import Version, unpack_earlier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here


@pytest.fixture
def tmux(tmp_path: Path) -> str:
    """Return the path of a `tmux` whose server runs."""
    path = tmp_path / "tmux"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def logged(here: Here) -> Here:
    """Put the test process on a machine with a history."""
    folder = here.home / ".config"
    folder.mkdir(exist_ok=True)
    (folder / "reserve_gpu.toml").write_text("history = true\n")
    return here


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Make two usable hosts, one without the package, one with an old format, one that hangs."""
    folder = tmp_path_factory.mktemp("hosts")
    old = folder / "old"
    old.mkdir()
    (old / "reserve-gpu").write_text(OLDER)
    (old / "reserve-gpu").chmod(0o755)
    paths = {"lab4": "/usr/bin:/bin", "lab5": f"{old}:/usr/bin:/bin"}
    with Hosts(folder, "lab1", "lab2", "lab3", "lab4", "lab5", paths=paths) as lab:
        lab.machines["lab2"].use("two")
        lab.freeze("lab3")
        yield lab


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `reserve-gpu` on the machine of this process."""
    return CommandLine(capsys)


@pytest.fixture
def busy(machine: Machine) -> Machine:
    """Make a machine on which NVML lists the processes that use CUDA."""
    (machine.folder / "contexts").mkdir()
    machine.write(f"contexts {machine.folder / 'contexts'}\n{machine.scenario.read_text()}")
    return machine


@pytest.fixture
def script(here: Here) -> str:
    """Return the path of a `reserve-gpu` program like the one that pip installs."""
    folder = here.folder / "bin"
    folder.mkdir()
    path = folder / "reserve-gpu"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom reserve_gpu.__main__ import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes only these packages importable."""

    def install(*names: str) -> None:
        folder = tmp_path / "packages"
        folder.mkdir()
        for name in names:
            (folder / name).mkdir()
        monkeypatch.setattr(sys, "path", [str(folder)])

    monkeypatch.delenv("RESERVE_GPU_CONTEXT_MEMORY", raising=False)
    return install


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    """Make an empty queue."""
    with ExitStack() as stack:
        yield Queue(tmp_path / "locks", stack)


@pytest.fixture
def told() -> None:
    """Skip the test in a container, whose /proc/locks does not show all locks."""
    if not sees_all_locks():
        pytest.skip("in a container, /proc/locks does not show all locks")


@pytest.fixture
def kept(here: Here, monkeypatch: pytest.MonkeyPatch) -> Histories:
    """Make an empty directory for the histories of all users."""
    made = Histories(here.folder / "history")
    monkeypatch.setenv("RESERVE_GPU_HISTORY", str(made.folder))
    return made


@pytest.fixture
def srun(here: Here) -> str:
    """Put a stand-in for srun first in PATH, and return its path."""
    path = here.folder / "slurm" / "srun"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    os.environ["PATH"] = f"{path.parent}{os.pathsep}{os.environ['PATH']}"
    return str(path)


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the package of the earlier version."""
    folder = tmp_path_factory.mktemp("earlier")
    if why := unpack_earlier(folder):
        pytest.skip(f"needs the earlier version from the history of this repository: {why}")
    return folder


@pytest.fixture(params=["earlier", "today"])
def first(request: pytest.FixtureRequest, here: Here, earlier: Path) -> Version:
    """Return each of the two versions in turn."""
    return Version(here, earlier if request.param == "earlier" else ROOT)


@pytest.fixture
def second(first: Version, here: Here, earlier: Path) -> Version:
    """Return the other version than `first`."""
    return Version(here, ROOT if first.folder == earlier else earlier)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return an empty home directory."""
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def users() -> Iterator[Machine]:
    """Return a simulated machine on which several Unix users can run processes."""
    with for_users() as machine:
        yield machine
