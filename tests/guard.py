"""A pytest plugin: a test that writes outside of its temporary folder fails.

In the test process an audit hook sees each file that is opened for writing, made, renamed, removed
or given other rights. What belongs to the machine, the person or the checkout is not even written:
the call raises PermissionError. Children are not seen; what a careless one would most likely
overwrite is looked at before the first test and after the last.

tests/conftest.py loads it; `pytest -p tests.guard` does where that is not read.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from contextlib import suppress
from glob import glob
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

ROOT = Path(__file__).parent.parent
HOME = os.path.expanduser("~")
NAME = "reserve_gpu"

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# https://docs.python.org/3/library/audit_events.html: which arguments of an event are a path that
# it changes, each with the one that says what folder it is relative to.
CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "sqlite3.connect": ((0, None),),
}
NAMES_ITSELF = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink")

CACHES = ("__pycache__", ".pytest_cache", ".hypothesis")  # what Python and the tools keep there
LOCKS = tuple(f"{place}/{NAME}" for place in ("/run/lock", "/dev/shm", "/tmp"))
SYSTEM = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/opt", "/boot", "/root")

CHANGED = pytest.StashKey[list[str]]()
BEFORE = pytest.StashKey[dict[str, object]]()
# Where `open` looks: its audit event does not say so.
_opening = local()


class Guard:
    """What the tests of this process may write to, and what they have written to besides.

    temporary: pytest's folder for this session.
    """

    def __init__(self, temporary: str) -> None:
        self.is_on = False
        self.writes: list[str] = []
        self._temporary = (os.path.realpath(temporary),)
        self._scratch = (os.path.realpath(tempfile.gettempdir()), "/dev", "/proc", "/memfd:")
        self._protected = (*LOCKS, os.path.realpath(ROOT))
        self._system = (*SYSTEM, os.path.realpath(HOME), sys.prefix, sys.base_prefix)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a write that is none of a test's; raises PermissionError where it would do harm."""
        if not self.is_on or (event != "open" and event not in CHANGES):
            return
        for path in written(event, arguments):
            if self._may_write(path):
                continue
            self.writes.append(f"{event} {path}")
            if is_in(path, (*self._protected, *self._system)):
                raise PermissionError(f"a test must not write to {path} ({event})")

    def _may_write(self, path: str) -> bool:
        if is_in(path, self._temporary) or any(name in CACHES for name in path.split("/")):
            return True
        return is_in(path, self._scratch) and not is_in(path, self._protected)


def written(event: str, arguments: tuple[Any, ...]) -> list[str]:
    """The real paths that an event writes to; none where it only reads."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or not flags & WRITING:  # a descriptor: looked at when it was made
            return []
        return [real(path, getattr(_opening, "folder", None), follow=True)]
    return [
        real(arguments[path], None if folder is None else arguments[folder], follow=follow)
        for path, folder in CHANGES[event]
        for follow in (event not in NAMES_ITSELF,)
        if arguments[path] != ":memory:"
    ]


def real(path: Any, folder: int | None, *, follow: bool) -> str:
    """The path that the call will come to.

    folder: descriptor of the folder that it is relative to; none, or a negative one, for ours.
    follow: whether the call follows a link of that name, or is about the link itself.
    """
    name = f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path)
    if folder is not None and folder >= 0:
        name = os.path.join(f"/proc/self/fd/{folder}", name)
    if follow:
        return os.path.realpath(name)
    return os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))


def is_in(path: str, folders: tuple[str, ...]) -> bool:
    """Whether it is one of the folders, or below one."""
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def remember_folder_of_open() -> None:
    """Let the guard know what folder os.open is told to look in."""
    original = os.open

    def remembering(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        _opening.folder = dir_fd
        try:
            return original(path, flags, mode, dir_fd=dir_fd)
        finally:
            _opening.folder = None

    setattr(os, "open", remembering)  # noqa: B010 - mypy allows no other way
    os.supports_dir_fd.add(remembering)


def state() -> dict[str, object]:
    """What children might overwrite by mistake, and how it is now."""
    files = [
        *(f"{path}/EXTERNALLY-MANAGED" for path in libraries()),
        f"{HOME}/.ipython/profile_default/ipython_config.py",
    ]
    folders = [
        f"{HOME}/.ipython/profile_default/startup",
        *(f"{path}/share/jupyter/kernels" for path in (f"{HOME}/.local", sys.prefix, "/usr/local")),
        sysconfig.get_path("purelib"),  # what is installed
        *LOCKS,
    ]
    return {**{path: of_file(path) for path in files}, **{path: names(path) for path in folders}}


def libraries() -> set[str]:
    """Where the library of this Python is, and of those that the system has."""
    ours = {sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)}
    return {*ours, *glob("/usr/lib/python3*"), *glob("/usr/local/lib/python3*")}


def of_file(path: str) -> object:
    """What changes when a file is written or replaced; none if there is no such file."""
    with suppress(OSError):
        found = os.lstat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def names(folder: str) -> object:
    """The names in a folder, except what comes and goes with real reservations; none if absent."""
    with suppress(OSError):
        return sorted(name for name in os.listdir(folder) if not name.endswith(".lock"))
    return None


# ---- pytest ------------------------------------------------------------------------------------

_guard: Guard | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Install the hook, which stays for the life of the process, and see how the machine is."""
    global _guard
    factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    _guard = Guard(str(factory.getbasetemp()))
    remember_folder_of_open()
    sys.addaudithook(_guard)
    if not hasattr(
        session.config, "workerinput"
    ):  # pytest-xdist's workers leave it to their parent
        session.config.stash[BEFORE] = state()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Watch while a test runs, its fixtures included; what pytest writes in between is its own."""
    assert _guard
    _guard.is_on = True
    try:
        return (yield)
    finally:
        _guard.is_on = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Fail a test that wrote where it must not."""
    assert _guard
    yield
    writes, _guard.writes = _guard.writes, []
    if writes:
        pytest.fail("wrote outside of its temporary folder:\n" + "\n".join(writes), pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if a file of the machine has changed meanwhile."""
    before = session.config.stash.get(BEFORE, None)
    if before is None:
        return
    after = state()
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    session.config.stash[CHANGED] = changed
    if changed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Tell which files of the machine have changed."""
    if changed := config.stash.get(CHANGED, []):
        terminalreporter.section("changed while the tests ran", red=True)
        for path in changed:
            terminalreporter.write_line(path)
