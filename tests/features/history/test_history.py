"""What is logged in a user's history: by notebooks, scripts and commands, however they end."""

from __future__ import annotations

import calendar
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.history import recorder
from reserve_gpu.features.history.journal import History
from reserve_gpu.features.history.recorder import Recorder
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import Kind, LogLine, parsed
from reserve_gpu.log.log_writer import Page
from reserve_gpu.model.devices import Device
from reserve_gpu.model.requests import End, Rules
from reserve_gpu.reservation.activity import DeviceActivity
from reserve_gpu.reservation.session import session
from tests.here import feature
from tests.locked import held
from tests.machine import LIMIT_S
from tests.processes import queue, wait_for
from tests.test_cli import run
from tests.test_users import DAEMON, NOBODY, as_user, child, for_users
from tests.unread import full_pipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.here import Here
    from tests.machine import Machine

MOMENTS = int(os.environ.get("MOMENTS", "50"))
NOW = 1_795_000_000.0
DEVICE = Device(0, "GPU-8f2a", memory_mib=40_960)


def switch_on(machine: Machine, word: str = "true") -> None:
    """Write the user's own file."""
    folder = machine.home / ".config"
    folder.mkdir(exist_ok=True)
    (folder / "reserve_gpu.toml").write_text(f"history = {word}\n")


def folder_of(machine: Machine) -> Path:
    return machine.home / ".local/state/reserve_gpu" / os.uname().nodename


def lines(machine: Machine, pattern: str = "*.jsonl") -> list[dict[str, Any]]:
    """Return what stands in the files of a history, once this process has logged what it did."""
    session().run(session()._step)
    files = sorted(folder_of(machine).glob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


# For a child: note what it did. It does so by itself, but after its answer.
NOTE = "from reserve_gpu.reservation.session import session\nsession().run(session()._step)"


# -- what a look adds ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passed_s", "used", "is_over", "expected"),
    [
        (
            60,
            DeviceActivity(is_used=True, percent=80.0, mib=9.0),
            None,
            (60.0, 60.0, 0.0, None, 9.0, 80.0),
        ),
        (
            60,
            DeviceActivity(is_used=False, percent=0.0, mib=0.0),
            None,
            (60.0, 0.0, 60.0, None, 0.0, 0.0),
        ),
        (60, DeviceActivity(), None, (60.0, None, None, None, None, None)),
        (60, DeviceActivity(is_used=True, mib=900.0), True, (60.0, 60.0, 0.0, 60.0, 900.0, None)),
        (60, DeviceActivity(is_used=True, mib=900.0), False, (60.0, 60.0, 0.0, 0.0, 900.0, None)),
        (
            9000,
            DeviceActivity(is_used=True, percent=80.0),
            None,
            (9000.0, 120.0, 0.0, None, None, 80.0),
        ),
    ],
    ids=["used", "idle", "unreadable", "over", "not over", "stopped for hours"],
)
def test_a_look_adds_what_it_has_seen(
    passed_s: float,
    used: DeviceActivity,
    expected: tuple[float | None, ...],
    *,
    is_over: bool | None,
) -> None:
    """A look speaks for the time since the last one, two minutes at most, and not of the unread."""
    line = LogLine(Kind.RESERVED, "a", NOW, NOW, NOW)
    line = recorder.add_time(line, passed_s, used, NOW + passed_s, is_over=is_over)
    assert (*line[5:9], line.mib, line.percent) == expected
    assert line.end == NOW + passed_s


def test_looks_add_up() -> None:
    """Several looks sum up the times, keep the most memory, and weigh the utilisation by time."""
    line = LogLine(Kind.RESERVED, "a", NOW, NOW, NOW)
    for passed_s, used in (
        (60, DeviceActivity(is_used=True, percent=90.0, mib=900.0)),
        (30, DeviceActivity(is_used=False, percent=0.0, mib=100.0)),
        (10, DeviceActivity()),
        (90, DeviceActivity(is_used=True, percent=20.0, mib=500.0)),
    ):
        line = recorder.add_time(line, passed_s, used, NOW)
    assert (line.seconds, line.used_s, line.idle_s) == (190.0, 150.0, 30.0)
    assert (line.percent, line.mib) == (40.0, 900.0)


# -- whether anything is kept ----------------------------------------------------------------------


FOR_ALL, IN_HOME = "history/{uid}", "home/.local/state/reserve_gpu/{host}"


@pytest.mark.parametrize(
    ("own", "ruled", "there", "expected"),
    [
        (None, None, (), None),
        (None, None, (FOR_ALL,), FOR_ALL),
        (None, None, (IN_HOME,), IN_HOME),
        (None, "true", (), IN_HOME),
        (None, "true", (FOR_ALL, IN_HOME), FOR_ALL),
        (None, "false", (FOR_ALL, IN_HOME), None),
        ("true", "false", (FOR_ALL,), FOR_ALL),
        ("true", None, (), IN_HOME),
        ("false", "true", (FOR_ALL, IN_HOME), None),
    ],
)
def test_where_a_history_is_kept(
    here: Here, own: str | None, ruled: str | None, there: tuple[str, ...], expected: str | None
) -> None:
    """The user's word counts first, then the administrator's, then whether a directory is there."""
    if own:
        switch_on(here, own)
    if FOR_ALL in there:
        (here.folder / "history").mkdir()
        (here.folder / "history").chmod(0o1733)
    if IN_HOME in there:
        folder_of(here).parent.mkdir(parents=True)
    folder = places.to_write(Rules("", "", history=None if ruled is None else ruled == "true"))
    found = None if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}"))
    if folder is not None:
        os.close(folder)
    place = expected and expected.format(uid=os.geteuid(), host=os.uname().nodename)
    assert found == (here.folder / place if place else None)
    assert not found or found.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_that_protects_nobody_is_none(here: Here, mode: int) -> None:
    """A directory in which others could remove a user's folder is not used."""
    (here.folder / "history").mkdir()
    (here.folder / "history").chmod(mode)
    assert places.to_write(None) is None


@pytest.mark.process
def test_without_a_history_nothing_is_loaded(here: Here) -> None:
    """Where nothing says that a history is kept, a reservation makes no file and loads no code."""
    with here.child() as one:
        one.reserve()
        loaded = one.run("[name for name in sys.modules if name.startswith('reserve_gpu.log')]")
        assert loaded.value == []
    assert not (here.home / ".local").exists()


def test_a_rule_says_so(here: Here) -> None:
    """The administrator's file switches the history on for all."""
    here.rules.write_text("history = true\n")
    reserve_gpu.reserve(note="thesis")
    assert [line["note"] for line in lines(here, "*.open")] == ["thesis"]


def test_a_bad_word_is_one_line(here: Here) -> None:
    """A word that is neither true nor false is said in one line, which names the file."""
    switch_on(here, '"yes"')
    with pytest.raises(reserve_gpu.RequestError, match="history must be true or false") as caught:
        places.to_write(None)
    assert str(here.home) in str(caught.value)


# -- what a reservation leaves ---------------------------------------------------------------------


def test_a_reservation_has_a_page_while_it_lasts(here: Here) -> None:
    """What is held has a page with its devices, size and note, which only its user reads."""
    switch_on(here)
    reserve_gpu.reserve(count=2, memory="1GiB", note="thesis")
    one, other = lines(here, "*.open")
    assert (one["label"], other["label"]) == ("GPU0", "GPU1")
    assert (one["note"], one["part_mib"]) == ("thesis", 1024.0)
    assert one["share"] == pytest.approx(1024 / 4038, abs=0.05)
    (page,) = folder_of(here).glob("*.open")
    assert page.stat().st_mode & 0o777 == 0o600
    assert not lines(here)


def test_a_new_note_is_logged(here: Here) -> None:
    """The page says what the reservation says now: a later note takes the place of the first."""
    switch_on(here)
    reserve_gpu.reserve(note="thesis")
    reserve_gpu.reserve(note="paper")
    session().run(session()._step)
    session().run(feature(History)._recorder._log_use)  # type: ignore[union-attr]
    assert [line["note"] for line in lines(here, "*.open")] == ["paper"]


def wait_a_second(here: Here) -> None:
    """Wait until a reservation is old enough to be logged."""
    (line,) = lines(here, "*.open")
    wait_for(lambda: time.time() > line["since"] + recorder.LEAST_S)


def test_a_release_is_logged(here: Here) -> None:
    """A release ends the page; its line stands in the file of the month."""
    switch_on(here)
    reserve_gpu.reserve()
    wait_a_second(here)
    reserve_gpu.release()
    (line,) = lines(here)
    assert line["how"] == "released"
    assert line["seconds"] == pytest.approx(line["end"] - line["start"], abs=0.1)
    (file,) = folder_of(here).iterdir()
    assert file.name == time.strftime("%Y-%m.jsonl", time.localtime(line["start"]))


def test_another_reservation_takes_its_place(here: Here) -> None:
    """Another reservation of the same process ends the line of the first, and begins its own."""
    switch_on(here)
    reserve_gpu.reserve(0)
    wait_a_second(here)
    reserve_gpu.reserve(1)
    assert [(each["label"], each["how"]) for each in lines(here)] == [
        ("GPU0", "another reservation took its place")
    ]
    assert [each["label"] for each in lines(here, "*.open")] == ["GPU1"]


def test_what_was_held_for_a_moment_is_not_noted(here: Here) -> None:
    """A reservation of less than a second leaves no line, and no page."""
    switch_on(here)
    reserve_gpu.reserve().release()
    assert not lines(here)
    assert list(folder_of(here).iterdir()) == []


@pytest.mark.process
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


@pytest.mark.process
def test_nobody_waits_for_a_history(here: Here) -> None:
    """A page is made without the machine's mutex: a home that hangs keeps no other user waiting."""
    switch_on(here)
    with here.child() as one:
        one.run(WATCH)
        one.reserve()
        one.run(NOTE)
        assert one.run("seen").value == ["free"]


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
def test_pages_that_begin_at_once_are_not_lost(here: Here) -> None:
    """Processes that begin pages and end those of killed ones, at once, take none for lost."""
    switch_on(here)
    with here.child() as one, here.child() as other:
        one.send(BEGIN_AND_END)
        other.send(BEGIN_AND_END)
        answers = one.answer(), other.answer()
    assert [(answer.value, answer.text) for answer in answers] == [(0, ""), (0, "")]


@pytest.mark.process
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


LOOKS = """
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
@pytest.mark.process
def test_kill_9_at_any_moment_loses_nothing_but_the_last_look(here: Here) -> None:
    """Killed at whatever moment, a process leaves lines that can be read, up to its last look."""
    switch_on(here)
    moments = random.Random(27)  # noqa: S311 - no secret
    for _ in range(MOMENTS):
        killed_after_s = moments.uniform(0, 0.05)
        argv = [sys.executable, "-c", LOOKS]
        with here.running(*argv, environ=here.environ(), stdout=subprocess.PIPE) as process:
            moment, own_id = process.stdout.readline().decode().split()  # type: ignore[union-attr]
            began = float(moment)
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
        (line,) = (line for line in lines(here) if line["id"] == own_id)
        assert line["how"] == "its process was killed"
        assert line["seconds"] <= killed - began + 0.1
        assert line["end"] == pytest.approx(killed, abs=20)
    assert not lines(here, "*.open")


def test_a_page_that_was_appended_already_is_only_removed(here: Here) -> None:
    """A process that was killed between its last line and the end of its page counts once."""
    switch_on(here)
    folder = places.to_write(None)
    assert folder is not None
    page = Page.new(os.dup(folder))
    line = LogLine(Kind.RESERVED, page.id, NOW, NOW, NOW + 60, 60.0, gpu="GPU-8f2a")
    page.write([line])
    log_writer.append(folder, [line._replace(how=End.RELEASED)])
    page.close()
    log_writer.close_lost(folder)
    os.close(folder)
    assert [each["how"] for each in lines(here)] == ["released"]
    assert not lines(here, "*.open")


# -- what is used ----------------------------------------------------------------------------------


def recorded(now: float) -> Recorder:
    """Return what notes what this process holds, and looks at each step."""
    folder, holding = places.to_write(None), session().held
    assert folder is not None
    assert holding
    return Recorder(Page.new(folder), holding, now, every_s=0)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ("compute {pid} 900\nutilisation 95", (True, 95, 900)),
        ("compute {pid} 900\nutilisation 0", (False, 0, 900)),
        ("", (False, 0, 0)),
        ("compute {pid} 900\nutilisation 95\nsamples boot", (True, 95, 900)),
        ("compute {pid} 900\nutilisation 95\nsamples strange", (None, None, 900)),
        ("compute {pid} 900\nutilisation 95\nsamples rubbish", (None, None, 900)),
        ("compute 1 900\nutilisation 95", (False, 0, 0)),
        (
            "compute {pid} 900\nutilisation 95\nfail nvmlDeviceGetComputeMode 1 15",
            (None, None, None),
        ),
    ],
    ids=[
        "at work",
        "only there",
        "nobody",
        "boot",
        "strange",
        "rubbish",
        "a stranger",
        "unreadable",
    ],
)
def test_what_is_used_is_logged(here: Here, processes: str, expected: tuple[Any, ...]) -> None:
    """The use of a GPU by its holder's own processes is logged; what can't be read is left out."""
    switch_on(here)
    reserve_gpu.reserve(1)
    here.add(processes.format(pid=os.getpid()))
    logged = recorded(time.time())
    logged.step({os.getpid()})
    logged.step({os.getpid()})
    line = logged.entries[0]
    is_used, percent, mib = expected
    assert (line.used_s is not None, line.idle_s is not None) == (is_used is not None,) * 2
    if is_used is not None:
        assert bool(line.used_s) is is_used
        assert bool(line.idle_s) is not is_used
    assert (line.percent, line.mib) == (percent, mib)
    logged.page.remove()


def test_more_than_the_part_is_logged(here: Here) -> None:
    """The time in which more than the part was used is logged."""
    switch_on(here)
    reserve_gpu.reserve(1, memory="1GiB")
    logged = recorded(time.time())
    here.add(f"compute {os.getpid()} 2000")
    logged.step({os.getpid()})
    logged.step({os.getpid()})
    assert (logged.entries[0].over_s or 0) > 0
    logged.page.remove()


def test_an_instance_counts_by_its_memory(here: Here) -> None:
    """A MIG instance counts as the share of its GPU's memory that it has; a part of it, as less."""
    here.use("mig")
    switch_on(here)
    reserve_gpu.reserve("1:0")
    logged = recorded(time.time())
    logged.step({os.getpid()})
    whole = logged.entries[0].share
    logged.page.remove()
    assert whole == pytest.approx(4864 / 40_960, abs=0.01)
    half = f"{session().devices[0].memory_mib // 2}MiB"  # type: ignore[operator]
    reserve_gpu.release()
    reserve_gpu.reserve("1:0", memory=half)
    logged = recorded(time.time())
    logged.step({os.getpid()})
    assert logged.entries[0].share == pytest.approx(whole / 2, abs=0.01)
    logged.page.remove()


def test_each_hour_has_a_line(here: Here) -> None:
    """Once another hour has begun, the line of the last one stands, and a new one begins."""
    switch_on(here)
    reserve_gpu.reserve()
    before = len(lines(here, "*.open"))
    logged = recorded(time.time() - 3600)
    logged.step({os.getpid()})
    (line,) = lines(here)
    assert "how" not in line
    assert line["id"] == logged.page.id
    assert logged.entries[0].start == pytest.approx(line["end"], abs=0.001)
    assert logged.entries[0].since == pytest.approx(line["since"], abs=0.001)
    assert len(lines(here, "*.open")) == before + 1
    logged.page.remove()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(("begin", "end", "is_next"), [(10, 50, False), (50, 70, True)])
def test_an_hour_that_comes_twice_is_two_hours(begin: int, end: int, *, is_next: bool) -> None:
    """When clocks go back, the second 02:00 begins a line of its own."""
    midnight = calendar.timegm((2026, 10, 25, 0, 0, 0))  # in UTC; there it is 02:00
    start = midnight + 60 * begin
    line = LogLine(Kind.RESERVED, "a", start, start, midnight + 60 * end)
    assert recorder.is_next_hour(line) == is_next


def test_a_process_that_was_stopped_for_hours(here: Here) -> None:
    """The hours in which a process was stopped count as reserved, and as neither used nor idle."""
    switch_on(here)
    reserve_gpu.reserve()
    holding, folder = session().held, places.to_write(None)
    assert folder is not None
    assert holding
    logged = Recorder(Page.new(folder), holding, time.time(), time.monotonic() - 10_000, every_s=0)
    logged.step({os.getpid()})
    line = parsed(logged.entries[0].to_json().encode())
    assert line
    assert line.seconds >= 10_000
    assert line.idle_s == recorder.LONGEST_KNOWN_S
    logged.page.remove()


@pytest.mark.parametrize(
    ("process", "expected"), [("", (None, True)), ("compute {pid} 900", (None, None))]
)
def test_an_instance_without_a_process_is_idle(
    here: Here, process: str, expected: tuple[bool | None, ...]
) -> None:
    """A MIG instance is idle without a process of its holder's; with one, nobody can tell."""
    here.use("mig")
    text = here.scenario.read_text().replace("    gi 7", f"    gi 7\n    {process}")
    here.write(text.format(pid=os.getpid()))
    switch_on(here)
    reserve_gpu.reserve("1:0")
    logged = recorded(time.time())
    logged.step({os.getpid()})
    logged.step({os.getpid()})
    line = logged.entries[0]
    assert (bool(line.used_s) or None, bool(line.idle_s) or None) == expected
    logged.page.remove()


# -- commands and kernels --------------------------------------------------------------------------


@pytest.mark.process
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


@pytest.mark.process
def test_what_a_command_leaves_running_is_logged(here: Here) -> None:
    """A command counts as long as what it has left running keeps its GPU."""
    switch_on(here)
    run(here, "--", "sh", "-c", "sleep 2.5 >/dev/null 2>&1 &")
    wait_for(lambda: not held(here))
    wait_for(lambda: lines(here))
    assert lines(here)[0]["seconds"] >= 2.0


@pytest.mark.process
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


@pytest.mark.process
def test_a_python_command_is_logged_once(here: Here) -> None:
    """A command that loads this package itself, and goes on with what it has, counts once."""
    switch_on(here)
    code = "import reserve_gpu, time; print(reserve_gpu.current()); time.sleep(1.2)"
    assert run(here, "--", sys.executable, "-c", code).stdout.startswith("Reserving GPU0")
    wait_for(lambda: not lines(here, "*.open"))
    assert len(lines(here)) == 1


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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


@pytest.mark.process
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


def test_a_cut_line_spoils_no_other(here: Here) -> None:
    """A line that a full disk has cut does not take the next one with it."""
    switch_on(here)
    folder = places.to_write(None)
    assert folder is not None
    line = LogLine(Kind.RESERVED, "a", NOW, NOW, NOW + 60, 60.0)
    name = folder_of(here) / f"{time.strftime('%Y-%m', time.localtime(NOW))}.jsonl"
    name.touch(0o600)
    name.write_text('{"kind":"reser')
    log_writer.append(folder, [line])
    os.close(folder)
    assert name.read_text().splitlines() == ['{"kind":"reser', line.to_json()]


def test_a_year_is_kept(here: Here) -> None:
    """The files of thirteen months stay, older ones are removed, and nothing else is."""
    switch_on(here)
    folder = places.to_write(None)
    assert folder is not None
    names = ["2025-10.jsonl", "2025-11.jsonl", "2025-12.jsonl", "2024-01.json", "notes.txt"]
    for name in names:
        (folder_of(here) / name).touch(0o600)
    moment = time.mktime((2026, 11, 24, 12, 0, 0, 0, 0, -1))
    log_writer.append(folder, [LogLine(Kind.RESERVED, "a", moment, moment, moment + 60, 60.0)])
    os.close(folder)
    left = {file.name for file in folder_of(here).iterdir()}
    assert left == {*names[1:], "2026-11.jsonl"}


@pytest.fixture
def users() -> Iterator[Machine]:
    with for_users() as machine:
        yield machine


@pytest.mark.process
@pytest.mark.xdist_group("users")
def test_users_do_not_read_each_other(users: Machine) -> None:
    """Each user's lines are in a folder that no other user can read, list or remove; root reads."""
    above = users.folder / "history"
    above.mkdir()
    above.chmod(0o1733)
    for user in (NOBODY, DAEMON):
        with child(users, user) as one:
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


@pytest.mark.process
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
    with child(users, DAEMON) as one:
        one.run(WARNS)
        assert one.reserve("note='mine'").error is None
        one.run(f"import time; time.sleep(1.1)\nreserve_gpu.release()\n{NOTE}")
        assert one.run("log.getvalue()").value == ""
        read = "from reserve_gpu.log import log_reader\nimport time\n"
        read += "[e.entry.note for e in log_reader.since(0, time.time(), set())]"
        assert one.run(read).value == ["mine"]
    assert list((above / uid.strip()).iterdir()) == []
    assert list((above / f"{uid.strip()}-2").glob("*.jsonl"))
