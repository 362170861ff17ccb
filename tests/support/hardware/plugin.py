"""The pytest plugin of the hardware tests: their fixtures, time limits and page."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tests.support.hardware.machine import Hardware, missing_driver
from tests.support.hardware.report import Findings, Row, from_plain, page, post_hint, to_plain

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

FINDINGS = pytest.StashKey[Findings]()
ROWS = pytest.StashKey[list[Row]]()
REASON = pytest.StashKey[str]()
TITLE = pytest.StashKey[str]()
DEADLINE = pytest.StashKey[float]()
SETUP_S = 90.0  # the driver, the reservation, the first start of Python from a cold disk
FILES = ("test_reservations", "test_parts", "test_nvml_and_cuda", "test_latencies")
TEARDOWN_S = 30.0
REPEAT_S = 5.0  # a process in state D can't be awaited: each `finally` on the way gets this long


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the hardware tests."""
    group = parser.getgroup("gpu", "tests on a real GPU")
    group.addoption(
        "--gpu-stand-in",
        action="store_true",
        help="run the tests marked gpu on the stand-in driver, which confirms nothing",
    )
    group.addoption("--gpu-limit", type=float, metavar="SECONDS", help="limit of all gpu tests")
    group.addoption("--gpu-mps", action="store_true", help="start and stop the MPS daemon")
    group.addoption("--gpu-report", metavar="FILE", help="also write the page as Markdown")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the most important tests first, without pytest-timeout, which uses the same timer."""
    items.sort(
        key=lambda item: FILES.index(item.path.stem) if item.get_closest_marker("gpu") else -1
    )
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.timeout(0))


class LateError(BaseException):
    """The time limit is over. No `except Exception` on the way stops it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise LateError in this thread after a time, and again until the block ends."""

    def stop(*_: object) -> NoReturn:
        raise LateError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1), REPEAT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if item.get_closest_marker("gpu"):
        item.stash[FINDINGS] = Findings(item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Limit the setup of a hardware test, which includes the setup of its fixtures."""
    if FINDINGS not in item.stash:
        return (yield)
    with time_limit(SETUP_S):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Limit a hardware test; it fails if one of its promises is broken."""
    findings = item.stash.get(FINDINGS, None)
    if findings is None:
        return (yield)
    with time_limit(min(findings.limit_s, time_left(item.config))):
        result = yield
    if text := findings.failed():
        pytest.fail(text, pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    if FINDINGS not in item.stash:
        return (yield)
    with time_limit(TEARDOWN_S):
        return (yield)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the time of the run."""
    limit_s = session.config.getoption("--gpu-limit") or float("inf")
    session.config.stash[DEADLINE] = time.monotonic() + limit_s


def time_left(config: pytest.Config) -> float:
    return config.stash[DEADLINE] - time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the rows of a hardware test when it ends."""
    report = yield
    findings = item.stash.get(FINDINGS, None)
    if findings and call.excinfo:
        error = call.excinfo.value
        is_skip = isinstance(error, pytest.skip.Exception)
        findings.reason = str(error) if is_skip else f"{type(error).__name__}: {error}"
    if findings and call.when == "teardown":
        item.config.stash.setdefault(ROWS, []).extend(findings.rows())
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the rows to the process that prints them."""
    config = session.config
    if REASON in config.stash and config.getoption("--gpu-report"):
        session.exitstatus = pytest.ExitCode.INTERRUPTED
    if hasattr(config, "workeroutput") and TITLE in config.stash:
        rows = to_plain(config.stash.get(ROWS, []))
        config.workeroutput["hardware"] = [config.stash[TITLE], rows]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the rows from a process of pytest-xdist."""
    if sent := getattr(node, "workeroutput", {}).get("hardware"):
        title, rows = sent
        node.config.stash[TITLE] = title
        node.config.stash.setdefault(ROWS, []).extend(from_plain(rows))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the page, and write it if a file was named."""
    if reason := config.stash.get(REASON, None):
        terminalreporter.write_line(reason)
    if TITLE not in config.stash:
        return
    text = page(config.stash[TITLE], config.stash.get(ROWS, []))
    terminalreporter.section("hardware report")
    terminalreporter.write_line(text)
    path = config.getoption("--gpu-report")
    if path:
        content = f"# Hardware report\n\n```text\n{text}\n```\n"
        Path(path).write_text(content, encoding="utf-8")
    if path and not config.getoption("--gpu-stand-in"):
        terminalreporter.write_line(post_hint(path))
    elif path:
        terminalreporter.write_line(f"{path} is from the stand-in driver: don't post it.")


@pytest.fixture(scope="session")
def hardware(request: pytest.FixtureRequest) -> Iterator[Hardware]:
    """Return the machine with a real GPU; one of its GPUs is reserved for the tests."""
    is_stand_in = request.config.getoption("--gpu-stand-in")
    if not is_stand_in and (reason := missing_driver()):
        pytest.skip(f"needs a real NVIDIA GPU: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="reserve_gpu-hardware-", dir="/tmp"))
    found = Hardware(folder, is_stand_in=is_stand_in)
    try:
        if reason := found.reserve():
            request.config.stash[REASON] = f"No idle GPU: {reason}"
            pytest.skip(f"needs an idle NVIDIA GPU: {reason}")
        request.config.stash[TITLE] = found.title()
        yield found
    finally:
        found.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def found(request: pytest.FixtureRequest, hardware: Hardware) -> Findings:
    """Return the rows of this test, when the GPU is free. The time of the run may be over."""
    if time_left(request.config) <= 0:
        pytest.skip("the time limit of the run was over")
    hardware.wait_until_free()
    return request.node.stash[FINDINGS]  # type: ignore[no-any-return]
