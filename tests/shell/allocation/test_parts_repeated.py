"""A process that holds a part of a GPU requests the same, a smaller or a larger part, or all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model.devices import State
from tests.support.locked import locked
from tests.support.parts import ONE, TOTAL, part, promised, records, room, rows
from tests.support.reserving import got, refused, variables

if TYPE_CHECKING:
    from tests.support.here import Here


@pytest.fixture
def one(here: Here) -> Here:
    """Return a machine with one idle GPU."""
    here.write(ONE)
    return here


def size() -> str | None:
    """Return the size of this process's parts, by the environment variable."""
    return variables().get("CUDA_DEVICE_MEMORY")


def test_a_smaller_part_uses_the_same_lock(one: Here) -> None:
    assert part(9000) == "0"
    before = locked(one.locks)
    assert part(4000) == "0"
    assert (locked(one.locks), records(one), size()) == (before, [4000], "4000")


def test_a_larger_part_uses_the_same_lock_if_there_is_room(one: Here) -> None:
    """The part grows on the same GPU, and its note stays."""
    one.write(ONE * 2)
    reserve_gpu.reserve(memory="4000MiB", note="until Friday")
    before = locked(one.locks)
    with promised(one, gpu0=[3000]):
        assert part(7000) == "0"
        assert before <= locked(one.locks)
        assert size() == "7000"
        assert 7000 in records(one)
    assert [holder.note for holder in reserve_gpu.status().rows[0].holders] == ["until Friday"]


def test_a_part_that_can_not_grow_stays(one: Here) -> None:
    """The refusal says how much fits, where the own part is counted once, and names a free GPU."""
    one.write(ONE * 2)
    assert part(4000) == "0"
    before = variables()
    with promised(one, gpu0=[3000]):
        assert rows(7001)[0].promisable_mib == 7000
        assert "reserve_gpu.reserve('1', memory='8000MiB')\n" in refused(memory="8000MiB")
        assert variables() == before
        assert sorted(map(str, records(one))) == ["3000", "4000.0"]
        assert got("1", memory="8000MiB") == "1"


def test_the_only_holder_of_a_part_can_get_the_whole_gpu(one: Here) -> None:
    """While there are other holders, the request is refused and the part stays."""
    assert part(4000) == "0"
    with promised(one, gpu0=[3000]):
        assert [row.state for row in rows(TOTAL, "0")] == [State.FULL]
        refused("0")
        assert size() == "4000"
    assert got("0") == "0"
    assert size() == str(TOTAL)
    assert locked(one.locks) == {f"{one.uuid('0')}.lock"}


def test_the_holder_of_a_whole_gpu_can_reduce_it_to_a_part(one: Here) -> None:
    """Other processes can then reserve the rest."""
    assert got() == "0"
    assert part(4000) == "0"
    with promised(one, gpu0=[6000]):
        assert records(one) == [4000, 6000]
    assert size() == "4000"


def test_several_parts_grow_together_or_not_at_all(here: Here) -> None:
    here.write(ONE * 2)
    assert part(4000, count=2) == "0,1"
    with promised(here, gpu1=[3000]):
        found = rows(8000)
        assert [row.state for row in found] == [State.RESERVED, State.FULL]
        assert [row.is_mine for row in found] == [True, True]
        assert sorted(map(str, records(here))) == ["3000", "4000.0", "4000.0"]
        assert part(7000) == "0,1"
    assert records(here) == [7000, 7000]


def test_the_same_percentage_keeps_the_part(here: Here) -> None:
    """A smaller percentage gives the rest back."""
    here.write(ONE * 2)
    held = reserve_gpu.reserve(memory="50%")
    assert held.memory_mib == TOTAL // 2
    with promised(here, gpu0=[TOTAL / 2]):
        assert reserve_gpu.reserve(memory="50%") is held
        assert reserve_gpu.reserve("0", memory="40%") is held
        assert held.memory_mib == TOTAL * 40 // 100
        assert room(TOTAL, "0") == TOTAL / 2


LEASES_AND_NOTES: list[dict[str, Any]] = [
    *({"for_": "2h"}, {"idle": "1h"}, {"note": "thesis"}),
]


@pytest.mark.parametrize("request_", LEASES_AND_NOTES, ids=str)
def test_a_lease_or_a_note_alone_keeps_the_parts(here: Here, request_: dict[str, Any]) -> None:
    """Such a request extends all parts and keeps their size."""
    here.write(ONE * 2)
    first = reserve_gpu.reserve(memory="4000MiB", count=2)
    before = variables(), first.environ
    with promised(here, gpu0=[3000]):
        again = reserve_gpu.reserve(**request_)
        assert again is first
        assert records(here).count(4000) == 2
    assert (variables(), again.environ, again.memory_mib) == (*before, 4000)
    assert (again.note, again.lease.has_end) == (
        request_.get("note"),
        request_ != {"note": "thesis"},
    )


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"for_": "2h", "devices": "0"},
        {"for_": "2h", "count": 1},
        {"for_": "2h", "min_memory": "1GB"},
    ],
    ids=str,
)
def test_any_other_request_is_for_a_whole_gpu(one: Here, request_: dict[str, Any]) -> None:
    """A request without a size turns the own part into the whole GPU."""
    assert part(4000) == "0"
    reserve_gpu.reserve(**request_)
    assert size() == str(TOTAL)
