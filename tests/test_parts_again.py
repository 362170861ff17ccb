"""Who has a part of a GPU asks again: for the same, for less, for more, for the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.model import State
from tests.locked import locked
from tests.reserving import got, refused, variables
from tests.test_parts import ONE, TOTAL, part, promised, records, room, rows

if TYPE_CHECKING:
    from tests.here import Here


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
