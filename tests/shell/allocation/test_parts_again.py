"""Who has a part of a GPU asks again: for the same, for less, for more, for the whole."""

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
    """Make a machine with one idle GPU, and the test process is on it."""
    here.write(ONE)
    return here


def test_the_same_again(one: Here) -> None:
    """The same size says it again and changes nothing, however full the GPU is meanwhile."""
    first = reserve_gpu.reserve(memory="4000MiB")
    with promised(one, gpu0=[6000]):
        assert reserve_gpu.reserve(memory="4000MiB") is first
        assert sorted(map(str, records(one))) == ["4000.0", "6000"]
    assert len(locked(one.locks)) == 1


def test_a_size_that_was_lost_is_said_again(one: Here) -> None:
    """A record without its size, as after a full disk, gets it back with the next call."""
    reserve_gpu.reserve(memory="4000MiB", note="x")
    (name,) = locked(one.locks)
    (one.locks / name).write_text("{}")
    assert records(one) == [None]
    reserve_gpu.reserve(memory="4000MiB")
    assert records(one) == [4000]
    assert '"note": "x"' in (one.locks / name).read_text()


def test_a_smaller_one_gives_back(one: Here) -> None:
    """A smaller size gives the rest back at once, and the variable says so."""
    assert part(9000) == "0"
    before = locked(one.locks)
    assert part(4000) == "0"
    assert locked(one.locks) == before
    assert records(one) == [4000]
    assert variables()["CUDA_DEVICE_MEMORY"] == "4000"


def test_a_larger_one_grows_in_place(one: Here) -> None:
    """A larger size is had on the same GPU where there is room, in the same lock."""
    one.write(ONE * 2)
    reserve_gpu.reserve(memory="4000MiB", note="until Friday")
    before = locked(one.locks)
    with promised(one, gpu0=[3000]):
        assert part(7000) == "0"
        assert before <= locked(one.locks)
        assert variables()["CUDA_DEVICE_MEMORY"] == "7000"
        assert 7000 in records(one)
    (row, _) = reserve_gpu.status().rows
    assert [holder.note for holder in row.holders] == ["until Friday"]


def test_a_part_that_can_not_grow_is_offered_elsewhere(one: Here) -> None:
    """Where a part has no room to grow another GPU that is free is offered by its name."""
    one.write(ONE * 2)
    reserve_gpu.reserve(memory="4000MiB")
    with promised(one, gpu0=[3000]):
        text = refused(memory="8000MiB")
        assert "GPU1 is free: reserve_gpu.reserve('1', memory='8000MiB')\n" in text
        assert got("1", memory="8000MiB") == "1"


def test_an_inner_block_that_grows_leaves_the_part_to_the_outer_one(one: Here) -> None:
    """Another size is the same reservation, so whoever counts on it keeps it to their own end."""
    with reserve_gpu.reserve(memory="4000MiB") as outer:
        with reserve_gpu.reserve(memory="7000MiB") as inner:
            assert inner is outer
            assert (outer.memory_mib, outer.environ["CUDA_DEVICE_MEMORY"]) == (7000, "7000")
        assert reserve_gpu.current() is outer
        assert records(one) == [7000]
    assert reserve_gpu.current() is None
    assert locked(one.locks) == set()


def test_growing_that_ends_in_a_warning_keeps_the_part(
    one: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where warnings are errors, who has a part and asks for more still has one."""
    reservation = reserve_gpu.reserve(memory="4000MiB")
    monkeypatch.setenv("CUPY_GPU_MEMORY_LIMIT", "1")
    with pytest.raises(reserve_gpu.ReserveGPUWarning):
        reserve_gpu.reserve(memory="7000MiB")
    assert reserve_gpu.current() is reservation
    assert records(one) == [7000]


def test_growing_counts_what_it_has_once(one: Here) -> None:
    """Who grows is refused what is not there, told the most that would fit, and keeps the part."""
    assert part(4000) == "0"
    before = variables()
    with promised(one, gpu0=[3000]):
        assert room(7001) == 7000
        assert variables() == before
        assert sorted(map(str, records(one))) == ["3000", "4000.0"]
    assert reserve_gpu.current()


def test_from_part_to_whole(one: Here) -> None:
    """Who alone has a part can have the GPU whole; beside others the part stays."""
    assert part(4000) == "0"
    with promised(one, gpu0=[3000]):
        with pytest.raises(reserve_gpu.NoFreeDeviceError):
            got("0")
        assert variables()["CUDA_DEVICE_MEMORY"] == "4000"
    assert got("0") == "0"
    assert variables()["CUDA_DEVICE_MEMORY"] == str(TOTAL)
    assert locked(one.locks) == {f"{one.uuid('0')}.lock"}


def test_from_whole_to_part(one: Here) -> None:
    """Who has a GPU whole can go down to a part of it, and lets others in."""
    assert got() == "0"
    assert part(4000) == "0"
    with promised(one, gpu0=[6000]):
        assert records(one) == [4000, 6000]
    assert variables()["CUDA_DEVICE_MEMORY"] == "4000"


def test_a_part_of_other_gpus(here: Here) -> None:
    """Who has a part of one GPU and asks for parts of others lets the first go."""
    here.write(ONE * 3)
    assert part(9000, "0") == "0"
    assert part(2000, "1") == "1"
    assert len(locked(here.locks)) == 1
    assert part(1000, "1,2") == "1,2"
    assert records(here) == [1000, 1000]
    assert part(3000, "2,1") == "2,1"
    assert variables()["CUDA_DEVICE_MEMORY"] == "3000,3000"


def test_growing_on_several_is_all_or_nothing(here: Here) -> None:
    """Who has a part of each of two grows on both or on none."""
    here.write(ONE * 2)
    assert part(4000, count=2) == "0,1"
    with promised(here, gpu1=[3000]):
        found = rows(8000)
        assert [row.state for row in found] == [State.RESERVED, State.FULL]
        assert [row.is_mine for row in found] == [True, True]
        assert sorted(map(str, records(here))) == ["3000", "4000.0", "4000.0"]
        assert part(7000) == "0,1"
    assert records(here) == [7000, 7000]


def test_growing_where_one_process_may_use_the_gpu(one: Here) -> None:
    """On a GPU for one process at a time who is alone with a part grows, and no other gets one."""
    one.write(f"{ONE}  mode exclusive_process\n")
    assert part(4000) == "0"
    assert part(7000) == "0"
    reserve_gpu.release()
    with promised(one, gpu0=[3000]):
        assert room(1000) == 0


END_OR_NOTE: list[dict[str, Any]] = [
    *({"for_": "2h"}, {"until": "23:59"}, {"idle": "1h"}, {"note": "thesis"}),
    *({"for_": "2h", "if_wanted": True, "end_kernel": True}, {"idle": "1h", "note": "thesis"}),
]


@pytest.mark.parametrize("wishes", END_OR_NOTE)
@pytest.mark.parametrize("is_shared", [True, False])
def test_an_end_or_a_note_alone_keeps_the_part(
    here: Here, wishes: dict[str, Any], *, is_shared: bool
) -> None:
    """`--for 2h` alone prolongs the parts that are held, with their caps, shared GPUs or not."""
    here.write(ONE * 2)
    first = reserve_gpu.reserve(memory="4000MiB", count=2)
    before = variables(), first.environ
    with promised(here, gpu0=[3000]) if is_shared else nullcontext():
        again = reserve_gpu.reserve(**wishes)
        assert again is first
        assert records(here).count(4000) == 2
    assert (variables(), again.environ, again.memory_mib) == (*before, 4000)
    assert (again.note, again.lease.has_end) == (wishes.get("note"), wishes != {"note": "thesis"})


@pytest.mark.parametrize("wishes", [{}, {"count": 1}, {"name": "", "min_memory": "1GB"}])
def test_a_request_without_an_end_or_a_note_is_for_a_whole_gpu(
    one: Here, wishes: dict[str, Any]
) -> None:
    """A request without an end or a note turns the own part into the whole GPU."""
    assert part(4000) == "0"
    reserve_gpu.reserve(**wishes)
    assert variables()["CUDA_DEVICE_MEMORY"] == str(TOTAL)


def test_an_end_with_another_wish_is_for_a_whole_gpu(one: Here) -> None:
    """A request with a number, a count or a model, and an end, is for whole GPUs."""
    others: list[dict[str, Any]] = [{"devices": "0"}, {"count": 1}, {"min_memory": "1GB"}]
    for wishes in others:
        assert part(4000) == "0"
        reserve_gpu.reserve(for_="2h", **wishes)
        assert variables()["CUDA_DEVICE_MEMORY"] == str(TOTAL)


def test_a_rule_binds_who_prolongs_a_part(one: Here) -> None:
    """The rule for a part that gets a new end counts from its first reservation."""
    one.rules.write_text('[limits]\ntime = "2h"\n')
    until = reserve_gpu.reserve(memory="4000MiB").lease.until
    told = "counts from the start of the reservation"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=told):
        assert reserve_gpu.reserve(for_="2h").lease.until == until
    assert records(one) == [4000]
