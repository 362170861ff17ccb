"""What is logged in a user's history: by notebooks, scripts and commands, however they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.history import recorder
from reserve_gpu.model.devices import Device
from tests.support.locked import held
from tests.support.machine import LIMIT_S
from tests.support.main import run
from tests.support.processes import queue, wait_for
from tests.support.unread import full_pipe
from tests.support.users import DAEMON, NOBODY, as_user, child_of, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.history import folder_of, lines, switch_on

DEVICE = Device(0, "GPU-8f2a", memory_mib=40_960)


# For a child: note what it did. It does so by itself, but after its answer.
NOTE = "from reserve_gpu.reservation.session import session\nsession().run(session()._step)"


def test_without_a_history_nothing_is_loaded(here: Here) -> None:
    """Where nothing says that a history is kept, a reservation makes no file and loads no code."""
    with here.child() as one:
        one.reserve()
        loaded = one.run("[name for name in sys.modules if name.startswith('reserve_gpu.log')]")
        assert loaded.value == []
    assert not (here.home / ".local").exists()


def test_the_end_of_a_process_is_logged(here: Here) -> None:
    """A script that ends by itself, also by an error, ends its line."""
    switch_on(here)
    here.python("import reserve_gpu, time\nreserve_gpu.reserve()\ntime.sleep(1.1)\nraise OSError")
    assert [line["how"] for line in lines(here)] == ["its process ended"]
    assert not lines(here, "*.open")


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


def test_nobody_waits_for_a_history(here: Here) -> None:
    """A page is made without the machine's mutex: a home that hangs keeps no other user waiting."""
    switch_on(here)
    with here.child() as one:
        one.run(WATCH)
        one.reserve()
        one.run(NOTE)
        assert one.run("seen").value == ["free"]


def test_a_killed_process_is_closed_by_the_next(here: Here) -> None:
    """What a killed process has left stands until the next reservation of its user ends it."""
    switch_on(here)
    with here.child() as one:
        one.reserve("note='lost'")
        one.run(NOTE)
    assert [line["note"] for line in lines(here, "*.open")] == ["lost"]
    reserve_gpu.reserve(note="next")
    assert [(line["note"], line["how"]) for line in lines(here)] == [
        ("lost", "its process was killed")
    ]
    assert [line["note"] for line in lines(here, "*.open")] == ["next"]


def test_a_living_process_keeps_its_page(here: Here) -> None:
    """Another reservation of the same user ends no page whose process lives."""
    switch_on(here)
    with here.child() as one:
        one.reserve("note='first'")
        one.run(NOTE)
        reserve_gpu.reserve(note="second")
        assert {line["note"] for line in lines(here, "*.open")} == {"first", "second"}
        assert not lines(here)


BEGIN_AND_END = """
import os, reserve_gpu
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_writer import Page
lost = 0
for _ in range(3000):
    log_writer.close_lost(folder := places.to_write(None))
    page = Page.new(folder)
    lost += not os.fstat(page.descriptor).st_nlink
    page.remove()
lost
"""


def test_pages_that_begin_at_once_are_not_lost(here: Here) -> None:
    """Processes that begin pages and end those of killed ones, at once, take none for lost."""
    switch_on(here)
    with here.child() as one, here.child() as other:
        one.send(BEGIN_AND_END)
        other.send(BEGIN_AND_END)
        answers = one.answer(), other.answer()
    assert [(answer.value, answer.text) for answer in answers] == [(0, ""), (0, "")]


def test_a_forked_child_does_not_keep_a_page(here: Here) -> None:
    """A child that a killed process has forked does not make its page look alive."""
    switch_on(here)
    with here.child() as one:
        one.reserve("note='lost'")
        one.run(NOTE)
        forked = one.run("pid = os.fork()\nif not pid: import time; time.sleep(600)\npid").value
    try:
        reserve_gpu.reserve()
        assert [line["note"] for line in lines(here)] == ["lost"]
    finally:
        os.kill(forked, signal.SIGKILL)


# -- commands and kernels --------------------------------------------------------------------------


def test_a_command_is_logged(here: Here) -> None:
    """A command is logged from its begin to its end, by its own name."""
    switch_on(here)
    done = run(here, "--note", "sweep", "--", "sleep", "1.2", RESERVE_GPU_AGENT="claude")
    assert done.returncode == 0
    wait_for(lambda: lines(here))
    (line,) = lines(here)
    assert (line["name"], line["note"], line["how"]) == ("sleep 1.2", "sweep", "its process ended")
    assert line["agent"] == "claude"
    assert 1.2 <= line["seconds"] < 20
    wait_for(lambda: not lines(here, "*.open"))


def test_what_a_command_leaves_running_is_logged(here: Here) -> None:
    """A command counts as long as what it has left running keeps its GPU."""
    switch_on(here)
    run(here, "--", "sh", "-c", "sleep 2.5 >/dev/null 2>&1 &")
    wait_for(lambda: not held(here))
    wait_for(lambda: lines(here))
    assert lines(here)[0]["seconds"] >= 2.0


def test_a_killed_command_ends_its_line(here: Here) -> None:
    """A command that is killed is logged up to its end, by the process that follows it."""
    switch_on(here)
    argv = [sys.executable, "-m", "reserve_gpu", "run", "-q", "--", "sleep", "600"]
    with here.running(*argv, environ=here.environ(), stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: is_old(here))
        process.kill()
        process.wait()
        wait_for(lambda: lines(here))
    assert [line["how"] for line in lines(here)] == ["its process ended"]


def is_old(here: Here) -> bool:
    """Tell whether what has a page is older than what is logged at least."""
    found = lines(here, "*.open")
    return bool(found) and time.time() > found[0]["since"] + recorder.LEAST_S


def test_a_python_command_is_logged_once(here: Here) -> None:
    """A command that loads this package itself, and goes on with what it has, counts once."""
    switch_on(here)
    code = "import reserve_gpu, time; print(reserve_gpu.current()); time.sleep(1.2)"
    assert run(here, "--", sys.executable, "-c", code).stdout.startswith("Reserving GPU0")
    wait_for(lambda: not lines(here, "*.open"))
    assert len(lines(here)) == 1


def test_a_restart_is_logged(here: Here) -> None:
    """A restart of a kernel ends a line, and the kernel that comes begins another one."""
    switch_on(here)
    with here.kernel() as kernel:
        kernel.run("%reserve_gpu")
        wait_for(lambda: is_old(here))
        kernel.restart()
        kernel.load()
        assert [line["how"] for line in lines(here)] == ["kept for a restart"]
        kernel.run("%reserve_gpu")
        wait_for(lambda: len(lines(here, "*.open")) == 1)


def test_a_started_kernel_is_logged_by_itself(here: Here) -> None:
    """A kernel that starts with its GPU notes it by itself, once."""
    switch_on(here)
    code = (
        "import reserve_gpu\n"
        "from reserve_gpu.reservation.session import session\n"
        "session().run(session()._step); history = session().features['History']\n"
        "print(history._recorder is not None, end=' ')\n"
        f"import pathlib; print(len([*pathlib.Path({str(folder_of(here))!r}).glob('*.open')]))"
    )
    start = [sys.executable, "-m", "reserve_gpu", "kernel", "start", "--"]
    file = str(here.folder / "kernel.json")
    done = here.command(*start, sys.executable, "-c", code, "-f", file)
    assert done.stdout == "True 1\n", done.stderr
    assert not [line for line in lines(here) if line["how"] != "its process ended"]


def test_a_guest_is_not_counted_again(here: Here) -> None:
    """What a second process of the user joins is logged once."""
    switch_on(here)
    with here.child() as one:
        one.reserve()
        one.run(NOTE)
        argv = [sys.executable, "-m", "reserve_gpu", "join", "--", "true"]
        assert here.command(*argv).returncode == 0
        assert len(lines(here, "*.open")) == 1
    assert not lines(here)


@pytest.mark.parametrize(("limit_s", "how"), [(60, "got it"), (0.5, "gave up")])
def test_a_wait_is_logged(here: Here, limit_s: float, how: str) -> None:
    """A wait in the queue is logged with its length and its outcome."""
    here.write("gpu")
    switch_on(here)
    reserve_gpu.reserve()
    with here.child() as waiter:
        began = time.monotonic()
        waiter.send(f"reserve_gpu.reserve(wait={limit_s})")
        if how == "got it":
            wait_for(lambda: queue(here))
            joined = time.monotonic()
            wait_for(lambda: time.monotonic() > joined + 1)
            reserve_gpu.release()
        waiter.answer()
        (line,) = (line for line in lines(here) if line["kind"] == "waited")
    assert (line["how"], line["asks"]) == (how, "a GPU")
    assert 0 < line["seconds"] <= time.monotonic() - began
    assert how != "got it" or line["seconds"] > 1


# -- what may go wrong -----------------------------------------------------------------------------

WARNS = """
import logging, io
log = io.StringIO()
logging.getLogger("reserve_gpu").addHandler(logging.StreamHandler(log))
"""


def spoiled_by_a_link(folder: Path, month: Path) -> None:
    (folder / "precious").write_text("mine\n")
    month.symlink_to(folder / "precious")


def spoiled_by_a_second_name(folder: Path, month: Path) -> None:
    (folder / "precious").write_text("mine\n")
    os.link(folder / "precious", month)


def spoiled_by_a_pipe(_folder: Path, month: Path) -> None:
    os.mkfifo(month)


def spoiled_by_a_directory(_folder: Path, month: Path) -> None:
    month.mkdir()


def spoiled_by_its_mode(_folder: Path, month: Path) -> None:
    month.write_text("")
    month.chmod(0o666)


@pytest.mark.parametrize(
    "spoil",
    [
        spoiled_by_a_link,
        spoiled_by_a_second_name,
        spoiled_by_a_pipe,
        spoiled_by_a_directory,
        spoiled_by_its_mode,
    ],
)
def test_a_file_that_is_not_ours_disturbs_nothing(here: Here, spoil: Any) -> None:
    """Whatever stands in a file's place: the reservation lives, one warning says it, no harm."""
    switch_on(here)
    folder_of(here).mkdir(parents=True, mode=0o700)
    for at in {time.time(), time.time() + LIMIT_S}:  # the month may end during the test
        name = time.strftime("%Y-%m.jsonl", time.localtime(at))
        if not os.path.lexists(folder_of(here) / name):
            spoil(folder_of(here), folder_of(here) / name)
    with here.child() as one:
        one.run(WARNS)
        assert one.reserve().value == "0"
        one.run("import time; time.sleep(1.1)")
        assert one.run("reserve_gpu.release()").error is None
        assert one.reserve().value == "0"
        assert one.run("reserve_gpu.release()").error is None
        one.run(NOTE)
        assert one.run("log.getvalue().count('history')").value == 1
    precious = folder_of(here) / "precious"
    assert not precious.exists() or precious.read_text() == "mine\n"


def test_a_full_disk_disturbs_nothing(here: Here) -> None:
    """Where nothing can be written, a GPU is reserved and released all the same; one warning."""
    switch_on(here)
    with here.child(STAND_IN_LOG=os.devnull) as one:
        one.run(WARNS)
        one.run("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
        for _ in range(2):
            assert one.reserve().value == "0"
            one.run(NOTE)
            assert one.run("reserve_gpu.release()").error is None
        assert one.run("log.getvalue().count('history')").value == 1


def test_a_full_stderr_keeps_no_process_from_ending(here: Here) -> None:
    """A process that can't write its history ends even if its stderr is a full pipe."""
    switch_on(here)
    (here.home / ".local").touch()
    reader, writer = full_pipe()
    script = "import reserve_gpu\nreserve_gpu.reserve()"
    with here.running(
        sys.executable, "-c", script,
        environ=here.environ(), stdout=subprocess.DEVNULL, stderr=writer,
    ) as process:  # fmt: skip
        assert process.wait(LIMIT_S) == 0
    for each in (reader, writer):
        os.close(each)


@pytest.fixture
def users() -> Iterator[Machine]:
    with for_users() as machine:
        yield machine


@pytest.mark.xdist_group("users")
def test_users_do_not_read_each_other(users: Machine) -> None:
    """Each user's lines are in a folder that no other user can read, list or remove; root reads."""
    above = users.folder / "history"
    above.mkdir()
    above.chmod(0o1733)
    for user in (NOBODY, DAEMON):
        with child_of(users, user) as one:
            assert one.reserve(f"note='of {user}'").error is None
            one.run(f"import time; time.sleep(1.1)\nreserve_gpu.release()\n{NOTE}")
    uid = subprocess.run(["id", "-u", DAEMON], capture_output=True, text=True, check=True).stdout
    (file,) = (above / uid.strip()).glob("*.jsonl")
    assert json.loads(file.read_text())["note"] == f"of {DAEMON}"
    for words in (["cat", file], ["ls", file.parent], ["ls", above], ["rm", "-r", file.parent]):
        argv = [*as_user(NOBODY), *map(str, words)]
        done = subprocess.run(argv, capture_output=True, check=False)
        assert done.returncode, words
    assert file.exists()


@pytest.mark.xdist_group("users")
@pytest.mark.parametrize("mode", ["777", "755"])
def test_a_folder_of_somebody_else_is_not_used(users: Machine, mode: str) -> None:
    """Whoever makes another user's folder first reads nothing, and spoils nothing."""
    above = users.folder / "history"
    above.mkdir()
    above.chmod(0o1733)
    uid = subprocess.run(["id", "-u", DAEMON], capture_output=True, text=True, check=True).stdout
    subprocess.run([*as_user(NOBODY), "mkdir", "-m", mode, above / uid.strip()], check=True)
    subprocess.run([*as_user(NOBODY), "ln", "-s", "/tmp", above / f"{uid.strip()}-1"], check=True)
    with child_of(users, DAEMON) as one:
        one.run(WARNS)
        assert one.reserve("note='mine'").error is None
        one.run(f"import time; time.sleep(1.1)\nreserve_gpu.release()\n{NOTE}")
        assert one.run("log.getvalue()").value == ""
        read = "from reserve_gpu.log import log_reader\nimport time\n"
        read += "[e.entry.note for e in log_reader.since(0, time.time(), set())]"
        assert one.run(read).value == ["mine"]
    assert list((above / uid.strip()).iterdir()) == []
    assert list((above / f"{uid.strip()}-2").glob("*.jsonl"))
