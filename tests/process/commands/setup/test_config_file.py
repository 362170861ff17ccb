"""The lines in ipython_config.py: what they become, and what an interrupted run leaves."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from reserve_gpu.commands.setup import config_file, setup
from tests.support.locked import watched
from tests.support.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

from tests.support.config_file import own

ONE, TWO = b"/one/bin/python3.11", b"/a b/two/bin/python3.10"
BLOCK = config_file.added(b"", ONE)


# -- the file ------------------------------------------------------------------------------------


# Runs one step of `reserve-gpu setup`, which starts IPython between the others.
STEP = """
import sys
from reserve_gpu.commands.setup import config_file, setup
verb, path, name = sys.argv[1:]
config = config_file.Config(path, name.encode())
setup.exit_on_signals()
try:
    config.check_owner("COMMAND") if verb == "check_owner" else getattr(config, verb)()
except config_file.SetupError as error:
    sys.exit(str(error))
"""


class Profile:
    """An IPython profile, and the steps of `reserve-gpu setup` on it."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "home" / ".ipython" / "profile_default" / "ipython_config.py"
        self.config.parent.mkdir(parents=True)
        self.folder = folder

    def run(self, verb: str, *prefix: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, sys.executable, "-c", STEP, verb, str(self.config), ONE.decode()],
            env={**os.environ, "PYTHONPATH": f"{self.folder}:{ROOT}", **environ},
            text=True, capture_output=True, check=False, cwd="/",
        )  # fmt: skip

    def files(self) -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in self.config.parent.iterdir()}


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return Profile(tmp_path)


def test_the_file_is_replaced(profile: Profile) -> None:
    """The old file is never overwritten: a second name of it still has the old content."""
    profile.config.write_bytes(b"x = 1\n")
    old = profile.folder / "old"
    os.link(profile.config, old)
    assert profile.run("add").returncode == 0
    assert old.read_bytes() == b"x = 1\n"
    os.unlink(old)
    os.link(profile.config, old)
    assert profile.run("remove").returncode == 0
    assert old.read_bytes() == b"x = 1\n" + BLOCK
    assert profile.files() == {"ipython_config.py": b"x = 1\n"}


def interrupted(profile: Profile, verb: str, number: int, at: int) -> int:
    """Run a step in a child process that gets a signal, and return the exit status.

    at: The number of the system call before which the signal is sent.
    """
    calls = itertools.count(1)

    def send(event: str, _: object) -> None:
        if event.startswith(("open", "os.", "shutil.")) and next(calls) == at:
            signal.raise_signal(number)

    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status: object = 128 + number
    try:
        setup.exit_on_signals()
        with watched(send):
            getattr(config_file.Config(str(profile.config), ONE), verb)()
        status = 0
    except SystemExit as end:
        status = end.code
    finally:
        os._exit(int(f"{status}"))


@pytest.mark.parametrize("verb", ["add", "remove"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interruption_leaves_the_old_file_or_the_new(
    verb: str, number: signal.Signals, profile: Profile
) -> None:
    """A signal at any time leaves the old or the new file, and no lost content."""
    without_lines = b"x = 1\n" * 1000
    before = without_lines + (BLOCK if verb == "remove" else b"")
    after = without_lines + (BLOCK if verb == "add" else b"")
    copy = profile.config.with_name("ipython_config.py.before-reserve_gpu")
    seen, code, at = set(), -1, 0
    while code:
        at += 1
        profile.config.write_bytes(before)
        copy.unlink(missing_ok=True)
        code = interrupted(profile, verb, number, at)
        assert code in (0, -number, 128 + number)
        files = profile.files()
        seen.add(files.pop("ipython_config.py"))
        assert files.pop(copy.name, without_lines) == without_lines
        assert number == signal.SIGKILL or not files
        for name in files:
            profile.config.with_name(name).unlink()
    assert seen == {before, after}


# Saves a change of an editor at the first system call of a kind that Python tells of.
EDITED = """
import os, sys
def watch(event, arguments, done=[]):
    if (%s) and not done:
        done.append(1)
        open(os.environ["CONFIG"], os.environ["MODE"]).write("y = 2")
if os.environ.get("MODE"):
    sys.addaudithook(watch)
"""


def run_edited(profile: Profile, verb: str, when: str, mode: str) -> None:
    """Run a step that an editor comes between, and check that it says so.

    when: The condition on `event` and `arguments`. mode: The mode in which the editor opens it.
    """
    (profile.folder / "sitecustomize.py").write_text(EDITED % when)
    done = profile.run(verb, MODE=mode, CONFIG=str(profile.config))
    assert "was changed by another program" in done.stderr


def test_a_change_meanwhile_is_kept(profile: Profile) -> None:
    """A change that an editor saves meanwhile is not overwritten."""
    profile.config.write_bytes(b"x = 1\n")
    opens_copy = "event == 'open' and 'before-reserve' in str(arguments[0])"
    run_edited(profile, "add", f"event == 'os.access' or ({opens_copy})", "w")
    assert profile.config.read_bytes() == b"y = 2"


@pytest.mark.parametrize("verb", ["add", "remove"])
def test_another_run_at_the_same_time(verb: str, profile: Profile) -> None:
    """While another run is changing the file, a run fails and changes nothing."""
    profile.config.write_bytes(b"x = 1\n")
    folder = os.open(profile.config.parent, os.O_RDONLY)
    try:
        flock(folder, LOCK_EX)
        done = profile.run(verb)
    finally:
        os.close(folder)
    assert "is changing" in done.stderr
    assert "Try again." in done.stderr
    assert profile.files() == {"ipython_config.py": b"x = 1\n"}


def test_a_change_before_the_deletion_is_kept(profile: Profile) -> None:
    """A change that an editor saves just before the file is deleted is not lost."""
    profile.config.write_bytes(BLOCK)
    is_file = "str(arguments[0]) == os.environ['CONFIG']"
    run_edited(profile, "remove", f"event in ('os.rename', 'os.remove') and {is_file}", "a")
    assert profile.files() == {"ipython_config.py": BLOCK + b"y = 2"}


def test_a_folder_that_can_not_be_made(profile: Profile) -> None:
    """If the folder of the profile can't be made, one line says so."""
    folder = profile.config.parent
    folder.rmdir()
    folder.parent.rmdir()
    folder.parent.touch()
    done = profile.run("add")
    assert done.stderr == f"{folder} can't be created: Not a directory.\n"


@pytest.mark.parametrize("verb", ["check_add", "add", "remove"])
def test_a_file_that_is_too_large(verb: str, profile: Profile) -> None:
    """A file of more than 1 MiB is neither parsed nor changed."""
    with profile.config.open("wb") as file:
        file.truncate(1 << 40)
    done = profile.run(verb, "sh", "-c", 'ulimit -v 1000000; exec "$0" "$@"')
    assert done.stderr == f"{profile.config} is larger than 1 MiB, and was not changed.\n"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
OTHER = 65501  # an account without a name


@needs_root
@pytest.mark.parametrize("owned", ["home", "home/.ipython", "home/.ipython/profile_default"])
def test_root_takes_over_no_home(owned: str, profile: Profile) -> None:
    """In another user's home, root gets one line that tells this user what to type."""
    own(profile.folder / owned)
    done = profile.run("check_owner")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"belongs to user {OTHER}" in line
    assert line.endswith("run: COMMAND")


@needs_root
def test_root_follows_no_link_to_a_file_of_another_user(profile: Profile) -> None:
    """A link in root's profile to another user's file is refused."""
    dotfile = profile.folder / "dotfile"
    dotfile.touch()
    own(dotfile)
    profile.config.symlink_to(dotfile)
    assert f"{dotfile} belongs to user {OTHER}" in profile.run("check_owner").stderr


@needs_root
@pytest.mark.parametrize("verb", ["add", "remove"])
def test_the_file_keeps_its_owner(verb: str, profile: Profile) -> None:
    """The owner, group and mode of the file stay if root replaces it, and a link stays a link."""
    dotfile = profile.folder / "dotfile"
    dotfile.write_bytes(b"x = 1\n" + BLOCK * (verb == "remove"))
    os.chown(dotfile, OTHER, OTHER + 1)
    dotfile.chmod(0o640)
    profile.config.symlink_to("../../../dotfile")
    assert profile.run(verb).returncode == 0
    status = dotfile.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (OTHER, OTHER + 1, 0o640)
    assert profile.config.is_symlink()


class OtherUser(NamedTuple):
    """Runs the steps as another user, on a profile that this user can reach."""

    profile: Profile
    command: tuple[str, ...]

    def run(self, verb: str) -> subprocess.CompletedProcess[str]:
        words = (*self.command, verb, str(self.profile.config), ONE.decode())
        environ = {"PYTHONPATH": str(self.profile.folder)}
        return subprocess.run(
            words, env=environ, text=True, capture_output=True, check=False, cwd="/"
        )


@pytest.fixture
def other() -> Iterator[OtherUser]:
    python = shutil.which("python3", path="/usr/bin:/bin")
    user = ("setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups")
    if not python or subprocess.run([*user, python, "-c", ""], check=False).returncode:
        pytest.skip("needs setpriv, and a Python that other users can run")
    with tempfile.TemporaryDirectory() as folder:  # which other users can reach
        profile = Profile(Path(folder))
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "reserve_gpu", Path(folder, "reserve_gpu"), ignore=unwanted)
        for path in (profile.folder, *profile.folder.rglob("*")):
            path.chmod(0o777)
        yield OtherUser(profile, (*user, python, "-c", STEP))


@needs_root
@pytest.mark.parametrize("verb", ["add", "remove"])
def test_a_file_of_another_user_is_not_replaced(verb: str, other: OtherUser) -> None:
    """A user who may write another's file does not become its owner."""
    config = other.profile.config
    before = b"x = 1\n" + BLOCK * (verb == "remove")
    config.write_bytes(before)
    config.chmod(0o777)
    assert f"{config} belongs to root" in other.run(verb).stderr
    assert other.profile.files() == {"ipython_config.py": before}


@needs_root
@pytest.mark.parametrize(
    "name", ["ipython_kernel_config.py", "ipython_config.py.before-reserve_gpu"]
)
def test_another_file_that_can_not_be_read(name: str, other: OtherUser) -> None:
    """Unreadable files of root in the same folder do not keep the lines from being removed."""
    other.profile.config.write_bytes(b"x = 1\n" + BLOCK)
    own(other.profile.folder)
    unreadable = other.profile.config.with_name(name)
    unreadable.write_bytes(b"y = 1\n")
    unreadable.chmod(0o600)
    done = other.run("remove")
    assert (done.returncode, done.stderr) == (0, "")
    assert other.profile.files() == {"ipython_config.py": b"x = 1\n", name: b"y = 1\n"}


@needs_root
def test_a_file_that_can_not_be_replaced_stays(profile: Profile) -> None:
    """A file that a container has mounted by itself is as it was, and no copy of it is left."""
    mounted = profile.folder / "mounted"
    mounted.write_bytes(b"x = 1\n")
    profile.config.touch()
    mount = 'mount --bind "$0" "$1" || exit 99; shift; exec "$@"'
    done = profile.run("add", "unshare", "-m", "sh", "-c", mount, str(mounted), str(profile.config))
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("nothing can be mounted here")
    assert f"{profile.config} can't be written, and is unchanged: Device" in done.stderr
    assert mounted.read_bytes() == b"x = 1\n"
    assert profile.files() == {"ipython_config.py": b""}
