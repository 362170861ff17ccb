"""The version before this edition and today's live together on one machine.

One user has the one installed, another the other. All facts hold in both directions: `first` is one
of the two versions, `second` the other. They are driven from outside, as users do.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.locked import held
from tests.support.machine import ROOT
from tests.support.processes import US, wait_for
from tests.support.versions import Version
from tests.support.waiters import Waiter

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here
    from tests.support.machine import Child

from tests.support.versions_cases import holders, logged, picture

pytestmark = [pytest.mark.process]

ROUNDS = int(os.environ.get("ROUNDS", "25"))  # of each of eight processes in a race
TRAIN = {"JPY_SESSION_NAME": "/home/alice/train.ipynb"}
START_CUDA = "import ctypes; assert not ctypes.CDLL('libcuda.so.1').cuInit(0)"
ITS_REAL_FILE = "import os, reserve_gpu; print(os.path.realpath(reserve_gpu.__file__))"


def joined(stack: ExitStack, version: Version, which: str) -> Child:
    """Return a process of that version that has joined a reservation."""
    return stack.enter_context(version.child(*US, "join", which, "--"))


# What only one of them says for programs; and how long ago something was, which each look changes.
NEW_NAMES = {"agent", "free_at", "idle_for_s", "is_dying", "job", "job_name", "is_job_end"}


@pytest.mark.full
def test_records_are_read_wholly(here: Here, first: Version, second: Version) -> None:
    """Both say the same of holders, guests, leases, what is kept, and waiters of both versions."""
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
        guest = joined(stack, second, "train.ipynb")
        wait_for(lambda: holders(first, 2)[0]["overdue"])
        told = picture(first)
        assert picture(second) == told
        held_by = [[holder["pid"] for holder in row["holders"]] for row in told["devices"]]
        assert held_by[:4] == [[kernel.pid, guest.pid], [sharer.pid], [late.pid], [other.pid]]
        assert [holder["is_guest"] for holder in told["devices"][0]["holders"]] == [False, True]
        assert [each["pid"] for each in told["waiting"]] == [waiter.pid]
        guest.kill()
        kernel.restart()
        told = picture(first)
        assert picture(second) == told
        (kept,) = told["devices"][0]["holders"]
        assert kept["kept_until"]
        assert (kept["note"], kept["notebook"]) == ("thesis", "train.ipynb")


def report(version: Version, by: str) -> dict[str, Any]:
    """Return what a version sums up: the words that both know, and not when that was."""
    told = version.json("report", "--by", by)
    rows = {"rows": told["rows"], "days": told["days"], "total": [told["total"]]}
    for name in {word for some in rows.values() for row in some for word in row}:
        if name in ("unreserved_hours", "free_hours"):  # of `record`, which is no command any more
            assert {row.pop(name) for some in rows.values() for row in some} == {0.0}
    return rows | {name: told[name] for name in ("host", "user", "by", "is_kept", "problems")}


@pytest.mark.full
def test_a_history_is_summed_up(here: Here, first: Version, second: Version) -> None:
    """What both versions have logged each of them sums up, to the same hours."""
    here.rules.write_text("history = true\n")
    with first.child() as child, second.child() as other:
        child.reserve("'0', note='thesis'")
        other.reserve("'1', note='thesis'")
        wait_for(lambda: len(logged(here, "*.open")) == 2)
        begun = time.time()
        wait_for(lambda: time.time() > begun + 1)  # shorter ones are not logged
        for each in (child, other):
            each.run("reserve_gpu.release()")
        wait_for(lambda: len(logged(here, "*.jsonl")) == 2)
        wait_for(lambda: not logged(here, "*.open"))  # an earlier version counts these lines first
    lines = logged(here, "*.jsonl")
    ends = [(line["label"], line["how"]) for line in lines]
    assert sorted(ends) == [("GPU0", "released"), ("GPU1", "released")]
    for by in ("user", "gpu"):
        told = report(second, by)
        assert told == report(first, by)
        assert told["problems"] == []
        (total,) = told["total"]
        hours = sum(line["seconds"] for line in lines) / 3600
        assert total["reserved_hours"] == pytest.approx(hours, abs=1e-4)  # as they are rounded
        assert total["reserved_hours"] >= 2e-4


# -- what outlives a program -----------------------------------------------------------------------


@pytest.fixture
def installed(here: Here, first: Version) -> Version:
    """Make an installation of the first version that another one can be put in place of."""
    folder = here.folder / "installed"
    folder.symlink_to(first.folder)
    return Version(here, folder)


@pytest.mark.full
@pytest.mark.parametrize("how", ["upgraded", "another environment"])
def test_a_restart_as_the_other_version(
    here: Here, first: Version, second: Version, installed: Version, how: str
) -> None:
    """A kernel that restarts as the other version has its GPU again, once its time is over."""
    with installed.kernel(RESERVE_GPU_RESTART="3") as kernel:
        assert not kernel.run("%reserve_gpu 1 --note thesis").error
        if how == "upgraded":
            (here.folder / "new").symlink_to(second.folder)
            (here.folder / "new").replace(installed.folder)
            kernel.restart()
        else:
            kernel.restart(env=second.environ(RESERVE_GPU_RESTART="3"))
        loaded = kernel.run(f"%load_ext reserve_gpu\n{ITS_REAL_FILE}")
        assert loaded.error is None
        assert loaded.stdout.split()[-1] == second.file
        assert "Traceback" not in loaded.all
        cell = kernel.run("%reserve_gpu 1 --wait 1m")
        assert cell.error is None
        assert "CUDA_VISIBLE_DEVICES = '1'" in cell.stdout
        assert [holder["pid"] for holder in holders(second, 1)] == [kernel.pid]
        assert kernel.run("%reserve_gpu --release").error is None
        assert held(here) == []


@pytest.mark.full
def test_a_notebook_joins_and_outlives_the_other(
    here: Here, first: Version, second: Version
) -> None:
    """A notebook that joins one of the other version keeps the GPU when that one has gone."""
    with second.kernel() as guest, second.child() as third:
        with first.kernel(**TRAIN) as kernel:
            kernel.run("%reserve_gpu 1 --memory 1GB")
            assert "CUDA_VISIBLE_DEVICES = '1'" in guest.run("%reserve_gpu --join train").all
            kernel.run("%reserve_gpu --release")
            assert [holder["pid"] for holder in holders(first, 1)] == [guest.pid]
        assert third.reserve("'1'").error == "NoFreeDeviceError"
        guest.run("%reserve_gpu --release")
        assert third.reserve("'1'").value == "1"


# -- all at once -----------------------------------------------------------------------------------

# Another file than the lock's is locked while a GPU is held: it fails where somebody else has it.
RACE = """
import fcntl, random, time, warnings
warnings.simplefilter("ignore")  # who shares is told with whom
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
def test_a_race(here: Here, earlier: Path) -> None:
    """Eight processes of both versions want three GPUs, and no two have the same one at once."""
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
        assert {path.name for path in here.folder.glob("witness *")} == {
            "witness 0", "witness 1", "witness 2"
        }  # fmt: skip
        assert held(here) == []
