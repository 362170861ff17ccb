"""Tests of the readings in `tests/machines/`, which people have posted in public.

Only the readings are real, so these tests confirm nothing about hardware.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from reserve_gpu.allocation import snapshot
from reserve_gpu.allocation.attempt import AttemptContext, Granted, attempt
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.devices import State
from reserve_gpu.model.requests import Request
from tests.support.here import Here

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "machines"
FILES = sorted(FOLDER.glob("*.txt"))

# The verdict that corresponds to each state of a device without a reservation.
VERDICT_OF = {
    State.FREE: "free",
    State.BUSY: "busy",
    State.BROKEN: "broken",
    State.DENIED: "broken",
    State.EMPTY: "broken",
    State.PROHIBITED: "broken",
    State.UNKNOWN: "unknown",
}
NOTHING = "nothing"


class Posted(NamedTuple):
    """The comments of a file about its machine.

    Attributes:
        seen_from: `host`, `container` or `WSL2`.
        people: A person's verdict on each GPU or instance.
        product: The product's verdict on each GPU or instance, if it differs.
        takes: The device that a reservation without arguments takes, if no person calls it free.
    """

    seen_from: str
    people: Mapping[str, str]
    product: Mapping[str, str]
    takes: str | None

    @classmethod
    def read(cls, path: Path) -> Posted:
        """Read the comments at the top of a file."""
        seen_from = "host"
        people: dict[str, str] = {}
        product: dict[str, str] = {}
        takes = None
        for line in re.findall(r"^# (?! )(.*)$", path.read_text(), re.MULTILINE):
            name, _, text = line.partition(": ")
            if gpu := re.fullmatch(r"gpu (\d+(?::\d+)?)", name):
                people[gpu[1]] = text.partition(";")[0]
            elif taken := re.match(r"product: takes (\d+(?::\d+)?|nothing); \S", line):
                takes = taken[1]
            elif other := re.match(r"product: (\d+(?::\d+)?) is (\w+); \S", line):
                product[other[1]] = other[2]
            elif name == "seen from":
                seen_from = text
        return cls(seen_from, people, product, takes)


POSTED = {path.stem: Posted.read(path) for path in FILES}


@pytest.fixture(scope="module")
def corpus_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """Make a machine that takes the readings of one file after the other."""
    with Here(tmp_path_factory.mktemp("corpus")) as machine:
        yield machine


@pytest.mark.parametrize("name", POSTED)
def test_verdicts(corpus_machine: Here, name: str) -> None:
    """Each GPU has the verdict in its file, and a free GPU is reserved."""
    posted = POSTED[name]
    corpus_machine.write((FOLDER / f"{name}.txt").read_text())
    states, taken = read_and_reserve(corpus_machine, posted.seen_from)
    assert states == {**posted.people, **posted.product}
    free = {number for number, word in posted.people.items() if word == "free"} or {NOTHING}
    assert taken == posted.takes if posted.takes else taken in free


def read_and_reserve(here: Here, seen_from: str) -> tuple[dict[str, str], str]:
    """Return the product's verdict on each GPU, and the device that a reservation takes."""
    with Nvml() as gpus, LockDirectory(str(here.locks)) as locks:
        gpus.sees_all = seen_from == "host"  # also if the tests run in a container
        states = {
            row.device.number: VERDICT_OF[row.state] for row in snapshot.take_snapshot(gpus).rows
        }
        outcome = attempt(AttemptContext(Request(), gpus, locks, cuda_environment.read(), held={}))
        if not isinstance(outcome, Granted):
            return states, NOTHING
        (locked,) = outcome.locked
        locked.lock.release()
        return states, locked.device.number
