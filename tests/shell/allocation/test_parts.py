"""A part of a GPU, in one process: what is counted, which GPU is taken, and asking again."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.model.devices import State
from tests.support.locked import OBSTACLES, have, locked, obstructed
from tests.support.offers import EnoughError
from tests.support.reserving import got, refused, variables

if TYPE_CHECKING:
    from tests.support.here import Here

from typing import TYPE_CHECKING

from tests.support.locked import needs_root
from tests.support.parts import ONE, TOTAL, part, promised, records, room, rows

if TYPE_CHECKING:
    from tests.support.here import Here


UID, OTHER_UID = os.geteuid(), 65534


# -- what is counted -------------------------------------------------------------------------------


@pytest.fixture
def one(here: Here) -> Here:
    """Make a machine with one idle GPU, and the test process is on it."""
    here.write(ONE)
    return here


def test_the_variables_of_a_part(here: Here) -> None:
    """CUDA_DEVICE_MEMORY is the size of the part in MiB, rounded down, once for each GPU."""
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
        (f"{ONE}  reserved 500", [], 9500),
        (ONE, [4000], 6000),
        (ONE, [4000, 5000, 250.5], 749.5),
        (f"{ONE}  reserved 500", [4000], 5500),
        (USED, [], 8000),
        (USED, [4000], 4000),
        (f"{USED}  reserved 500", [4000], 3500),
        (f"{ONE}  used 900", [4000], 5100),
        (f"{ONE}  graphics 4321000 300", [4000], 5700),
        (f"{ONE}  limit 2000", [4000], 6000),  # of the control group, not of the GPU
        (ONE, [8999.5], 1000.5),
    ],
)
def test_room(here: Here, scenario: str, parts: list[object], left: float) -> None:
    """A part can be had up to what the driver, the sharers' sizes and strangers' use leave."""
    here.write(scenario)
    with promised(here, gpu0=parts):
        if parts or scenario == USED:
            assert room(left + 1) == left
        if "compute" in scenario:
            with pytest.warns(reserve_gpu.ReserveGPUWarning, match="busy"):
                assert part(left) == "0"
        else:
            assert part(left) == "0"


def test_a_refusal_names_all_who_have_a_part(one: Here) -> None:
    """Who finds a GPU full is told of each sharer with the size that it was promised."""
    with promised(one, gpu0=[4000, 5000]):
        (row,) = rows(2000)
        assert [sharer.memory_limit_mib for sharer in row.holders] == [4000, 5000]
        assert variables() == {"CUDA_VISIBLE_DEVICES": ""}
    assert locked(one.locks) == set()


@pytest.mark.parametrize(("others_mib", "is_lost"), [(6000, False), (6001, True)])
def test_a_part_whose_file_was_deleted(one: Here, others_mib: int, *, is_lost: bool) -> None:
    """It is locked anew only as far as what others were promised meanwhile leaves it room."""
    part(4000)
    (deleted,) = one.locks.glob("*.share-*")
    deleted.unlink()
    with promised(one, gpu0=[others_mib]):
        if is_lost:
            with pytest.raises(reserve_gpu.LockError, match=r"now reserved by .*rival\.ipynb"):
                part(4000)
            assert len(locked(one.locks)) == 1
        else:
            with pytest.warns(reserve_gpu.ReserveGPUWarning, match="locked again"):
                assert part(4000) == "0"


def test_more_than_any_gpu_has(one: Here) -> None:
    """A part that is larger than every GPU can never be had, and it is said so."""
    with pytest.raises(reserve_gpu.ImpossibleError):
        part(TOTAL + 1)
    one.write(f"{ONE}  reserved 500")
    with pytest.raises(reserve_gpu.ImpossibleError):
        part(TOTAL - 499)


@pytest.mark.parametrize("devices", [None, "0"], ids=["any", "named"])
def test_whole_and_part_exclude_each_other(one: Here, devices: str | None) -> None:
    """Who has the whole GPU shares with nobody, and nobody gets it whole beside a part."""
    with one.rival("0"):
        (row,) = rows(1000, devices)
        assert row.state is State.RESERVED
    with promised(one, gpu0=[1, 2000]):
        with pytest.raises(reserve_gpu.NoFreeDeviceError) as refused:
            got(devices)
        (row,) = refused.value.rows
        assert [sharer.memory_limit_mib for sharer in row.holders] == [1, 2000]
        assert " 0.0 of <0.1 GiB" in str(refused.value)
        assert " 0.0 of 2.0 GiB" in str(refused.value)


@pytest.mark.parametrize("mode", ["prohibited", "exclusive_process"])
def test_where_cuda_lets_nobody_on(one: Here, mode: str) -> None:
    """A GPU that CUDA would not let one more process onto has no room beside another."""
    one.write(f"{ONE}  mode {mode}")
    with promised(one, gpu0=[1000]):
        for devices in (None, "0"):
            assert rows(1000, devices)


def test_memory_that_can_not_be_read(here: Here) -> None:
    """Of a GPU whose memory can't be read no part is promised, named or not."""
    here.write(f"{ONE}fail nvmlDeviceGetMemoryInfo * 4\nfail nvmlDeviceGetMemoryInfo_v2 * 4")
    for devices in (None, "0"):
        with pytest.raises(reserve_gpu.ReserveGPUError):
            part(1000, devices)
    assert locked(here.locks) == set()


# -- records of others -----------------------------------------------------------------------------

SENSELESS = [-1, 0, float("nan"), float("inf"), 1e300, 10**400, True, "10", "", [1], {}, None]


@pytest.mark.parametrize("size", SENSELESS, ids=repr)
def test_a_size_that_makes_no_sense(one: Here, size: object) -> None:
    """A sharer whose size makes no sense counts as the whole GPU."""
    with promised(one, gpu0=[size]):
        assert room(1000) == 0


CONTENTS = {
    "empty": b"",
    "truncated": b'{"pid": 1, "part_mib": 10',
    "no object": b"[100]",
    "binary": b"\x00\xff\xfe",
    "deep": b"[" * 50_000,
    "huge": json.dumps({"part_mib": 100, "note": "x" * 70_000}).encode(),
    "twice": b'{"part_mib": 100, "part_mib": -1}',
}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_record_that_makes_no_sense(one: Here, content: str) -> None:
    """A sharer whose record can't be read counts as the whole GPU."""
    with have(one.locks / f"{one.uuid('0')}.share-{UID}-0.lock", CONTENTS[content]):
        assert room(1000) == 0


def test_the_record_of_who_has_left(one: Here) -> None:
    """A size in a file that nobody has locked counts for nothing."""
    path = one.locks / f"{one.uuid('0')}.share-{UID}-7.lock"
    with have(path, b'{"part_mib": 9000}'):
        assert room(1001) == 1000
    assert path.read_bytes()
    assert part(TOTAL) == "0"


def test_a_second_name_is_no_sharer(one: Here) -> None:
    """A second name of a sharer's file neither counts twice nor makes room."""
    with promised(one, gpu0=[4000]):
        (name,) = (name for name in locked(one.locks) if ".share-" in name)
        (one.locks / "other").write_bytes(b'{"part_mib": 1}')
        with have(one.locks / "other", b'{"part_mib": -1}'):
            os.link(one.locks / "other", one.locks / f"{one.uuid('0')}.share-{UID}-9.lock")
            assert room(6001) == 6000
        assert (one.locks / name).exists()


@pytest.mark.parametrize("obstacle", [name for name in OBSTACLES if name != "device node"])
def test_what_is_no_file_is_no_sharer(one: Here, obstacle: str) -> None:
    """What stands in the place of a sharer's file has no part, and stops nobody."""
    with obstructed(one.locks / f"{one.uuid('0')}.share-{UID}-0.lock", obstacle):
        assert part(TOTAL) == "0"
        reserve_gpu.release()


# -- which GPU -------------------------------------------------------------------------------------

SIZES = [(1000, "0"), (2000, "0"), (2001, "1"), (5000, "1"), (5001, "2"), (10_000, "2")]


@pytest.mark.parametrize(("mib", "expected"), SIZES)
def test_best_fit(here: Here, mib: float, expected: str) -> None:
    """The fullest GPU that still has room is taken, whatever its number."""
    here.write(ONE * 3)
    with promised(here, gpu0=[5000, 3000], gpu1=[5000]):
        assert part(mib) == expected


def test_a_small_whole_one_stays_whole(here: Here) -> None:
    """A GPU that others have a part of is taken before a smaller one that is idle."""
    here.write("gpu\n  memory 16000\ngpu\n  memory 80000\n")
    with promised(here, gpu1=[50_000]):
        assert part(10_000) == "1"


def test_strangers_come_last(here: Here) -> None:
    """Beside one who was promised nothing, and may use more, a part is had only for want of others.

    With a warning then.
    """
    here.write(f"{ONE}  compute 4321000 5000\n{ONE}")
    assert part(3000) == "1"
    reserve_gpu.release()
    with (
        promised(here, gpu1=[9000]),
        pytest.warns(reserve_gpu.ReserveGPUWarning, match="without a reservation"),
    ):
        assert part(3000) == "0"


def test_a_part_of_each_of_two(here: Here) -> None:
    """Who asks for two gets a part of each of the two fullest that have room, or of none."""
    here.write(ONE * 4)
    with promised(here, gpu0=[9000], gpu1=[6000], gpu3=[2000]):
        assert part(3000, count=2) == "1,3"
        assert records(here).count(3000) == 2
        assert sorted(part(1000, count=2).split(",")) == ["1", "3"]  # what it has already
        reserve_gpu.release()
        found = rows(9000, count=2)
        assert [r.would_be_taken for r in found] == [False, False, True, False]
        assert sorted(map(str, records(here))) == ["2000", "6000", "9000"]  # the others' alone


def test_named(here: Here) -> None:
    """A named GPU is taken, full ones beside it or not, and refused with what would fit."""
    here.write(ONE * 2)
    with promised(here, gpu0=[8000]):
        assert part(1000, "1") == "1"
        reserve_gpu.release()
        assert room(2001, "0") == 2000
        assert part(2000, "0,1") == "0,1"


def test_other_wishes(here: Here) -> None:
    """What else is asked of a GPU holds for a part as well."""
    here.write("".join(f"gpu\n  name {name}\n  memory {mib}\n" for name, mib in WISHED))
    with promised(here, gpu0=[100], gpu1=[100], gpu2=[100]):
        assert part(1000) == "0"
        reserve_gpu.release()
        assert part(1000, min_memory="15000MiB") == "1"
        reserve_gpu.release()
        assert part(1000, name="A100") == "2"


WISHED = [("T4", 10_000), ("T4", 16_000), ("A100", 40_000)]


def test_optional(one: Here) -> None:
    """With --optional a cell goes on without a part where there is no room."""
    shell = one.shell()
    with promised(one, gpu0=[9000]):
        refused = shell.run("%reserve_gpu --memory 2000MiB")
        assert refused.error == "NoFreeDeviceError"
        assert shell.run("%reserve_gpu --memory 2000MiB --optional").error is None
    assert reserve_gpu.current() is None


MIG = "gpu\n  mig on\n  instance 0\n    memory 4000\n  instance 1\n    memory 4000\n"


def test_a_part_of_an_instance(here: Here) -> None:
    """A part of a MIG instance is counted against that instance alone."""
    here.write(MIG)
    with promised(here, gpu0_0=[3000]):
        assert part(1000) == here.uuid("0:0")
        reserve_gpu.release()
        assert part(1001) == here.uuid("0:1")
        assert variables()["CUDA_DEVICE_MEMORY"] == "1001"
        reserve_gpu.release()
        assert room(1001, "0:0") == 1000
    with pytest.raises(reserve_gpu.ImpossibleError):
        part(4001)


# -- files of others -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [70_000, 1 << 42], ids=["64 KiB", "4 TiB"])
def test_a_lock_file_that_somebody_has_made_huge(one: Here, size: int) -> None:
    """Into a GPU's lock file, to which anybody can write, the record goes however long it is."""
    assert got() == "0"
    path = one.locks / f"{one.uuid('0')}.lock"
    os.truncate(path, size)
    reserve_gpu.reserve(note="mine")
    (holder,) = reserve_gpu.status().rows[0].holders
    assert holder.note == "mine"
    reserve_gpu.release()
    os.truncate(path, size)
    assert got(note="again") == "0"
    assert json.loads(path.read_bytes())["note"] == "again"


# -- after a cell ----------------------------------------------------------------------------------


def test_who_is_over_is_told_after_a_cell(one: Here) -> None:
    """A kernel that uses more than its part is told so after the cell, once for each time."""
    shell = one.shell()

    def use(mib: int) -> str:
        one.write(f"{ONE}  compute {os.getpid()} {mib}\n")
        return shell.run("pass").stderr

    assert shell.run("%reserve_gpu --memory 2GB").error is None
    told = [use(mib) for mib in (1900, 1950, 1800, 2500)]
    assert [bool(text) for text in told] == [False, True, False, True], told
    assert "This kernel is using 1.9 GiB of GPU0, <0.1 GiB more than it has reserved" in told[1]
    assert "limited by CUPY_GPU_MEMORY_LIMIT" in told[1]
    assert "%reserve_gpu --memory 2GiB" in told[1]
    assert use(2600) == ""
    assert shell.run("%reserve_gpu --memory 3GB").error is None
    assert use(2700) == ""
    for _ in range(2):  # of each new part
        assert shell.run("%reserve_gpu --release").error is None
        assert " more than it has reserved" in shell.run("%reserve_gpu --memory 2GB").stderr


def test_a_part_of_one_gpu_is_none_of_another(here: Here) -> None:
    """What this process was promised of one GPU makes no room on the next one."""
    here.write(ONE + ONE)
    assert part(4000, "0") == "0"
    with promised(here, gpu1=[8000]):
        assert room(5000, "1") == TOTAL - 8000


def test_what_oneself_uses_is_room_for_a_larger_part(one: Here) -> None:
    """Memory that this process uses of its part does not count against a larger one."""
    assert part(4000) == "0"
    one.write(f"{ONE}  compute {os.getpid()} 3000\n")
    assert part(9000) == "0"


# -- a percentage ----------------------------------------------------------------------------------


def test_a_percentage_is_of_what_each_gpu_has(here: Here) -> None:
    """50% is half of what the GPU has that is taken, less what the driver keeps, in whole MiB."""
    here.write("gpu\n memory 8001\n reserved 100\ngpu\n memory 4000\n")
    for devices, expected in (("0", "3950"), ("1", "2000"), ("0,1", "2000,2000")):
        assert got(devices, memory="50%") == devices
        assert variables()["CUDA_DEVICE_MEMORY"] == expected
        assert records(here) == [float(mib) for mib in expected.split(",")]
        reserve_gpu.release()


def test_halves_fit_together(one: Here) -> None:
    """Two halves are a whole: a third one is refused, and told how much room there is."""
    with promised(one, gpu0=[TOTAL / 2]):
        assert got(memory="50%") == "0"
        reserve_gpu.release()
        with promised(one, gpu0=[2000]):
            text = refused(memory="50%")
        assert text.startswith("No GPU has room for 50%: the most is ")
        assert "reserve_gpu.reserve(memory='" in text


def test_the_same_percentage_again(here: Here) -> None:
    """The same percentage of what is held is met by it, a smaller one gives back the rest."""
    here.write(ONE * 2)
    held = reserve_gpu.reserve(memory="50%")
    assert held.memory_mib == TOTAL // 2
    with promised(here, gpu0=[TOTAL / 2]):
        assert reserve_gpu.reserve(memory="50%") is held
        assert reserve_gpu.reserve("0", memory="40%") is held
        assert held.memory_mib == TOTAL * 40 // 100
        assert room(TOTAL, "0") == TOTAL / 2


def test_a_ticket_has_the_size_of_a_percentage(one: Here) -> None:
    """Who waits for a percentage says in its ticket how many MiB that is."""
    with promised(one, gpu0=[TOTAL]):
        sizes: list[float] = []

        def look(_: object) -> None:
            tickets = [json.loads(path.read_text()) for path in one.locks.glob("queue-*")]
            sizes.extend(ticket["part_mib"] for ticket in tickets)
            raise EnoughError

        with pytest.raises(EnoughError):
            reserve_gpu.reserve(memory="25%", wait=60, progress=look)
    assert set(sizes) == {TOTAL * 25 // 100}


@needs_root
def test_a_file_of_another_owner(one: Here) -> None:
    """A sharer counts by the owner of the file, whatever name it has: it gives no room away."""
    path = one.locks / f"{one.uuid('0')}.share-{UID}-0.lock"
    with have(path, b'{"part_mib": 4000}'):
        os.chown(path, OTHER_UID, OTHER_UID)
        assert room(6001) == 6000
