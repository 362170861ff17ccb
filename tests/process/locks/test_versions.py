"""An earlier version and today's version together on one machine.

Each test runs in both directions: `first` is one of the two versions, and `second` the other.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.locked import held, locked
from tests.support.machine import CHILD, ROOT
from tests.support.processes import US, wait_for
from tests.support.versions import Version, logged
from tests.support.waiters import Waiter, queued, stopped

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Child

ROUNDS = int(os.environ.get("ROUNDS", "25"))  # of each of eight processes in a race
TRAIN = {"JPY_SESSION_NAME": "/home/alice/train.ipynb"}
START_CUDA = "import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)"
IDLE_AT_ONCE = """
try:
    from reserve_gpu.reservation.session import session
except ImportError:  # the earlier version
    from reserve_gpu.core.session import session
for feature in session().features.values():
    if hasattr(feature, "_idle_s"):
        feature._idle_s = 0.0
"""


# -- holders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "request_text", "others"),
    [
        ("two", "'0'", ["'0'", "'0', memory='1GB'", "'0,1'"]),
        ("eight", "'0', memory='50GB'", ["'0'", "'0', memory='40GB'"]),
        ("mig570", "'1:1'", ["'1:1'", "'1:1', memory='1GB'"]),
    ],
    ids=["whole", "part", "mig"],
)
def test_each_version_refuses_what_the_other_holds(
    here: Here, first: Version, second: Version, scenario: str, request_text: str, others: list[str]
) -> None:
    """A GPU, a part or an instance that one version holds is refused by the other."""
    here.use(scenario)
    with first.child() as holder, second.child() as other:
        visible = holder.reserve(request_text).value
        assert visible
        for refused in others:
            answer = other.reserve(refused)
            assert answer.error == "NoFreeDeviceError"
            assert f"{CHILD} (pid {holder.pid})" in answer.text
        assert holder.visible() == visible
        free = other.reserve().value
        assert free
        assert free != visible
        holder.run("reserve_gpu.release()")
        assert other.reserve(request_text).value == visible


def test_parts_of_both_versions_share_a_gpu(here: Here, first: Version, second: Version) -> None:
    """Parts of both versions fit on one GPU up to its memory."""
    here.use("eight")
    with ExitStack() as stack:
        versions = (first, second, first, second)
        one, two, three, four = (stack.enter_context(version.child()) for version in versions)
        for child in (one, two, three):
            assert child.reserve("'0', memory='25GB'").value == "0"
        answer = four.reserve("'0', memory='25GB'")
        assert answer.error == "NoFreeDeviceError"
        for child in (one, two, three):
            assert f"(pid {child.pid})" in answer.text
        two.kill()
        assert four.reserve("'0', memory='25GB'").value == "0"
        assert {holder["pid"] for holder in second.holders(0)} == {one.pid, three.pid, four.pid}


def test_each_version_shows_the_holders_of_the_other(
    here: Here, first: Version, second: Version
) -> None:
    """One version shows the note, the lease and the memory of the other version's holders."""
    here.use("eight")
    with first.child() as whole, first.child() as part:
        whole.reserve("'0', note='thesis', for_='1h'")
        part.reserve("'1', memory='10GiB', note='a part'")
        text = second.run("status").stdout
        assert f"{CHILD} (pid {whole.pid})" in text
        assert f"{CHILD} (pid {part.pid})" in text
        (holder,) = second.holders(0)
        assert (holder["pid"], holder["note"]) == (whole.pid, "thesis")
        assert holder["until"] == pytest.approx(holder["since"] + 3600, abs=1)
        (holder,) = second.holders(1)
        assert (holder["pid"], holder["note"]) == (part.pid, "a part")
        assert holder["memory_promised_mib"] == 10240


def add_fields(path: Path) -> None:
    """Add fields to a record that neither version knows, without changing the file's times."""
    times = path.stat()
    fields = json.loads(path.read_bytes())
    future: dict[str, Any] = {"edition": 9, "priority": {"of": ["a", None]}, "lanes": [1, [2]]}
    path.write_text(json.dumps({**future, **fields, "is_preemptible": True}))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_unknown_fields_of_a_record_are_ignored(
    here: Here, first: Version, second: Version
) -> None:
    """A version ignores fields that it does not know, of holders and of waiters."""
    with first.child() as holder, first.child() as waiter:
        holder.reserve("'0', note='thesis', for_='1h'")
        waiting = Waiter(here, waiter, "'0'")
        before = second.status()
        assert (len(before["devices"][0]["holders"]), len(before["waiting"])) == (1, 1)
        for name in locked(here.locks):
            add_fields(here.locks / name)
        assert second.status() == first.status() == before
        assert second.run("run", "0", "--", "true").returncode == 75
        assert holder.run("[d.label for d in reserve_gpu.release()]").value == ["GPU0"]
        assert waiting.answer().value == "0"


@pytest.mark.full
def test_both_versions_read_all_records_alike(here: Here, first: Version, second: Version) -> None:
    """Both versions show the same holders, guests, leases, kept GPUs and waiters."""
    here.use("eight")
    with ExitStack() as stack:
        kernel = stack.enter_context(first.kernel(**TRAIN))
        kernel.run("%reserve_gpu 0 --note thesis --for 1h --if-wanted")
        sharer, late, waiter = (stack.enter_context(first.child()) for _ in range(3))
        sharer.reserve("'1', memory='10GB', note='a part'")
        late.reserve("'2'")
        late.run(START_CUDA)
        late.reserve("'2', for_=0.1")
        other = stack.enter_context(second.kernel())
        other.run("%reserve_gpu 3 --idle 1h --end-kernel")
        Waiter(here, waiter, "'0'")
        guest = stack.enter_context(second.child(*US, "join", "train.ipynb", "--"))
        wait_for(lambda: first.holders(2)[0]["overdue"])
        status = first.status()
        assert second.status() == status
        held_by = [[holder["pid"] for holder in row["holders"]] for row in status["devices"]]
        assert held_by[:4] == [[kernel.pid, guest.pid], [sharer.pid], [late.pid], [other.pid]]
        assert [holder["is_guest"] for holder in status["devices"][0]["holders"]] == [False, True]
        assert [each["pid"] for each in status["waiting"]] == [waiter.pid]
        guest.kill()
        kernel.restart()
        status = first.status()
        assert second.status() == status
        (kept,) = status["devices"][0]["holders"]
        assert kept["kept_until"]
        assert (kept["note"], kept["notebook"]) == ("thesis", "train.ipynb")


# -- the queue -------------------------------------------------------------------------------------


def test_both_versions_wait_in_one_queue(here: Here, first: Version, second: Version) -> None:
    """Waiters of alternating versions get the GPU in the order in which they joined."""
    here.write("gpu")
    with ExitStack() as stack:
        versions = (first, second, first, second)
        holder, *children = (stack.enter_context(version.child()) for version in versions)
        holder.reserve()
        waiters = [Waiter(here, child) for child in children]
        pids = [child.pid for child in children]
        assert queued(here) == pids
        for version in (first, second):
            assert [each["pid"] for each in version.status()["waiting"]] == pids
        for place, waiter in enumerate(waiters, 1):
            waiter.sees(place, "reserved")
        with stopped(here, pids[0]):
            holder.run("reserve_gpu.release()")
            for place, waiter in enumerate(waiters[1:], 2):
                waiter.sees(place, "awaited")  # they don't overtake the slow first waiter
        for waiter in waiters:
            assert waiter.answer().value == "0"
            pids = pids[1:]
            assert queued(here) == pids
            waiter.child.run("reserve_gpu.release()")


def test_a_notebook_shows_a_waiter_of_the_other_version(
    here: Here, first: Version, second: Version
) -> None:
    """A cell of one version ends with a line about a waiter of the other version."""
    with first.kernel(**TRAIN) as kernel, second.child() as child:
        kernel.run("%reserve_gpu 0")
        if first.folder == ROOT:
            kernel.run(IDLE_AT_ONCE)
        waiter = Waiter(here, child, "'0', note='thesis'")
        wait_for(lambda: re.search("GPU0.*thesis", kernel.run("pass").all))  # not after each cell
        kernel.run("%reserve_gpu --release")
        assert waiter.answer().value == "0"


# -- the history -----------------------------------------------------------------------------------


def test_an_open_history_line_is_closed_by_the_other_version(
    here: Here, first: Version, second: Version
) -> None:
    """The history line of a killed process is closed by the other version's next reservation."""
    here.rules.write_text("history = true\n")
    with first.child() as child:
        child.reserve("'0', note='lost'")
        wait_for(lambda: logged(here, "*.open"))
        with second.child() as other:
            other.reserve("'1', note='next to it'")
            wait_for(lambda: len(logged(here, "*.open")) == 2)
            assert not logged(here, "*.jsonl")  # the line of a running process stays open
            other.run("reserve_gpu.release()")
    with second.child() as other:
        other.reserve("'1', note='next'")
        wait_for(lambda: any(line["note"] == "lost" for line in logged(here, "*.jsonl")))
        (line,) = (line for line in logged(here, "*.jsonl") if line["note"] == "lost")
        assert line["how"] == "its process was killed"
        wait_for(lambda: [line["note"] for line in logged(here, "*.open")] == ["next"])


def report(version: Version, by: str) -> dict[str, Any]:
    """Return the fields of a report that both versions have, without times."""
    told = version.json("report", "--by", by)
    rows = {"rows": told["rows"], "days": told["days"], "total": [told["total"]]}
    for name in {word for some in rows.values() for row in some for word in row}:
        if name in ("unreserved_hours", "free_hours"):  # of a command that no longer exists
            assert {row.pop(name) for some in rows.values() for row in some} == {0.0}
    return rows | {name: told[name] for name in ("host", "user", "by", "is_kept", "problems")}


@pytest.mark.full
def test_both_versions_report_the_same_hours(here: Here, first: Version, second: Version) -> None:
    """Both versions sum up a history that both have written to the same hours."""
    here.rules.write_text("history = true\n")
    with first.child() as child, second.child() as other:
        child.reserve("'0', note='thesis'")
        other.reserve("'1', note='thesis'")
        wait_for(lambda: len(logged(here, "*.open")) == 2)
        begun = time.time()
        wait_for(lambda: time.time() > begun + 1)  # shorter reservations are not logged
        for each in (child, other):
            each.run("reserve_gpu.release()")
        wait_for(lambda: len(logged(here, "*.jsonl")) == 2)
        wait_for(lambda: not logged(here, "*.open"))  # the earlier version counts open lines first
    lines = logged(here, "*.jsonl")
    ends = [(line["label"], line["how"]) for line in lines]
    assert sorted(ends) == [("GPU0", "released"), ("GPU1", "released")]
    for by in ("user", "gpu"):
        summary = report(second, by)
        assert summary == report(first, by)
        assert summary["problems"] == []
        (total,) = summary["total"]
        hours = sum(line["seconds"] for line in lines) / 3600
        assert total["reserved_hours"] == pytest.approx(hours, abs=1e-4)  # hours are rounded
        assert total["reserved_hours"] >= 2e-4


# -- started processes and restarts ----------------------------------------------------------------


def nested(first: Version, second: Version, *options: str) -> AbstractContextManager[Child]:
    """Start a Python of the second version with `reserve-gpu run` of the first one."""
    path = f"PYTHONPATH={second.folder}"
    return first.child(*US, "run", *options, "--", "env", path, file=second.file)


def test_a_command_of_the_other_version_holds_its_gpus(
    here: Here, first: Version, second: Version
) -> None:
    """A process that one version has started holds its GPUs in both versions until it ends."""
    here.use("eight")
    with nested(first, second, "0,1", "--note", "mine") as child:
        assert child.visible() == "0,1"
        for version in (first, second):
            assert [version.holders(index)[0]["pid"] for index in (0, 1)] == [child.pid] * 2
            assert version.holders(1)[0]["note"] == "mine"
            done = child.run(
                "import subprocess\n"
                f"environ = dict(os.environ, PYTHONPATH={str(version.folder)!r})\n"
                f"subprocess.run({[*US, 'run', '--', 'true']}, env=environ, capture_output=True,"
                " text=True).stderr"
            )
            assert "GPU0 and GPU1" in str(done.value)
            assert "already" in str(done.value)
        assert held(here) == [0, 1]
    assert held(here) == []


def test_a_command_takes_over_the_reservation_of_an_earlier_run(
    here: Here, first: Version, second: Version
) -> None:
    """Python of today's version takes over what the earlier `reserve-gpu run` has reserved.

    The earlier version can't read the file that today's `run` hands over. Its Python says that the
    GPUs are already reserved, and the command keeps them.
    """
    here.use("eight")
    with nested(first, second, "0,1", "--note", "mine") as child:
        if first.folder == ROOT:
            assert child.reserve("count=2").error == "ReservedAboveError"
            assert held(here) == [0, 1]
            return
        assert child.run("repr(reserve_gpu.current())").value == "<Reservation of GPU0 and GPU1>"
        assert child.reserve("count=2").value == "0,1"
        assert child.run("reserve_gpu.current().note").value == "mine"
        assert child.run("[d.label for d in reserve_gpu.release()]").value == ["GPU0", "GPU1"]
        assert held(here) == []


@pytest.mark.full
@pytest.mark.parametrize("how", ["upgraded", "another environment"])
def test_a_kernel_that_restarts_with_the_other_version_gets_its_gpu_back(
    here: Here, first: Version, second: Version, how: str
) -> None:
    """A kernel that restarts with the other version gets its GPU after the time for restarts."""
    folder = here.folder / "installed"
    folder.symlink_to(first.folder)
    with Version(here, folder).kernel(RESERVE_GPU_RESTART="3") as kernel:
        assert not kernel.run("%reserve_gpu 1 --note thesis").error
        if how == "upgraded":
            (here.folder / "new").symlink_to(second.folder)
            (here.folder / "new").replace(folder)
            kernel.restart()
        else:
            kernel.restart(env=second.environ(RESERVE_GPU_RESTART="3"))
        real_file = "import os, reserve_gpu; print(os.path.realpath(reserve_gpu.__file__))"
        loaded = kernel.run(f"%load_ext reserve_gpu\n{real_file}")
        assert loaded.error is None
        assert loaded.stdout.split()[-1] == second.file
        assert "Traceback" not in loaded.all
        cell = kernel.run("%reserve_gpu 1 --wait 1m")
        assert cell.error is None
        assert "CUDA_VISIBLE_DEVICES = '1'" in cell.stdout
        assert [holder["pid"] for holder in second.holders(1)] == [kernel.pid]
        assert kernel.run("%reserve_gpu --release").error is None
        assert held(here) == []


# -- requests to another process -------------------------------------------------------------------


def test_a_notebook_is_listed_and_joined_by_the_other_version(
    first: Version, second: Version
) -> None:
    """A notebook of one version is listed and joined by commands of the other."""
    with first.kernel(**TRAIN) as kernel:
        kernel.run("%reserve_gpu 1 --note thesis --for 1h")
        (line,) = second.run("list").stdout.strip().splitlines()
        for word in ("GPU1", f"train.ipynb (pid {kernel.pid})", "until", "thesis"):
            assert word in line
        done = second.run("join", "train.ipynb", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert done.stdout == "1\n"
        assert "train.ipynb" in done.stderr
        kernel.run("%reserve_gpu --release")
        assert "GPU1" not in second.run("list").stdout


@pytest.mark.full
def test_a_joined_notebook_outlasts_a_holder_of_the_other_version(
    first: Version, second: Version
) -> None:
    """A notebook that has joined the other version's notebook keeps the GPU after its end."""
    with second.kernel() as guest, second.child() as third:
        with first.kernel(**TRAIN) as kernel:
            kernel.run("%reserve_gpu 1 --memory 1GB")
            assert "CUDA_VISIBLE_DEVICES = '1'" in guest.run("%reserve_gpu --join train").all
            kernel.run("%reserve_gpu --release")
            assert [holder["pid"] for holder in first.holders(1)] == [guest.pid]
        assert third.reserve("'1'").error == "NoFreeDeviceError"
        guest.run("%reserve_gpu --release")
        assert third.reserve("'1'").value == "1"


def test_a_notebook_can_be_ended_but_not_asked_by_the_other_version(
    here: Here, first: Version, second: Version
) -> None:
    """A command of one version can't ask the other version to release, but can end it by its PID.

    The versions listen on different sockets.
    """
    with first.kernel(**TRAIN) as kernel:
        kernel.run("%reserve_gpu 1")
        pid = kernel.pid
        done = second.run("release", "1")
        assert done.returncode == 75
        assert f"train.ipynb (pid {pid}) can't" in done.stdout
        assert held(here) == [1]
        done = second.run("release", str(pid), "--end")
        assert done.stdout.startswith(f"Ended train.ipynb (pid {pid})")
        assert held(here) == []


# -- a race ----------------------------------------------------------------------------------------

# Locks a file of its own for each held GPU, which fails if another process holds that GPU as well.
RACE = """
import fcntl, random, time, warnings
warnings.simplefilter("ignore")  # a sharer is warned about the other sharers
dice, held, refused = random.Random({seed}), 0, 0
for _ in range({rounds}):
    part, wait = dice.random() < 0.25, dice.choice([None, 60])
    try:
        got = reserve_gpu.reserve(memory="1GB" if part else None, wait=wait)
    except reserve_gpu.NoFreeDeviceError:
        assert not wait
        refused += 1
        continue
    witness = os.open("witness " + got.environ["CUDA_VISIBLE_DEVICES"], os.O_RDWR | os.O_CREAT)
    fcntl.flock(witness, (fcntl.LOCK_SH if part else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    time.sleep(dice.random() * 0.01)
    os.close(witness)
    reserve_gpu.release()
    held += 1
held, refused
"""


@pytest.mark.full
def test_no_two_processes_of_both_versions_hold_a_gpu_at_once(here: Here, earlier: Path) -> None:
    """If eight processes of both versions reserve three GPUs, no two hold the same GPU at once."""
    here.write("gpu\n" * 3)
    with ExitStack() as stack:
        versions = [Version(here, earlier), Version(here, ROOT)] * 4
        children = [stack.enter_context(version.child()) for version in versions]
        for seed, child in enumerate(children):
            child.send(RACE.format(seed=seed, rounds=ROUNDS))
        answers = [child.answer() for child in children]
        assert [answer.text for answer in answers] == [""] * len(answers)
        for had, refused in (answer.value for answer in answers):
            assert had > 0
            assert had + refused == ROUNDS
        witnesses = {path.name for path in here.folder.glob("witness *")}
        assert witnesses == {"witness 0", "witness 1", "witness 2"}
        assert held(here) == []
