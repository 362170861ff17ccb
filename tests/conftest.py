"""Options, layers and fixtures of all tests."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import driver
from tests.support.here import Here, Two
from tests.support.locked import held
from tests.support.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator

# Extra: the modules that it installs.
EXTRAS = {
    "browser": ("jupyterlab", "nbconvert", "notebook", "playwright"),
    "compiler": ("ziglang",),
    "completion": ("argcomplete",),
    "recipes": ("joblib",),
    "hosts": ("sshpyk",),
    "lab": ("jupyterlab_reserve_gpu",),
    "engines": ("asyncssh", "distributed", "ipyparallel", "jupyterhub", "ray"),
    "frameworks": ("jax", "numba", "torch"),
    "build": ("build", "twine"),
    "benchmarks": ("gpustat", "nvitop"),
    "lint": ("importlinter", "mypy"),
}


TESTS = Path(__file__).parent
LAYER_MARKERS = {"process": "process", "e2e": "full", "driver": "full"}

pytest_plugins = ("tests.support.fixtures", "tests.support.hardware.plugin")

BY_DEFAULT = "not full and (promise or not process)"  # as pyproject.toml says
if find_spec("hypothesis"):  # the tests on a real GPU run without it
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "reserve_gpu",
        deadline=None,  # an example may be slow on a loaded machine
        derandomize=True,
        max_examples=150,
        # All examples of a test use one machine, and leave it as it was.
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("reserve_gpu")
HOME = pytest.StashKey[Path]()
# Variables for folders of programs: paths below the home of the session.
FOLDERS = {
    "HOME": "",
    "IPYTHONDIR": ".ipython",
    "JUPYTER_CONFIG_DIR": ".jupyter",
    "JUPYTER_DATA_DIR": ".local/share/jupyter",
    "JUPYTER_RUNTIME_DIR": ".local/share/jupyter/runtime",
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
}


def pytest_configure(config: pytest.Config) -> None:
    """Choose the layers, create a home, and restore the default actions of signals.

    SIGHUP is ignored under nohup, and SIGINT in a background job of a script.
    """
    if not hasattr(config, "workerinput"):  # not a worker of pytest-xdist
        config.stash[HOME] = move_into_a_home()
        if config.option.markexpr != "gpu" or config.getoption("--gpu-stand-in"):
            driver.build()  # once, not by each worker
    else:
        import_share(config.workerinput)
    config.option.markexpr = layers(config.option.markexpr, config.args)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def import_share(worker: dict[str, Any]) -> None:
    """Import every n-th test module in one of n workers, before each worker imports all of them.

    In a fresh clone, pytest rewrites the assertions of each module, which is slow, and caches the
    result for the other workers. A module that can't be imported fails again during collection.
    """
    files = sorted(TESTS.rglob("test_*.py"))
    first = int(worker["workerid"].removeprefix("gw"))
    for path in files[first :: worker["workercount"]]:
        with suppress(Exception, pytest.skip.Exception), warnings.catch_warnings():
            warnings.simplefilter("error")
            import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def move_into_a_home() -> Path:
    """Return an empty home directory, which this process and its children use from now on."""
    home = Path(tempfile.mkdtemp(prefix="reserve_gpu-home-"))
    home.chmod(0o755)  # some tests run as other users
    os.environ.update({name: str(home / folder) for name, folder in FOLDERS.items()})
    # As in an activated environment, so that hints contain `reserve-gpu` without its path.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    os.environ["SHELL"] = "/bin/sh"
    os.environ.pop("XDG_RUNTIME_DIR", None)
    return home


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the home of the session."""
    if home := config.stash.get(HOME, None):
        shutil.rmtree(home, ignore_errors=True)


def layers(expression: str, arguments: list[str]) -> str:
    """Return an expression of markers that excludes `full`, unless the user mentioned it.

    A named file also runs its `process` tests. A single test runs regardless of its markers.

    Args:
        expression: The option -m: pyproject.toml's expression by default, empty for all tests.
        arguments: The paths and tests on the command line.
    """
    if expression == BY_DEFAULT and are_named(arguments):
        return ""
    if expression == BY_DEFAULT and all(".py" in argument for argument in arguments):
        return "not full"
    return expression if "full" in expression or not expression else f"({expression}) and not full"


def are_named(arguments: list[str]) -> bool:
    """Return whether all arguments are single tests, such as `FILE::test_x`."""
    return all("::" in argument for argument in arguments)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use two workers more than cores, because many tests wait; for one file, only this process."""
    is_file = len(config.args) == 1 and config.args[0].endswith(".py")
    return 0 if is_file or are_named(config.args) else len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the markers of layers, and groups of tests that must not run at the same time.

    Tests of one real GPU share it. Tests that start many processes time out next to each other:
    Ray waits 30 s for its node. They take longest, so they run first.
    """
    crowd = []
    for item in items:
        mark_layer(item)
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))
        needed = {mark.args[0] for mark in item.iter_markers("needs")}
        if needed & {"browser", "engines", "hosts", "lab"}:
            item.add_marker(pytest.mark.xdist_group("crowd"))
            crowd.append(item)
    items[:] = [*crowd, *(item for item in items if item not in crowd)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import tests that are all marked `full`, if `full` tests are excluded."""
    is_full = LAYER_MARKERS.get(collection_path.name) == "full"
    return True if is_full and "not full" in config.option.markexpr else None


def mark_layer(item: pytest.Item) -> None:
    """Add the marker of the layer that the test's folder belongs to."""
    layer = item.path.relative_to(TESTS).parts[0]
    if layer in LAYER_MARKERS:
        item.add_marker(LAYER_MARKERS[layer])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose extra is not installed, or fail it with --require-extras."""
    for marker in item.iter_markers("needs"):
        (name,) = marker.args
        if not all(map(find_spec, EXTRAS[name])):
            react = pytest.fail if item.config.getoption("--require-extras") else pytest.skip
            react(f"needs the extra `{name}`")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add our option, and accept pyproject.toml's options if their plugins are not installed."""
    parser.addoption(
        "--require-extras", action="store_true", help="fail, not skip, tests whose extra is missing"
    )
    if not pluginmanager.hasplugin("xdist"):
        for option in ("--numprocesses", "--dist"):
            parser.addoption(option, help="ignored without pytest-xdist")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "ignored without pytest-timeout")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a simulated machine with two idle GPUs, for child processes."""
    return Machine(tmp_path)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    """Put the test process on a simulated machine with two idle GPUs."""
    with Here(tmp_path) as machine:
        yield machine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """Start two kernels for all tests of a file, which share an xdist_group."""
    machine = Here(tmp_path_factory.mktemp("two"))
    name = {"JPY_SESSION_NAME": "/home/alice/train.ipynb"}
    with machine.kernel(**name) as first, machine.kernel() as second:
        yield Two(machine, first, second)


@pytest.fixture
def two(pair: Two) -> Two:
    """Return two kernels without a reservation, on a machine with idle GPUs."""
    pair.machine.use("two")
    for kernel in (pair.first, pair.second):
        assert kernel.run("%reserve_gpu --release").error is None
    assert held(pair.machine) == []
    return pair


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Fail a test that does not restore the environment variables."""
    before = _ours()
    yield
    assert _ours() == before


def _ours() -> dict[str, str]:
    """Return the environment variables that this package reads or sets."""
    return {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "RESERVE_GPU_"))}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make stdin of this process a terminal."""
    master, slave = pty.openpty()
    with os.fdopen(master), os.fdopen(slave) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a time zone whose clocks change on 2026-10-25 and 2027-03-28, at 01:00 UTC."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()
