"""The Python interface: reserve, release, `with`, further requests, and the inherited limit."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model.devices import State
from tests.support.locked import MUTEX, held, opened, texts
from tests.support.reserving import got, refused, variables

if TYPE_CHECKING:
    from tests.support.here import Here

TWO_GPUS = """
gpu
  uuid GPU-aaaa1111-0000-0000-0000-000000000000
  memory 4038
gpu
  uuid GPU-bbbb2222-0000-0000-0000-000000000000
  memory 8192
"""
THREE_GPUS = "gpu\n  memory 4038\ngpu\n  memory 8192\ngpu\n  memory 8192"
BUSY = "gpu\n  compute 4321000 3500\n"
VISIBLE, ORDER, MEMORY = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MEMORY"
IN_BUS_ORDER = {ORDER: "PCI_BUS_ID"}


def indices() -> list[int]:
    """Return the indices of the devices that this process holds, in its order."""
    reservation = reserve_gpu.current()
    return [device.index for device in reservation.devices] if reservation else []


def refusal(*devices: Any, **request: Any) -> reserve_gpu.NoFreeDeviceError:
    """Fail to reserve because no device is free, and return the error."""
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve(*devices, **request)
    return caught.value


# -- reserve, current, release ---------------------------------------------------------------------


def test_a_reservation_sets_the_variables_until_its_release(here: Here) -> None:
    here.write(TWO_GPUS)
    assert reserve_gpu.current() is None
    reservation = reserve_gpu.reserve()
    assert reserve_gpu.current() is reservation
    (device,) = reservation.devices
    assert (device.index, device.uuid) == (0, "GPU-aaaa1111-0000-0000-0000-000000000000")
    expected = {MEMORY: "4038", ORDER: "PCI_BUS_ID", VISIBLE: "0"}
    assert reservation.environ == variables() == expected
    assert held(here) == [0]
    assert reserve_gpu.release() == (device,)
    assert (reserve_gpu.current(), variables(), held(here)) == (None, {}, [])


@pytest.mark.parametrize(
    "arguments",
    [{"devices": []}, {"devices": 2}, {"devices": "x"}, {"count": 0}],
    ids=str,
)
@pytest.mark.parametrize("before", [[], [1]], ids=["holding nothing", "holding one"])
def test_an_invalid_request_changes_nothing(
    here: Here, before: list[int], arguments: dict[str, Any]
) -> None:
    """The RequestError has one line of text."""
    os.environ.update({VISIBLE: "0,1", **IN_BUS_ORDER})
    if before:
        reserve_gpu.reserve(before)
    expected = variables()
    with pytest.raises(reserve_gpu.RequestError) as caught:
        reserve_gpu.reserve(**arguments)
    assert str(caught.value)
    assert "\n" not in str(caught.value)
    assert (variables(), indices(), held(here)) == (expected, before, before)


# -- as a context manager --------------------------------------------------------------------------


def test_an_inner_request_for_the_same_does_not_change_the_end(here: Here) -> None:
    """The outer `with` block releases the device, whether or not the inner request is a block."""
    with reserve_gpu.reserve(1) as outer:
        with reserve_gpu.reserve() as inner:
            assert inner is outer
        assert (indices(), held(here), variables()[VISIBLE]) == ([1], [1], "1")
        reserve_gpu.reserve()
    assert (indices(), held(here), variables()) == ([], [], {})


def test_the_end_of_a_block_keeps_devices_of_a_later_reservation(here: Here) -> None:
    with reserve_gpu.reserve(0):
        later = reserve_gpu.reserve([0, 1])
    assert (indices(), held(here), variables()[VISIBLE]) == ([0, 1], [0, 1], "0,1")
    later.release()
    assert (variables(), held(here)) == ({}, [])


def test_a_second_release_keeps_a_later_reservation(here: Here) -> None:
    old = reserve_gpu.reserve(0)
    old.release()
    reserve_gpu.reserve(0)
    old.release()
    assert (indices(), held(here), variables()[VISIBLE]) == ([0], [0], "0")


def test_a_with_block_keeps_an_earlier_reservation(here: Here) -> None:
    reserve_gpu.reserve(0)
    with reserve_gpu.reserve():
        pass
    assert (indices(), held(here)) == ([0], [0])


def test_a_released_reservation_can_not_be_entered(here: Here) -> None:
    reservation = reserve_gpu.reserve(0)
    with reservation:
        with reservation:
            pass
        assert reserve_gpu.current() is reservation
    assert held(here) == []
    with pytest.raises(reserve_gpu.RequestError, match="has been released"):
        reservation.__enter__()


# -- further requests ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "visible"),
    [
        (0, {"devices": 1}, "1"),
        (1, {"count": 2}, "0,1"),
        ([1, 0], {}, "1,0"),
        ([1, 0], {"count": 2}, "1,0"),
        ([0, 1], {"devices": [1, 0]}, "1,0"),
        (0, {"min_memory": 8000}, "1"),
    ],
)
def test_another_request_keeps_suitable_devices(
    here: Here, first: Any, then: dict[str, Any], visible: str
) -> None:
    """Other devices are released, and held devices count as free for their holder."""
    here.write(TWO_GPUS)
    reserve_gpu.reserve(first)
    assert got(**then) == variables()[VISIBLE] == visible
    assert held(here) == [index for index in (0, 1) if str(index) in visible]


def test_a_refused_request_keeps_the_reservation(here: Here) -> None:
    """The refusal says that the process keeps its device."""
    reserve_gpu.reserve(0)
    before = variables()
    with here.rival("1"):
        for wanted in ({"devices": 1}, {"devices": [0, 1]}, {"count": 2}):
            text = refused(**wanted)
            assert "keeps GPU0" in text
            assert "No GPU is visible" not in text
            assert (variables(), indices(), held(here)) == (before, [0], [0, 1])


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ([0, 1, 2], {"devices": "2,0"}, [2, 0]),
        ([2, 0], {"count": 1}, [2]),
        ([0, 1, 2], {"min_memory": 8000, "count": 1}, [1]),
    ],
)
def test_a_smaller_request_releases_the_other_devices(
    here: Here, first: Any, then: dict[str, Any], kept: list[int]
) -> None:
    """The kept devices stay locked, and the mutex is not acquired."""
    here.write(THREE_GPUS)
    old = reserve_gpu.reserve(first)
    with opened(MUTEX) as times:
        reservation = reserve_gpu.reserve(**then)
    assert (indices(), held(here)) == (kept, sorted(kept))
    assert variables()[VISIBLE] == ",".join(map(str, kept))
    assert variables()[MEMORY] == ",".join(["4038", "8192", "8192"][index] for index in kept)
    assert times == []
    if reservation is not old:
        old.release()
        assert held(here) == sorted(kept)
    reserve_gpu.release()
    assert (variables(), held(here)) == ({}, [])


@pytest.mark.parametrize(
    ("new", "expected"), [(None, "till noon"), ("till two", "till two"), ("", "")]
)
@pytest.mark.parametrize("again", [{"devices": "0"}, {"devices": "0,1"}], ids=["less", "the same"])
def test_a_request_without_a_note_keeps_the_note(
    here: Here, again: dict[str, Any], new: str | None, expected: str
) -> None:
    reserve_gpu.reserve("0,1", note="till noon")
    reserve_gpu.reserve(**again, note=new)
    record = json.loads((here.locks / f"{here.uuid('0')}.lock").read_bytes())
    assert record["note"] == expected


# -- refusals --------------------------------------------------------------------------------------


def test_a_refusal_of_a_named_gpu_names_the_free_gpus(here: Here) -> None:
    """Only GPUs within the inherited limit are named."""
    here.write("gpu\ngpu\n compute 5000001 29000\ngpu\ngpu\n")
    with here.rival("0"):
        assert "GPU2 and GPU3 are free: reserve_gpu.reserve()\n" in refused("0")
        assert "GPU2 and GPU3 are free: reserve_gpu.reserve(count=2)\n" in refused("0,1")
        os.environ[VISIBLE] = "0,1"
        assert " are free: " not in refused("0,1")


def test_a_refusal_contains_the_state_of_each_device(here: Here) -> None:
    """Programs can read the use, the processes and the reason of each device."""
    here.write(
        f"{TWO_GPUS}gpu\n compute 4321000 3500\ngpu\n mode prohibited\ngpu\n"
        "fail nvmlDeviceGetHandleByIndex_v2 4 15"
    )
    error = refusal(count=2, min_memory="6GiB")
    unfit, free, busy, _, lost = error.rows
    states = [row.state for row in error.rows]
    assert states == [State.UNFIT, State.FREE, State.BUSY, State.PROHIBITED, State.UNFIT]
    assert unfit.unfit
    assert [row.would_be_taken for row in (free, busy)] == [True, False]
    assert busy.processes
    assert [process.pid for process in busy.processes] == [4321000]
    with here.rival("2", note="long"):
        reserved = refusal(count=2, min_memory="6GiB").rows[2]
    assert [(holder.pid, holder.note) for holder in reserved.holders] == [(os.getpid(), "long")]
    assert (lost.label, lost.holders) == ("GPU4", ())
    assert "lost" in (lost.reason or "")


def test_several_devices_are_reserved_together_or_not_at_all(here: Here) -> None:
    here.write("gpu\ngpu\ngpu")
    with here.rival("1"):
        for wanted in ({"devices": [2, 1, 0]}, {"count": 3}):
            assert State.RESERVED in [row.state for row in refusal(**wanted).rows]
            assert held(here) == [1]
        assert got(count=2) == "0,2"


@pytest.mark.parametrize(("before", "there"), [({}, "2 GPUs"), ({VISIBLE: "1"}, "1 GPU")], ids=str)
def test_more_devices_than_there_are_is_impossible(
    here: Here, before: dict[str, str], there: str
) -> None:
    """The error says how many devices are within the inherited limit."""
    os.environ.update(before)
    with pytest.raises(reserve_gpu.ImpossibleError, match=f"{there} here; you asked for 9"):
        reserve_gpu.reserve(count=9)
    assert (variables(), held(here)) == (before, [])


def test_a_busy_device_is_reserved_by_name_with_one_warning(here: Here) -> None:
    """If nothing changes, the next request does not warn again."""
    here.write(BUSY)
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=r"GPU0.*4321000") as caught:
        reserve_gpu.reserve(0)
    assert len(texts(caught)) == 1
    assert held(here) == [0]
    reserve_gpu.reserve(0)  # another warning would be an error


def test_a_warning_that_is_an_error_releases_the_device(here: Here) -> None:
    here.write(BUSY)
    with pytest.raises(reserve_gpu.ReserveGPUWarning):
        reserve_gpu.reserve(0)
    assert (variables(), indices(), held(here)) == ({}, [], [])


def test_a_device_that_an_ancestor_holds_is_reserved_above(here: Here) -> None:
    """The error says so if ancestors hold all devices within the inherited limit."""
    os.environ[VISIBLE] = "1"
    with here.rival("1"), pytest.raises(reserve_gpu.ReservedAboveError) as caught:
        reserve_gpu.reserve()
    assert variables() == {VISIBLE: "1"}
    assert [row.label for row in caught.value.rows] == ["GPU1"]


# -- the inherited limit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("1,0", "0"),
        ("1,7,0", "1"),
        ("", None),
        ("GPU-cccc", None),
    ],
)
@pytest.mark.parametrize("order", [{}, IN_BUS_ORDER], ids=["unordered", "in bus order"])
def test_only_devices_within_the_inherited_limit_are_reserved(
    here: Here, value: str, visible: str | None, order: dict[str, str]
) -> None:
    """CUDA_VISIBLE_DEVICES is read as CUDA reads it; if it hides every GPU, waiting is useless."""
    here.write(TWO_GPUS.replace("memory 8192", "memory 4038"))
    before = {VISIBLE: value, **order}
    os.environ.update(before)
    if visible is None:
        with pytest.raises(reserve_gpu.ImpossibleError) as caught:
            reserve_gpu.reserve(wait=True)
        assert f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU" in str(caught.value)
        assert (caught.value.exit_code, caught.value.retry_after_s) == (2, None)
        assert variables() == before
    else:
        assert got() == visible
    reserve_gpu.release()
    assert variables() == before


def test_a_cuda_number_within_an_inherited_list_is_ambiguous(here: Here) -> None:
    os.environ[VISIBLE] = "1,0"
    with pytest.raises(reserve_gpu.RequestError, match="'1'"):
        reserve_gpu.reserve("CUDA:0")
    assert (variables(), held(here)) == ({VISIBLE: "1,0"}, [])


def test_own_variables_are_not_an_inherited_limit(here: Here) -> None:
    """The variables from before the reservation still limit later requests."""
    here.write(THREE_GPUS)
    os.environ.update({VISIBLE: "0,1", **IN_BUS_ORDER})
    assert got("1") == "1"
    assert got(count=2) == "0,1"
    with pytest.raises(reserve_gpu.RequestError, match="GPU2 is not in"):
        reserve_gpu.reserve("2")


TWO_SIZES = "gpu\n name A100\n memory 40960\ngpu\n name A100\n memory 81920\n"


@pytest.mark.parametrize("order", ["FASTEST_FIRST", ""])
@pytest.mark.parametrize("scenario", [None, TWO_SIZES], ids=["models", "sizes"])
def test_inherited_numbers_of_different_gpus_need_the_bus_order(
    here: Here, order: str, scenario: str | None
) -> None:
    """CUDA may number such GPUs differently from NVML."""
    here.write(scenario) if scenario else here.use("mixed")
    os.environ.update({VISIBLE: "0", ORDER: order})
    with pytest.raises(reserve_gpu.RequestError, match="UUIDs") as caught:
        reserve_gpu.reserve()
    assert ("CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(caught.value)) is not bool(order)
    assert ("CUDA_DEVICE_ORDER='FASTEST_FIRST'" in str(caught.value)) is bool(order)
    assert variables()[VISIBLE] == "0"
    os.environ[ORDER] = "PCI_BUS_ID"
    assert got() == "0"
