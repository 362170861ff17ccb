"""The history of processes that end in different ways, and of other users."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.log import log_writer, places
from reserve_gpu.model.requests import End
from tests.support.history import history_folder, logged_lines, open_lines
from tests.support.locked import held
from tests.support.machine import LIMIT_S
from tests.support.processes import US, queue, wait_for
from tests.support.run_command import run_command
from tests.support.users import DAEMON, NOBODY, as_user, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Machine

MOMENTS = int(os.environ.get("MOMENTS", "50"))  # kills of a process at a random moment
# Code for child processes. A process logs by itself, but possibly after its answer.
LOG = "from reserve_gpu.reservation.session import session\nsession().run(session()._step)"
WAIT_A_SECOND = "import time; time.sleep(1.1)"  # a shorter reservation is not logged
CAPTURE_WARNINGS = """
import logging, io
log = io.StringIO()
logging.getLogger("reserve_gpu").addHandler(logging.StreamHandler(log))
"""


def test_code_of_the_history_is_loaded_only_if_needed(here: Here) -> None:
    with here.child() as one:
        one.reserve()
        loaded = one.run("[name for name in sys.modules if name.startswith('reserve_gpu.log')]")
        assert loaded.value == []
    assert not (here.home / ".local").exists()


def test_end_of_a_process_is_logged(logged: Here) -> None:
    logged.python(f"import reserve_gpu\nreserve_gpu.reserve()\n{WAIT_A_SECOND}\nraise OSError")
    assert [line["how"] for line in logged_lines(logged)] == [End.EXIT.value]
    assert not open_lines(logged)


WATCH = """
import fcntl
seen = []
def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".new"):
        mutex = os.open(os.environ["RESERVE_GPU_LOCK_DIR"] + "/mutex.lock", os.O_RDWR)
        try:
            fcntl.flock(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append("free")
        except BlockingIOError:
            seen.append("locked")
        os.close(mutex)
sys.addaudithook(watch)
"""


def test_page_is_created_without_the_mutex(logged: Here) -> None:
    """A home directory that hangs does not delay other users."""
    with logged.child() as one:
        one.run(WATCH)
        one.reserve()
        one.run(LOG)
        assert one.run("seen").value == ["free"]


def test_next_reservation_closes_the_page_of_a_killed_process(logged: Here) -> None:
    """A page is closed only if its process has ended, even if its forked child is running."""
    with logged.child() as one, logged.child() as two:
        for child, note in ((one, "lost"), (two, "alive")):
            child.reserve(f"note={note!r}")
            child.run(LOG)
        forked = one.run("pid = os.fork()\nif not pid: import time; time.sleep(600)\npid").value
        one.kill()
        try:
            assert {line["note"] for line in open_lines(logged)} == {"lost", "alive"}
            reserve_gpu.reserve(note="next")
            (line,) = logged_lines(logged)
            assert (line["note"], line["how"]) == ("lost", End.LOST.value)
            assert {line["note"] for line in open_lines(logged)} == {"alive", "next"}
        finally:
            os.kill(forked, signal.SIGKILL)


LOG_CONSTANTLY = """
import json, os, sys, time
import reserve_gpu
from reserve_gpu.log import places
from reserve_gpu.log.log_writer import Page
from reserve_gpu.features.history.recorder import Recorder
from reserve_gpu.reservation.session import session
reserve_gpu.reserve()
held = session().held
reserve_gpu.release()
began = time.time()
logged = Recorder(Page.new(places.to_write(None)), held, began, every_s=0)
print(began, logged.page.id, flush=True)
while True:
    logged.step({os.getpid()})
"""


@pytest.mark.full
def test_process_killed_at_any_moment_is_logged(logged: Here) -> None:
    """A process that is killed at a random moment leaves a line up to its last check."""
    moments = random.Random(27)  # noqa: S311 - not a secret
    for _ in range(MOMENTS):
        killed_after_s = moments.uniform(0, 0.05)
        argv = [sys.executable, "-c", LOG_CONSTANTLY]
        with logged.running(*argv, environ=logged.environ(), stdout=subprocess.PIPE) as process:
            moment, own_id = process.stdout.readline().decode().split()  # type: ignore[union-attr]
            until = time.time() + killed_after_s
            while time.time() < until:
                pass
            process.kill()
            process.communicate()
        killed = time.time()
        folder = places.to_write(None)
        assert folder is not None
        log_writer.close_lost(folder)
        os.close(folder)
        (line,) = (line for line in logged_lines(logged) if line["id"] == own_id)
        assert line["how"] == End.LOST.value
        assert line["seconds"] <= killed - float(moment) + 0.1
        assert line["end"] == pytest.approx(killed, abs=20)
    assert not open_lines(logged)


def test_command_is_logged(logged: Here) -> None:
    done = run_command(logged, "--note", "sweep", "--", "sleep", "1.2", RESERVE_GPU_AGENT="claude")
    assert done.returncode == 0
    wait_for(lambda: logged_lines(logged))
    (line,) = logged_lines(logged)
    assert (line["name"], line["note"], line["agent"]) == ("sleep 1.2", "sweep", "claude")
    assert line["how"] == End.EXIT.value
    assert 1.2 <= line["seconds"] < 20
    wait_for(lambda: not open_lines(logged))


def test_background_process_of_a_command_is_logged(logged: Here) -> None:
    """A command is logged until the last process that it has started has ended."""
    run_command(logged, "--", "sh", "-c", "sleep 2.5 >/dev/null 2>&1 &")
    wait_for(lambda: not held(logged))
    wait_for(lambda: logged_lines(logged))
    assert logged_lines(logged)[0]["seconds"] >= 2.0


def test_python_command_is_logged_once(logged: Here) -> None:
    """A command that loads this package does not log its reservation again."""
    code = "import reserve_gpu, time; print(reserve_gpu.current()); time.sleep(1.2)"
    assert "GPU0" in run_command(logged, "--", sys.executable, "-c", code).stdout
    wait_for(lambda: not open_lines(logged))
    assert len(logged_lines(logged)) == 1


def test_kernel_that_starts_with_a_gpu_logs_it_once(logged: Here) -> None:
    code = (
        f"import reserve_gpu, pathlib\n{LOG}\nhistory = session().features['History']\n"
        f"pages = [*pathlib.Path({str(history_folder(logged))!r}).glob('*.open')]\n"
        "print(history._recorder is not None, len(pages))"
    )
    start = [*US, "kernel", "start", "--"]
    file = str(logged.folder / "kernel.json")
    done = logged.command(*start, sys.executable, "-c", code, "-f", file)
    assert done.stdout == "True 1\n", done.stderr
    assert not [line for line in logged_lines(logged) if line["how"] != End.EXIT.value]


@pytest.mark.parametrize(("limit_s", "how"), [(60, End.GRANTED), (0.5, End.GAVE_UP)])
def test_wait_is_logged(logged: Here, limit_s: float, how: End) -> None:
    logged.write("gpu")
    reserve_gpu.reserve()
    with logged.child() as waiter:
        began = time.monotonic()
        waiter.send(f"reserve_gpu.reserve(wait={limit_s})")
        if how is End.GRANTED:
            wait_for(lambda: queue(logged))
            joined = time.monotonic()
            wait_for(lambda: time.monotonic() > joined + 1)
            reserve_gpu.release()
        waiter.answer()
        (line,) = (line for line in logged_lines(logged) if line["kind"] == "waited")
    assert (line["how"], line["asks"]) == (how.value, "a GPU")
    assert (1 if how is End.GRANTED else 0) < line["seconds"] <= time.monotonic() - began


# -- errors ----------------------------------------------------------------------------------------


def spoil_with_a_link(folder: Path, month: Path) -> None:
    """Replace the month's file with a symbolic link."""
    (folder / "precious").write_text("mine\n")
    month.symlink_to(folder / "precious")


def spoil_with_a_hard_link(folder: Path, month: Path) -> None:
    """Replace the month's file with a second name of another file."""
    (folder / "precious").write_text("mine\n")
    os.link(folder / "precious", month)


def spoil_with_permissions(_folder: Path, month: Path) -> None:
    """Make the month's file writable for other users."""
    month.write_text("")
    month.chmod(0o666)


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_with_a_link,
        spoil_with_a_hard_link,
        lambda _, month: os.mkfifo(month),
        spoil_with_permissions,
    ],
    ids=["link", "hard link", "pipe", "permissions"],
)
def test_unsafe_file_is_not_written(logged: Here, spoil: Callable[[Path, Path], object]) -> None:
    """A reservation succeeds although its line can't be written, and one warning is logged."""
    folder = history_folder(logged)
    folder.mkdir(parents=True, mode=0o700)
    for at in {time.time(), time.time() + LIMIT_S}:  # the month might end during the test
        name = time.strftime("%Y-%m.jsonl", time.localtime(at))
        if not os.path.lexists(folder / name):
            spoil(folder, folder / name)
    with logged.child() as one:
        one.run(CAPTURE_WARNINGS)
        assert one.reserve().value == "0"
        one.run(WAIT_A_SECOND)
        assert one.run("reserve_gpu.release()").error is None
        assert one.reserve().value == "0"
        assert one.run("reserve_gpu.release()").error is None
        one.run(LOG)
        assert one.run("log.getvalue().count('history')").value == 1
    precious = folder / "precious"
    assert not precious.exists() or precious.read_text() == "mine\n"


def test_full_disk_does_not_prevent_a_reservation(logged: Here) -> None:
    with logged.child(STAND_IN_LOG=os.devnull) as one:
        one.run(CAPTURE_WARNINGS)
        one.run("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
        for _ in range(2):
            assert one.reserve().value == "0"
            one.run(LOG)
            assert one.run("reserve_gpu.release()").error is None
        assert one.run("log.getvalue().count('history')").value == 1


# -- other users -----------------------------------------------------------------------------------


@pytest.fixture
def users() -> Iterator[Machine]:
    """Make a machine with several users and a folder for the histories of all users."""
    with for_users() as machine:
        (machine.folder / "history").mkdir()
        (machine.folder / "history").chmod(0o1733)
        yield machine


def run_as_nobody(*words: Any) -> int:
    """Run a command as another user, and return its exit code."""
    argv = [*as_user(NOBODY), *map(str, words)]
    return subprocess.run(argv, capture_output=True, check=False).returncode


def uid_of(user: str) -> str:
    """Return a user's ID."""
    return subprocess.run(["id", "-u", user], capture_output=True, text=True, check=True).stdout[
        :-1
    ]


@pytest.mark.xdist_group("users")
def test_history_is_private(users: Machine) -> None:
    """No other user can read, list or remove a user's history, but root can read it."""
    above = users.folder / "history"
    for user in (NOBODY, DAEMON):
        with child_of(users, user) as one:
            assert one.reserve(f"note='of {user}'").error is None
            one.run(f"{WAIT_A_SECOND}\nreserve_gpu.release()\n{LOG}")
    (file,) = (above / uid_of(DAEMON)).glob("*.jsonl")
    assert json.loads(file.read_text())["note"] == f"of {DAEMON}"
    for words in (["cat", file], ["ls", file.parent], ["ls", above], ["rm", "-r", file.parent]):
        assert run_as_nobody(*words), words
    assert file.exists()


@pytest.mark.xdist_group("users")
@pytest.mark.parametrize("mode", ["777", "755"])
def test_folder_created_by_another_user_is_not_used(users: Machine, mode: str) -> None:
    above, uid = users.folder / "history", uid_of(DAEMON)
    assert run_as_nobody("mkdir", "-m", mode, above / uid) == 0
    assert run_as_nobody("ln", "-s", "/tmp", above / f"{uid}-1") == 0
    with child_of(users, DAEMON) as one:
        one.run(CAPTURE_WARNINGS)
        assert one.reserve("note='mine'").error is None
        one.run(f"{WAIT_A_SECOND}\nreserve_gpu.release()\n{LOG}")
        assert one.run("log.getvalue()").value == ""
        read = "from reserve_gpu.log import log_reader\nimport time\n"
        read += "[e.entry.note for e in log_reader.since(0, time.time(), set())]"
        assert one.run(read).value == ["mine"]
    assert list((above / uid).iterdir()) == []
    assert list((above / f"{uid}-2").glob("*.jsonl"))
