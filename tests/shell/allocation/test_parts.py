"""Parts of a GPU in one process: the available memory, the chosen GPU, and percentages."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.model.devices import State
from tests.support.locked import locked
from tests.support.offers import EnoughError
from tests.support.parts import ONE, TOTAL, part, promised, records, room, rows
from tests.support.reserving import got, refused, variables

if TYPE_CHECKING:
    from tests.support.here import Here


@pytest.fixture
def one(here: Here) -> Here:
    """Return a machine with one idle GPU."""
    here.write(ONE)
    return here


# -- available memory ------------------------------------------------------------------------------


def test_the_variables_contain_the_size_of_each_part(here: Here) -> None:
    """CUDA_DEVICE_MEMORY is in MiB and rounded down; the record is exact."""
    here.write("gpu\n  memory 81920\ngpu\n  memory 81920")
    reserve_gpu.reserve(memory="10GB")
    assert variables()["CUDA_DEVICE_MEMORY"] == "9536"
    reserve_gpu.reserve("0,1", memory="10GB")
    assert variables()["CUDA_DEVICE_MEMORY"] == "9536,9536"
    assert records(here) == [pytest.approx(10**10 / 2**20)] * 2
    reserve_gpu.release()
    assert variables() == {}


USED = f"{ONE}  compute 4321000 1500\n  compute 4322 500\n"


@pytest.mark.parametrize(
    ("scenario", "parts", "left"),
    [
        (ONE, [4000, 5000, 250.5], 749.5),
        (f"{ONE}  reserved 500", [4000], 5500),
        (f"{USED}  reserved 500", [4000], 3500),
        (f"{ONE}  used 900", [4000], 5100),
    ],
)
def test_a_part_can_have_the_available_memory(
    here: Here, scenario: str, parts: list[object], left: float
) -> None:
    """Available is the memory that no driver, other part or unreserved process uses."""
    here.write(scenario)
    with promised(here, gpu0=parts):
        assert room(left + 1) == left
        if "compute" in scenario:
            with pytest.warns(reserve_gpu.ReserveGPUWarning, match="busy"):
                assert part(left) == "0"
        else:
            assert part(left) == "0"


@pytest.mark.parametrize(("others_mib", "is_lost"), [(6000, False), (6001, True)])
def test_a_part_whose_file_was_deleted_is_locked_again_if_there_is_room(
    one: Here, others_mib: int, *, is_lost: bool
) -> None:
    """If other parts leave too little memory, the part is lost with an error."""
    part(4000)
    (deleted,) = one.locks.glob("*.share-*")
    deleted.unlink()
    with promised(one, gpu0=[others_mib]):
        if is_lost:
            with pytest.raises(reserve_gpu.LockError, match=r"rival\.ipynb"):
                part(4000)
            assert len(locked(one.locks)) == 1
        else:
            with pytest.warns(reserve_gpu.ReserveGPUWarning, match="locked again"):
                assert part(4000) == "0"


def test_a_part_that_is_larger_than_every_gpu_is_impossible(one: Here) -> None:
    for scenario, usable_mib in ((ONE, TOTAL), (f"{ONE}  reserved 500", TOTAL - 500)):
        one.write(scenario)
        with pytest.raises(reserve_gpu.ImpossibleError):
            part(usable_mib + 1)


@pytest.mark.parametrize("devices", [None, "0"], ids=["any", "named"])
def test_a_gpu_is_reserved_whole_or_in_parts(one: Here, devices: str | None) -> None:
    """The refusal of a whole GPU shows the use and the size of each part."""
    with one.rival("0"):
        (row,) = rows(1000, devices)
        assert row.state is State.RESERVED
    with promised(one, gpu0=[1, 2000]):
        text = refused(devices)
        assert " 0.0 of <0.1 GiB" in text
        assert " 0.0 of 2.0 GiB" in text


def test_no_part_is_added_if_cuda_would_refuse_another_process(one: Here) -> None:
    one.write(f"{ONE}  mode exclusive_process")
    with promised(one, gpu0=[1000]):
        for devices in (None, "0"):
            assert rows(1000, devices)


def test_no_part_is_reserved_if_the_memory_can_not_be_read(here: Here) -> None:
    here.write(f"{ONE}fail nvmlDeviceGetMemoryInfo * 4\nfail nvmlDeviceGetMemoryInfo_v2 * 4")
    for devices in (None, "0"):
        with pytest.raises(reserve_gpu.ReserveGPUError):
            part(1000, devices)
    assert locked(here.locks) == set()


def test_own_use_does_not_prevent_a_larger_part(one: Here) -> None:
    assert part(4000) == "0"
    one.write(f"{ONE}  compute {os.getpid()} 3000\n")
    assert part(9000) == "0"


def test_a_part_of_one_gpu_makes_no_room_on_another(here: Here) -> None:
    here.write(ONE + ONE)
    assert part(4000, "0") == "0"
    with promised(here, gpu1=[8000]):
        assert room(5000, "1") == TOTAL - 8000


# -- records of other processes --------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, float("nan"), 10**400], ids=repr)
def test_a_part_with_an_invalid_size_counts_as_the_whole_gpu(one: Here, size: object) -> None:
    with promised(one, gpu0=[size]):
        assert room(1000) == 0


# -- the chosen GPU --------------------------------------------------------------------------------


@pytest.mark.parametrize(("mib", "expected"), [(2000, "0"), (2001, "1")])
def test_the_fullest_gpu_with_enough_memory_is_chosen(
    here: Here, mib: float, expected: str
) -> None:
    here.write(ONE * 3)
    with promised(here, gpu0=[5000, 3000], gpu1=[5000]):
        assert part(mib) == expected


def test_a_gpu_with_parts_is_chosen_before_a_smaller_idle_gpu(here: Here) -> None:
    here.write("gpu\n  memory 16000\ngpu\n  memory 80000\n")
    with promised(here, gpu1=[50_000]):
        assert part(10_000) == "1"


def test_a_gpu_with_unreserved_use_is_chosen_last(here: Here) -> None:
    """Such a process might use more memory later, so there is a warning."""
    here.write(f"{ONE}  compute 4321000 5000\n{ONE}")
    assert part(3000) == "1"
    reserve_gpu.release()
    with (
        promised(here, gpu1=[9000]),
        pytest.warns(reserve_gpu.ReserveGPUWarning, match="4321000"),
    ):
        assert part(3000) == "0"


def test_two_parts_are_on_the_two_fullest_gpus_with_enough_memory(here: Here) -> None:
    """If only one GPU has enough memory, neither part is reserved."""
    here.write(ONE * 4)
    with promised(here, gpu0=[9000], gpu1=[6000], gpu3=[2000]):
        assert part(3000, count=2) == "1,3"
        assert records(here).count(3000) == 2
        assert sorted(part(1000, count=2).split(",")) == ["1", "3"]  # which it has already
        reserve_gpu.release()
        found = rows(9000, count=2)
        assert [r.would_be_taken for r in found] == [False, False, True, False]
        assert sorted(map(str, records(here))) == ["2000", "6000", "9000"]


# -- after a cell ----------------------------------------------------------------------------------


def test_a_kernel_that_exceeds_its_part_is_warned_after_a_cell(one: Here) -> None:
    """The warning comes once each time the use exceeds the part, and once for each new part."""
    shell = one.shell()

    def warning_after_using(mib: int) -> str:
        one.write(f"{ONE}  compute {os.getpid()} {mib}\n")
        return shell.run("pass").stderr

    assert shell.run("%reserve_gpu --memory 2GB").error is None
    warnings = [warning_after_using(mib) for mib in (1900, 1950, 1800, 2500, 2600)]
    assert [bool(text) for text in warnings] == [False, True, False, True, False], warnings
    assert "1.9 GiB of GPU0" in warnings[1]
    assert "CUPY_GPU_MEMORY_LIMIT" in warnings[1]
    assert "%reserve_gpu --memory 2GiB" in warnings[1]
    assert shell.run("%reserve_gpu --memory 3GB").error is None
    assert warning_after_using(2700) == ""
    for _ in range(2):
        assert shell.run("%reserve_gpu --release").error is None
        assert "2.6 GiB of GPU0" in shell.run("%reserve_gpu --memory 2GB").stderr


# -- percentages -----------------------------------------------------------------------------------


def test_a_percentage_is_of_each_gpus_memory(here: Here) -> None:
    """The memory that the driver reserves does not count, and the size is in whole MiB."""
    here.write("gpu\n memory 8001\n reserved 100\ngpu\n memory 4000\n")
    for devices, expected in (("0", "3950"), ("0,1", "2000,2000")):
        assert got(devices, memory="50%") == devices
        assert variables()["CUDA_DEVICE_MEMORY"] == expected
        assert records(here) == [float(mib) for mib in expected.split(",")]
        reserve_gpu.release()


def test_the_ticket_of_a_waiter_for_a_percentage_contains_the_size(one: Here) -> None:
    with promised(one, gpu0=[TOTAL]):
        sizes: list[float] = []

        def read_tickets(_: object) -> None:
            tickets = [json.loads(path.read_text()) for path in one.locks.glob("queue-*")]
            sizes.extend(ticket["part_mib"] for ticket in tickets)
            raise EnoughError

        with pytest.raises(EnoughError):
            reserve_gpu.reserve(memory="25%", wait=60, progress=read_tickets)
    assert set(sizes) == {TOTAL * 25 // 100}
