"""A process that holds a part of a GPU requests the same, a smaller or a larger part, or all."""

from __future__ import annotations

from contextlib import nullcontext
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


def test_the_same_size_changes_nothing(one: Here) -> None:
    first = reserve_gpu.reserve(memory="4000MiB")
    with promised(one, gpu0=[6000]):
        assert reserve_gpu.reserve(memory="4000MiB") is first
        assert sorted(map(str, records(one))) == ["4000.0", "6000"]
    assert len(locked(one.locks)) == 1


def test_a_record_without_a_size_is_written_again(one: Here) -> None:
    """The next request restores a record that was lost, for example on a full disk."""
    reserve_gpu.reserve(memory="4000MiB", note="x")
    (name,) = locked(one.locks)
    (one.locks / name).write_text("{}")
    assert records(one) == [None]
    reserve_gpu.reserve(memory="4000MiB")
    assert records(one) == [4000]
    assert '"note": "x"' in (one.locks / name).read_text()


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


def test_a_part_that_grows_in_an_inner_block_stays_to_the_end_of_the_outer_block(
    one: Here,
) -> None:
    """Another size does not make another reservation."""
    with reserve_gpu.reserve(memory="4000MiB") as outer:
        with reserve_gpu.reserve(memory="7000MiB") as inner:
            assert inner is outer
            assert (outer.memory_mib, outer.environ["CUDA_DEVICE_MEMORY"]) == (7000, "7000")
        assert reserve_gpu.current() is outer
        assert records(one) == [7000]
    assert reserve_gpu.current() is None
    assert locked(one.locks) == set()


def test_a_warning_that_is_an_error_keeps_the_larger_part(
    one: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    reservation = reserve_gpu.reserve(memory="4000MiB")
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", "1")
    with pytest.raises(reserve_gpu.ReserveGPUWarning):
        reserve_gpu.reserve(memory="7000MiB")
    assert reserve_gpu.current() is reservation
    assert records(one) == [7000]


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


def test_parts_of_other_gpus_replace_a_part(here: Here) -> None:
    here.write(ONE * 3)
    assert part(9000, "0") == "0"
    assert part(2000, "1") == "1"
    assert len(locked(here.locks)) == 1
    assert part(1000, "1,2") == "1,2"
    assert records(here) == [1000, 1000]
    assert part(3000, "2,1") == "2,1"
    assert size() == "3000,3000"


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


def test_a_part_can_grow_on_a_gpu_for_one_process(one: Here) -> None:
    """In exclusive process mode, no other process gets a part of the GPU."""
    one.write(f"{ONE}  mode exclusive_process\n")
    assert part(4000) == "0"
    assert part(7000) == "0"
    reserve_gpu.release()
    with promised(one, gpu0=[3000]):
        assert room(1000) == 0


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
    *({"for_": "2h"}, {"until": "23:59"}, {"idle": "1h"}, {"note": "thesis"}),
    {"for_": "2h", "if_wanted": True, "end_kernel": True},
]


@pytest.mark.parametrize("request_", LEASES_AND_NOTES, ids=str)
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_lease_or_a_note_alone_keeps_the_parts(
    here: Here, request_: dict[str, Any], *, is_shared: bool
) -> None:
    """Such a request extends all parts and keeps their size."""
    here.write(ONE * 2)
    first = reserve_gpu.reserve(memory="4000MiB", count=2)
    before = variables(), first.environ
    with promised(here, gpu0=[3000]) if is_shared else nullcontext():
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
        {"name": "", "min_memory": "1GB"},
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


def test_a_rule_limits_an_extended_part_from_its_first_reservation(one: Here) -> None:
    one.rules.write_text('[limits]\ntime = "2h"\n')
    until = reserve_gpu.reserve(memory="4000MiB").lease.until
    with pytest.warns(reserve_gpu.ReserveGPUWarning):
        assert reserve_gpu.reserve(for_="2h").lease.until == until
    assert records(one) == [4000]
