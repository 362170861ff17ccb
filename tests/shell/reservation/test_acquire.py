"""The Python interface: reserve, release, `with`, further requests, and the inherited limit."""

from __future__ import annotations

import gc
import json
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.devices import ComputeMode, Device, State, Unfit
from tests.support.locked import MUTEX, have, held, opened, texts
from tests.support.reserving import got, of_gpu, refused, variables

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


def test_a_release_without_a_reservation_does_nothing(here: Here) -> None:
    """It does not need the driver either."""
    os.environ[VISIBLE] = "1"
    assert reserve_gpu.release() == ()
    assert variables() == {VISIBLE: "1"}
    assert here.calls() == []


@pytest.mark.parametrize(
    ("devices", "count", "visible"),
    [
        (None, None, "0"),
        (None, 2, "0,1"),
        (1, None, "1"),
        (("1", "GPU-aaaa"), None, "1,0"),
        ("1 0", None, "1,0"),
        (iter([1]), None, "1"),
    ],
)
def test_devices_are_reserved_by_name_or_by_number(
    here: Here, devices: Any, count: int | None, visible: str
) -> None:
    """Named devices are reserved in that order."""
    here.write(TWO_GPUS)
    assert got(devices, count=count) == visible


@pytest.mark.parametrize(
    "arguments",
    [
        *({"devices": devices} for devices in ([], 2, [0, 0], "x", True, [None])),
        *({"count": 0}, {"count": "2"}, {"note": 5}),
    ],
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


@pytest.mark.parametrize(
    ("scenario", "arguments", "environ", "error"),
    [
        ("gpu", {"devices": "x"}, {}, reserve_gpu.RequestError),
        ("gpu", {"count": 2}, {}, reserve_gpu.ImpossibleError),
        (BUSY, {}, {}, reserve_gpu.NoFreeDeviceError),
        (BUSY, {"wait": 0}, {}, reserve_gpu.WaitTimeoutError),
        ("gpu\nfail nvmlInitWithFlags * 9", {}, {}, reserve_gpu.NoDriverError),
        ("gpu", {}, {"RESERVE_GPU_LOCK_DIR": "/proc/no"}, reserve_gpu.LockError),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_error_is_a_reserve_gpu_error(
    here: Here,
    scenario: str,
    arguments: dict[str, Any],
    environ: dict[str, str],
    error: type[Exception],
) -> None:
    """A RequestError is a ValueError as well."""
    here.write(scenario)
    os.environ.update(environ)
    with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
        reserve_gpu.reserve(**arguments)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError) is issubclass(error, reserve_gpu.RequestError)
    assert issubclass(reserve_gpu.TooLateError, reserve_gpu.ReserveGPUError)


@pytest.mark.full
def test_many_reservations_leave_no_descriptor_thread_or_object(here: Here) -> None:
    here.write(TWO_GPUS)

    def reserve_repeatedly(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            with reserve_gpu.reserve(memory="1GB"):
                reserve_gpu.reserve([0, 1])
            with pytest.raises(reserve_gpu.ImpossibleError):
                reserve_gpu.reserve(count=9)
            reserve_gpu.release()
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(gc.get_objects())

    before, after = reserve_repeatedly(10), reserve_repeatedly(60)
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 60


# -- the environment -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [{MEMORY: "123"}, {ORDER: "FASTEST_FIRST"}, {VISIBLE: "1", **IN_BUS_ORDER, MEMORY: ""}],
    ids=str,
)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.filterwarnings("ignore:You asked for")  # in a container such a GPU is unknown
def test_a_release_restores_every_variable(here: Here, before: dict[str, str], times: int) -> None:
    """If the driver reports no memory, an earlier CUDA_DEVICE_MEMORY is unset meanwhile."""
    here.write("gpu\ngpu\nfail nvmlDeviceGetMemoryInfo * 4\nfail nvmlDeviceGetMemoryInfo_v2 * 4")
    os.environ.update(before)
    for index in (1, 0)[:times]:
        if VISIBLE in before and index == 0:
            with pytest.raises(reserve_gpu.RequestError):
                reserve_gpu.reserve(index)  # outside the inherited limit
        else:
            reserve_gpu.reserve(index)
            assert variables() == {VISIBLE: str(index), **IN_BUS_ORDER}
    reserve_gpu.release()
    assert variables() == before


def test_a_release_keeps_a_variable_that_other_code_has_changed(here: Here) -> None:
    os.environ[VISIBLE] = "0,1"
    reserve_gpu.reserve()
    os.environ[VISIBLE] = "1"
    reserve_gpu.release()
    assert variables() == {VISIBLE: "1"}
    assert held(here) == []


@pytest.mark.parametrize("value", ["0", None])
def test_the_next_request_restores_changed_variables(here: Here, value: str | None) -> None:
    """There is one warning."""
    reserve_gpu.reserve(1)
    before = variables()
    if value is None:
        for name in before:
            del os.environ[name]
    else:
        os.environ[VISIBLE] = value
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="GPU1") as caught:
        reserve_gpu.reserve(1)
    assert len(texts(caught)) == 1
    assert (variables(), held(here)) == (before, [1])


# -- as a context manager --------------------------------------------------------------------------


def test_a_with_block_ends_its_reservation(here: Here) -> None:
    os.environ[VISIBLE] = "1"
    reservation = reserve_gpu.reserve()
    with reservation as inside:
        assert inside is reservation is reserve_gpu.current()
        assert held(here) == [1]
    assert (variables(), held(here)) == ({VISIBLE: "1"}, [])


def test_an_exception_in_a_with_block_ends_its_reservation(here: Here) -> None:
    with pytest.raises(ZeroDivisionError), reserve_gpu.reserve("0,1"):
        1 / 0  # noqa: B018 - it is raised
    assert (variables(), held(here)) == ({}, [])


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
        (1, {"count": 1}, "1"),
        (1, {"devices": "GPU-bbbb"}, "1"),
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


def test_a_request_for_held_devices_reads_only_these(here: Here) -> None:
    """It does not acquire the mutex."""
    reservation = reserve_gpu.reserve("1")
    before = len(here.calls())
    with opened(MUTEX) as times:
        for again in ({}, {"devices": "1"}, {"count": 1}, {"name": "gtx", "note": "mine"}):
            assert reserve_gpu.reserve(**again) is reservation
    assert times == []
    nvml_calls = [call for call in here.calls()[before:] if call.startswith("nvml")]
    assert {call.split()[1] for call in nvml_calls if " " in call} == {"1"}


def test_a_held_device_in_use_counts_as_free(here: Here) -> None:
    reserve_gpu.reserve(0)
    here.write("gpu\n  compute 4321000 3500\ngpu")
    assert got(count=2) == "0,1"


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
        ([1, 0], {"devices": 0}, [0]),
        ([0, 1, 2], {"devices": "2,0"}, [2, 0]),
        ([2, 0], {"count": 1}, [2]),
        ([0, 1, 2], {"count": 2}, [0, 1]),
        ([0, 1, 2], {"min_memory": 8000}, [1, 2]),
        ([0, 1, 2], {"min_memory": 8000, "count": 1}, [1]),
        ([0, 1, 2], {}, [0, 1, 2]),
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


def test_a_refusal_gives_a_reason_for_each_device(here: Here) -> None:
    """Afterwards no device is visible until a release."""
    here.write(
        "gpu\n compute 4321000 3500\n"
        "gpu\n memory 8192\n used 3000\n"
        "gpu\n mode prohibited\n"
        "gpu\n mps 777 100\n"
        "gpu\n"
        "gpu\nfail nvmlDeviceGetHandleByIndex_v2 5 15"
    )
    with here.rival("4"):
        text = refused()
    assert "3 busy, 1 prohibited, 1 reserved, 1 broken" in text.splitlines()[0]
    reasons = ["4321000", "2.9 GiB", "prohibited", "777", f"pid {os.getpid()}", "lost"]
    for index, reason in enumerate(reasons):
        assert reason in of_gpu(text, str(index))
    assert variables() == {VISIBLE: ""}
    reserve_gpu.release()
    assert variables() == {}


def test_a_refusal_of_a_named_gpu_names_the_free_gpus(here: Here) -> None:
    """Only GPUs within the inherited limit are named."""
    here.write("gpu\ngpu\n compute 5000001 29000\ngpu\ngpu\n")
    with here.rival("0"):
        assert "GPU2 and GPU3 are free: reserve_gpu.reserve()\n" in refused("0")
        assert "GPU2 and GPU3 are free: reserve_gpu.reserve(count=2)\n" in refused("0,1")
        os.environ[VISIBLE] = "0,1"
        assert " are free: " not in refused("0,1")


def test_a_named_gpu_in_use_is_shown_as_busy(here: Here) -> None:
    """A refusal because of another GPU does not call it free, although it would be reserved."""
    here.write("gpu\n compute 5000001 29000\ngpu\ngpu\n")
    with here.rival("1"):
        error = refusal("0,1")
    assert of_gpu(str(error)).startswith("busy")
    assert "5000001" in of_gpu(str(error))
    assert [row.would_be_taken for row in error.rows] == [True, False]


def test_a_refusal_contains_the_state_of_each_device(here: Here) -> None:
    """Programs can read the use, the processes and the reason of each device."""
    here.write(
        f"{TWO_GPUS}gpu\n compute 4321000 3500\ngpu\n mode prohibited\ngpu\n"
        "fail nvmlDeviceGetHandleByIndex_v2 4 15"
    )
    error = refusal(count=2, min_memory="6GiB")
    unfit, free, busy, prohibited, lost = error.rows
    states = [row.state for row in error.rows]
    assert states == [State.UNFIT, State.FREE, State.BUSY, State.PROHIBITED, State.UNFIT]
    assert unfit.unfit
    assert lost.unfit is Unfit.UNREADABLE
    assert isinstance(free.device, Device)
    assert [row.would_be_taken for row in (free, busy)] == [True, False]
    assert busy.usage
    assert (busy.usage.compute, busy.usage.used_mib) == (1, 3500)
    assert busy.processes
    assert [process.pid for process in busy.processes] == [4321000]
    assert prohibited.usage
    assert prohibited.usage.mode is ComputeMode.PROHIBITED
    with here.rival("2", note="long"):
        reserved = refusal(count=2, min_memory="6GiB").rows[2]
    assert [(holder.pid, holder.note) for holder in reserved.holders] == [(os.getpid(), "long")]
    assert reserved.usage
    assert reserved.usage.compute == 1
    assert (lost.label, lost.holders) == ("GPU4", ())
    assert "lost" in (lost.reason or "")


def test_a_refusal_can_be_sent_to_another_process(here: Here) -> None:
    here.write(BUSY)
    error = refusal()
    received = pickle.loads(pickle.dumps(error))  # noqa: S301 - this test's own data
    assert (str(received), received.rows) == (str(error), error.rows)


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


@pytest.mark.parametrize("wait", [None, True])
@pytest.mark.parametrize("wish", [{"name": "L40"}, {"min_memory": "500GB"}, {"memory": "500GB"}])
def test_a_gpu_that_can_not_be_read_does_not_make_a_request_possible(
    here: Here, wish: dict[str, Any], *, wait: bool | None
) -> None:
    """If no readable GPU is suitable, the request fails at once, and names the fault."""
    here.write("gpu\n name NVIDIA A100\ngpu\nfail nvmlDeviceGetHandleByIndex_v2 1 15")
    with pytest.raises(reserve_gpu.ImpossibleError, match="GPU1 can't be read: GPU is lost"):
        reserve_gpu.reserve(wait=wait, **wish)
    assert variables() == {}


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


# -- several requests and devices ------------------------------------------------------------------


def test_simultaneous_requests_of_threads_get_the_same_reservation(here: Here) -> None:
    here.add("delay nvmlInitWithFlags * 0.05")
    barrier = threading.Barrier(8)

    def reserve_at_barrier(_: int) -> reserve_gpu.Reservation:
        barrier.wait()
        return reserve_gpu.reserve()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(reserve_at_barrier, range(8))))) == 1
    assert (indices(), held(here)) == ([0], [0])


def test_many_gpus_are_checked_in_batches(here: Here) -> None:
    """To find the last of 64 GPUs free, the mutex is acquired once for several GPUs."""
    here.write("gpu\n" * 64)
    with ExitStack() as stack:
        for index in range(63):
            stack.enter_context(have(here.locks / f"{here.uuid(str(index))}.lock"))
        times = stack.enter_context(opened(MUTEX))
        assert got() == "63"
    assert 1 < len(times) < 32


@pytest.mark.full
def test_readings_that_hang_delay_other_requests_only_briefly(here: Here) -> None:
    """All readings together have two seconds; then other GPUs are checked."""
    here.write("gpu\n" * 4)
    for index in range(2):
        here.add(f"delay nvmlDeviceGetComputeRunningProcesses_v3 {index} 3600")
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(got(count=2)))
    asking.start()
    with LockDirectory() as directory:
        while not any("ComputeRunningProcesses" in call for call in here.calls()):
            assert asking.is_alive()
            time.sleep(0.001)
        with directory.mutex(limit_s=15):  # one call alone may take 20 s
            pass
    asking.join()
    assert answers == ["2,3"]


# -- the inherited limit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("1", "1"),
        ("1,0", "0"),
        ("GPU-bbbb", "1"),
        ("1,-1,0", "1"),
        ("1,7,0", "1"),
        ("1junk", "1"),
        ("", None),
        ("NoDevFiles", None),
        ("0,0", None),
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


def test_a_named_device_outside_the_inherited_limit_is_refused(here: Here) -> None:
    """The error names the devices within the limit."""
    os.environ[VISIBLE] = "1"
    with pytest.raises(reserve_gpu.RequestError) as caught:
        reserve_gpu.reserve("0")
    assert "CUDA_VISIBLE_DEVICES='1'" in str(caught.value)
    assert "to GPU1" in str(caught.value)
    assert (variables(), held(here)) == ({VISIBLE: "1"}, [])
    assert got("1") == "1"


def test_a_variable_that_hides_every_gpu_can_be_unset(here: Here) -> None:
    """Until then, a named device is refused for that reason."""
    os.environ[VISIBLE] = "-1"
    with pytest.raises(reserve_gpu.ImpossibleError, match="hides every GPU"):
        reserve_gpu.reserve("0")
    assert (variables(), held(here)) == ({VISIBLE: "-1"}, [])
    del os.environ[VISIBLE]
    assert got("0") == "0"


@pytest.mark.parametrize("name", ["cuda:0", "CUDA:0"])
def test_a_cuda_number_within_an_inherited_list_is_ambiguous(here: Here, name: str) -> None:
    os.environ[VISIBLE] = "1,0"
    with pytest.raises(reserve_gpu.RequestError, match="'1'"):
        reserve_gpu.reserve(name)
    assert (variables(), held(here)) == ({VISIBLE: "1,0"}, [])


def test_a_cuda_number_means_the_same_when_the_cell_is_run_again(here: Here) -> None:
    assert got("cuda:1") == "1"
    assert got("cuda:1") == "1"
    assert held(here) == [1]


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
