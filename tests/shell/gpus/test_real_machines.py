"""Tests of the readings in `tests/machines/`, which people have posted in public.

Only the readings are real, so these tests confirm nothing about hardware.
"""

from __future__ import annotations

import re
from collections import Counter
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
LEAST_FILES, LEAST_KINDS = 60, 25

VERDICTS = ("free", "busy", "broken", "unknown")
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
PLACES = ("host", "container", "WSL2")


class Posted(NamedTuple):
    """The comments of a file about its machine.

    Attributes:
        addresses: Where the output was posted.
        kind: The kind of machine.
        seen_from: One of PLACES.
        people: A person's verdict on each GPU or instance.
        product: The product's verdict on each GPU or instance, if it differs.
        takes: The device that a reservation without arguments takes, if no person calls it free.
    """

    addresses: tuple[str, ...]
    kind: str
    seen_from: str
    people: Mapping[str, str]
    product: Mapping[str, str]
    takes: str | None

    @classmethod
    def read(cls, path: Path) -> Posted:
        """Read the comments at the top of a file. Raise ValueError for an unknown comment."""
        facts: dict[str, list[str]] = {"from": [], "kind": [], "seen from": []}
        people: dict[str, str] = {}
        product: dict[str, str] = {}
        takes = None
        for line in re.findall(r"^# (?! )(.*)$", path.read_text(), re.MULTILINE):
            name, _, text = line.partition(": ")
            if gpu := re.fullmatch(r"gpu (\d+(?::\d+)?)", name):
                people[gpu[1]] = verdict(text)
            elif taken := re.match(r"product: takes (\d+(?::\d+)?|nothing); \S", line):
                takes = taken[1]
            elif other := re.match(r"product: (\d+(?::\d+)?) is (\w+; \S.*)", line):
                product[other[1]] = verdict(other[2])
            elif name in facts and text:
                facts[name].append(text)
            else:
                raise ValueError(f"{path.name}: {line}")
        (kind,), (seen_from, *_) = facts["kind"], [*facts["seen from"], "host"]
        return cls(tuple(facts["from"]), kind, seen_from, people, product, takes)


def verdict(text: str) -> str:
    """Return the verdict before a reason. Raise ValueError if either is missing."""
    word, _, reason = text.partition("; ")
    if word not in VERDICTS or not reason:
        raise ValueError(f"{text!r}: one of {', '.join(VERDICTS)}, a semicolon, and why")
    return word


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


def test_listed_differences_are_differences() -> None:
    """A file lists the product's verdict only if it differs from a person's."""
    for name, posted in POSTED.items():
        for number, word in posted.product.items():
            assert posted.people[number] != word, (name, number)
        if posted.takes:
            assert posted.people.get(posted.takes) != "free", name
            assert posted.takes != NOTHING or "free" in posted.people.values(), name


def test_the_corpus_has_many_kinds() -> None:
    """The corpus has at least 60 outputs from 25 kinds, each with an address and a listed kind."""
    readme = (FOLDER / "README.md").read_text()
    kinds = re.findall(r"^\| (?!kind|-|`|word|output)([^|]+) \|$", readme, re.MULTILINE)
    assert len(kinds) == len(set(kinds)) > LEAST_KINDS
    for name, posted in POSTED.items():
        assert posted.kind in kinds, name
        assert posted.seen_from in PLACES, name
        assert posted.addresses, name
        assert all(re.fullmatch(r"https?://\S+/\S+", each) for each in posted.addresses), name
    assert len(POSTED) >= LEAST_FILES
    assert len({posted.kind for posted in POSTED.values()}) >= LEAST_KINDS


def test_the_numbers_in_the_documentation() -> None:
    """The page "Where it works" has the right numbers of outputs, kinds, GPUs and differences."""
    page = " ".join((ROOT / "docs" / "machines.md").read_text().split())
    kinds = len({posted.kind for posted in POSTED.values()})
    gpus = sum(len(posted.people) for posted in POSTED.values())
    apart = Counter(word for posted in POSTED.values() for word in posted.product.values())
    assert f"{len(POSTED)} outputs from {kinds} kinds of machine" in page
    assert f"{gpus - apart.total()} of {gpus} GPUs" in page
    assert f"{apart['free']} GPUs that a person would not take" in page
    assert f"{apart.total() - apart['free']} that a person would take" in page
