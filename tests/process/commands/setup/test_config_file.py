"""Changes of ipython_config.py that are interrupted, disturbed, or made by another user."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.setup import config_file, setup
from tests.support.locked import needs_root, watched
from tests.support.machine import ROOT
from tests.support.profiles import Home

if TYPE_CHECKING:
    from collections.abc import Iterator

PYTHON = b"/one/bin/python3.11"
BLOCK = config_file.added(b"", PYTHON)
NAME = ".ipython/profile_default/ipython_config.py"
COPY = f"{NAME}.before-reserve_gpu"
OTHER_UID = 65501  # an account without a name

# Runs one step of `reserve-gpu setup`, which starts IPython between the steps.
STEP = """
import sys
from reserve_gpu.commands.setup import config_file, setup
verb, path, name = sys.argv[1:]
setup.exit_on_signals()
try:
    getattr(config_file.Config(path, name.encode()), verb)()
except config_file.SetupError as error:
    sys.exit(str(error))
"""


def run_step(
    home: Home, verb: str, *prefix: str, python: str = sys.executable, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run one step of `reserve-gpu setup` in a child process."""
    return subprocess.run(
        [*prefix, python, "-c", STEP, verb, str(home.config), PYTHON.decode()],
        env={**os.environ, "PYTHONPATH": f"{home.path}:{ROOT}", **environ},
        text=True, capture_output=True, check=False, cwd="/",
    )  # fmt: skip


def interrupt(home: Home, verb: str, number: int, at: int) -> int:
    """Run a step in a child process that gets a signal, and return the exit status.

    Args:
        home: The home directory.
        verb: The step.
        number: The signal.
        at: The number of the system call before which the signal is sent.
    """
    calls = itertools.count(1)

    def send_signal(event: str, _: object) -> None:
        if event.startswith(("open", "os.", "shutil.")) and next(calls) == at:
            signal.raise_signal(number)

    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status: object = 128 + number
    try:
        setup.exit_on_signals()
        with watched(send_signal):
            getattr(config_file.Config(str(home.config), PYTHON), verb)()
        status = 0
    except SystemExit as end:
        status = end.code
    finally:
        os._exit(int(f"{status}"))


@pytest.mark.parametrize("verb", ["add", "remove"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interruption_leaves_the_old_file_or_the_new(
    verb: str, number: signal.Signals, home: Home
) -> None:
    """A signal at any time leaves a complete file, and the content from before the lines."""
    original = b"x = 1\n" * 1000
    before = original + (BLOCK if verb == "remove" else b"")
    after = original + (BLOCK if verb == "add" else b"")
    seen, code, at = set(), -1, 0
    while code:
        at += 1
        home.write(before)
        (home.path / COPY).unlink(missing_ok=True)
        code = interrupt(home, verb, number, at)
        assert code in (0, -number, 128 + number)
        files = home.files()
        seen.add(files.pop(NAME))
        assert files.pop(COPY, original) == original
        assert number == signal.SIGKILL or not files
        for name in files:
            (home.path / name).unlink()
    assert seen == {before, after}


# Saves a change of an editor at the first audit event that meets a condition.
EDITOR = """
import os, sys
def watch(event, arguments, done=[]):
    if (%s) and not done:
        done.append(1)
        open(os.environ["CONFIG"], os.environ["MODE"]).write("y = 2")
if os.environ.get("MODE"):
    sys.addaudithook(watch)
"""
OPENS_COPY = "event == 'open' and 'before-reserve' in str(arguments[0])"
IS_FILE = "str(arguments[0]) == os.environ['CONFIG']"


@pytest.mark.parametrize(
    ("verb", "data", "event", "mode", "left"),
    [
        ("add", b"x = 1\n", f"event == 'os.access' or ({OPENS_COPY})", "w", b"y = 2"),
        ("remove", BLOCK, f"event in ('os.rename', 'os.remove') and {IS_FILE}", "a",
         BLOCK + b"y = 2"),
    ],
    ids=["add", "remove"],
)  # fmt: skip
def test_change_of_an_editor_is_not_overwritten(
    verb: str, data: bytes, event: str, mode: str, left: bytes, home: Home
) -> None:
    """A change that an editor saves during a step stays, and the step fails."""
    home.write(data)
    hook = home.path / "sitecustomize.py"
    hook.write_text(EDITOR % event)
    done = run_step(home, verb, MODE=mode, CONFIG=str(home.config))
    assert "was changed by another program" in done.stderr
    hook.unlink()
    assert home.files()[NAME] == left


@pytest.mark.parametrize("verb", ["check_add", "add", "remove"])
def test_large_file_is_not_read(verb: str, home: Home) -> None:
    """A file of more than 1 MiB is neither parsed nor changed."""
    home.write(b"")
    os.truncate(home.config, 1 << 40)
    done = run_step(home, verb, "sh", "-c", 'ulimit -v 1000000; exec "$0" "$@"')
    assert f"{home.config} is larger than 1 MiB" in done.stderr
    assert os.stat(home.config).st_size == 1 << 40


AS_OTHER = ("setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups")
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin") or ""


@pytest.fixture
def open_home() -> Iterator[Home]:
    """Make a home directory, with the package, in which every user can write."""
    if subprocess.run([*AS_OTHER, SYSTEM_PYTHON, "-c", ""], check=False).returncode:
        pytest.skip("needs setpriv, and a Python that other users can run")
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        home.write(b"")
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "reserve_gpu", home.path / "reserve_gpu", ignore=unwanted)
        for path in (home.path, *home.path.rglob("*")):
            path.chmod(0o777)
        yield home


def run_step_as_other(home: Home, verb: str) -> subprocess.CompletedProcess[str]:
    """Run a step as another user."""
    return run_step(home, verb, *AS_OTHER, python=SYSTEM_PYTHON, PYTHONPATH=str(home.path))


@needs_root
@pytest.mark.parametrize("verb", ["add", "remove"])
def test_file_of_another_user_is_not_replaced(verb: str, open_home: Home) -> None:
    """A user who may write another user's file does not become its owner."""
    before = b"x = 1\n" + BLOCK * (verb == "remove")
    open_home.write(before)
    assert f"{open_home.config} belongs to root" in run_step_as_other(open_home, verb).stderr
    assert open_home.configuration() == {NAME: before}


@needs_root
@pytest.mark.parametrize("name", [NAME.replace("config", "kernel_config"), COPY])
def test_unreadable_file_does_not_prevent_removal(name: str, open_home: Home) -> None:
    """An unreadable file of root in the same folder stays, and the lines are removed."""
    open_home.write(b"x = 1\n" + BLOCK)
    for path in (open_home.path, *open_home.path.rglob("*")):
        os.chown(path, OTHER_UID, OTHER_UID)
    unreadable = open_home.path / name
    unreadable.write_bytes(b"y = 1\n")
    unreadable.chmod(0o600)
    done = run_step_as_other(open_home, "remove")
    assert (done.returncode, done.stderr) == (0, "")
    assert open_home.config.read_bytes() == b"x = 1\n"
    assert unreadable.read_bytes() == b"y = 1\n"


@needs_root
def test_mounted_file_stays(home: Home) -> None:
    """A file that is a mount point is unchanged, and no copy of it is left."""
    mounted = home.path / "mounted"
    mounted.write_bytes(b"x = 1\n")
    home.write(b"")
    mount = 'mount --bind "$0" "$1" || exit 99; shift; exec "$@"'
    done = run_step(home, "add", "unshare", "-m", "sh", "-c", mount, str(mounted), str(home.config))
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert f"{home.config} can't be written" in done.stderr
    assert mounted.read_bytes() == b"x = 1\n"
    assert home.configuration() == {NAME: b""}
