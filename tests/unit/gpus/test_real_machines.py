"""What the product says of machines that people have shown in public: `tests/machines/`.

Only the readings are real, so this confirms nothing about hardware.
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
# The product's states in a person's words; the others are said of reservations.
SAID = {
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
    """What a file of the corpus says of its machine besides the readings.

    people, product: by the number of a GPU or instance, what each says of it; product only where
    it disagrees. takes: what a bare reservation takes if it is not one that a person calls free.
    """

    addresses: tuple[str, ...]
    kind: str
    seen_from: str
    people: Mapping[str, str]
    product: Mapping[str, str]
    takes: str | None

    @classmethod
    def read(cls, path: Path) -> Posted:
        """Read the comments at the top. Raises ValueError for a line that is none of them."""
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
    """Return the word that a reason follows. Raises ValueError without either."""
    word, _, reason = text.partition("; ")
    if word not in VERDICTS or not reason:
        raise ValueError(f"{text!r}: one of {', '.join(VERDICTS)}, a semicolon, and why")
    return word


POSTED = {path.stem: Posted.read(path) for path in FILES}


@pytest.fixture(scope="module")
def one_after_the_other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """Make a machine that becomes each of the corpus: they have nothing but their readings."""
    with Here(tmp_path_factory.mktemp("corpus")) as machine:
        yield machine


@pytest.mark.parametrize("name", POSTED)
def test_each_machine_is_judged_as_a_person_judges_it(one_after_the_other: Here, name: str) -> None:
    """Each GPU is what a person or the file's disagreement says, and a free one is reserved."""
    posted = POSTED[name]
    one_after_the_other.write((FOLDER / f"{name}.txt").read_text())
    states, taken = seen_and_taken(one_after_the_other, posted.seen_from)
    assert states == {**posted.people, **posted.product}
    free = {number for number, word in posted.people.items() if word == "free"} or {NOTHING}
    assert taken == posted.takes if posted.takes else taken in free


def seen_and_taken(here: Here, seen_from: str) -> tuple[dict[str, str], str]:
    """Return what the product says of each GPU, and which one a bare reservation takes."""
    with Nvml() as gpus, LockDirectory(str(here.locks)) as locks:
        gpus.sees_all = seen_from == "host"  # wherever the tests run
        states = {row.device.number: SAID[row.state] for row in snapshot.take_snapshot(gpus).rows}
        outcome = attempt(AttemptContext(Request(), gpus, locks, cuda_environment.read(), held={}))
        if not isinstance(outcome, Granted):
            return states, NOTHING
        (locked,) = outcome.locked
        locked.lock.release()
        return states, locked.device.number


def test_a_disagreement_is_one() -> None:
    """What a file says of the product is not what it says of a person, for a GPU that is there."""
    for name, posted in POSTED.items():
        for number, word in posted.product.items():
            assert posted.people[number] != word, (name, number)
        if posted.takes:
            assert posted.people.get(posted.takes) != "free", name
            assert posted.takes != NOTHING or "free" in posted.people.values(), name


def test_the_corpus_is_large_and_of_many_kinds() -> None:
    """There are 60 outputs from 25 kinds or more, each with an address and a listed kind."""
    kinds = re.findall(r"^\| (?!kind|-|`|word|output)([^|]+) \|$", page("README.md"), re.MULTILINE)
    assert len(kinds) == len(set(kinds)) > LEAST_KINDS
    for name, posted in POSTED.items():
        assert posted.kind in kinds, name
        assert posted.seen_from in PLACES, name
        assert posted.addresses, name
        assert all(re.fullmatch(r"https?://\S+/\S+", each) for each in posted.addresses), name
    assert len(POSTED) >= LEAST_FILES
    assert len({posted.kind for posted in POSTED.values()}) >= LEAST_KINDS


def test_the_numbers_that_readers_are_told() -> None:
    """The page "Where it works" names the outputs, kinds and GPUs, and how many agree."""
    told = " ".join((ROOT / "docs" / "machines.md").read_text().split())
    gpus, apart = numbers()
    kinds = len({posted.kind for posted in POSTED.values()})
    assert f"{len(POSTED)} outputs from {kinds} kinds of machine" in told
    assert f"{gpus - sum(apart.values())} of {gpus} GPUs" in told


def test_the_differences_that_readers_are_told() -> None:
    """The page says how many GPUs are called free that are not, and how many the reverse."""
    told = " ".join((ROOT / "docs" / "machines.md").read_text().split())
    _, apart = numbers()
    assert f"{apart['free']} GPUs that a person would not take" in told
    assert f"{apart.total() - apart['free']} that a person would take" in told


def numbers() -> tuple[int, Counter[str]]:
    """Return the number of GPUs, and of those where the product disagrees, by what it says."""
    gpus = sum(len(posted.people) for posted in POSTED.values())
    return gpus, Counter(word for posted in POSTED.values() for word in posted.product.values())


def page(name: str) -> str:
    return (FOLDER / name).read_text()
