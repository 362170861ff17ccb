"""The fixtures that all tests share."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.hardware import Hardware, Table, has_driver
from tests.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The modules that an extra brings; their tests import them, or run them as programs.
EXTRAS = {
    "browser": ("jupyterlab", "nbconvert", "playwright"),
    "completion": ("argcomplete",),
    "engines": ("distributed", "ipyparallel", "jupyterhub", "ray"),
    "frameworks": ("jax", "numba", "torch"),
    "build": ("build", "twine"),
    "benchmarks": ("GPUtil", "gpustat", "nvitop"),
}


def pytest_configure() -> None:
    """Under nohup SIGHUP is ignored, also by what the tests start; some prove what it does."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose extra is not installed."""
    for marker in item.iter_markers("needs"):
        (name,) = marker.args
        if not all(map(find_spec, EXTRAS[name])):
            pytest.skip(f"needs the extra `{name}`")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests marked `gpu` be tried without one."""
    parser.addoption(
        "--gpu-stand-in",
        action="store_true",
        help="run the tests marked gpu on the stand-in driver: it confirms nothing",
    )


TABLE = pytest.StashKey[Table]()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what the hardware said, as docs/hardware.md has it."""
    table = config.stash.get(TABLE, None)
    if table:
        terminalreporter.section("docs/hardware.md")
        terminalreporter.write_line(str(table))


@pytest.fixture(scope="session")
def hardware(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hardware]:
    """The machine with a real GPU, one of which is kept for these tests."""
    is_stand_in = request.config.getoption("--gpu-stand-in")
    if not is_stand_in and not has_driver():
        pytest.skip("needs a real NVIDIA GPU")
    found = Hardware(tmp_path_factory.mktemp("hardware"), is_stand_in=is_stand_in)
    keeper = found.keep_off()
    if isinstance(keeper, str):
        pytest.skip(f"needs an idle NVIDIA GPU: {keeper}")
    yield found
    keeper.kill()


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest, hardware: Hardware) -> Table:
    """What was found on the hardware; printed at the end."""
    found = request.config.stash.setdefault(TABLE, Table())
    found.title = hardware.title()
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with two idle GPUs."""
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """No test leaves a changed environment behind."""
    before = _ours()
    yield
    assert _ours() == before


def _ours() -> dict[str, str]:
    """The variables that this package reads or sets; other packages set some of their own."""
    return {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "RESERVE_GPU_"))}
