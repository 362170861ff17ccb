"""The Python interface: reserve, release, `with`, asking again, limits from outside."""

from __future__ import annotations

import gc
import json
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
    """Return what this process holds, in its order."""
    reservation = reserve_gpu.current()
    return [device.index for device in reservation.devices] if reservation else []


def driver_calls(here: Here) -> list[str]:
    """Return the calls of NVML so far; whether CUDA has started is asked of another library."""
    return [call for call in here.calls() if call.startswith("nvml")]


# -- reserve, current, release ---------------------------------------------------------------------


def test_reserve_current_release(here: Here) -> None:
    """reserve() sets the variables and holds the device; release() gives both back."""
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


def test_release_of_nothing(here: Here) -> None:
    """release() without a reservation does nothing, and needs no driver."""
    os.environ[VISIBLE] = "1"
    assert reserve_gpu.release() == ()
    assert variables() == {VISIBLE: "1"}
    assert here.calls() == []


@pytest.mark.parametrize("wait", [None, True])
@pytest.mark.parametrize("wish", [{"name": "L40"}, {"min_memory": "500GB"}, {"memory": "500GB"}])
def test_what_no_gpu_is_beside_a_lost_one(
    here: Here, wish: dict[str, Any], *, wait: bool | None
) -> None:
    """A GPU that can't be read is none of that name or size: nobody waits for it to become one."""
    here.write("gpu\n name NVIDIA A100\ngpu\nfail nvmlDeviceGetHandleByIndex_v2 1 15")
    lost = "GPU1 can't be read: GPU is lost"
    with pytest.raises(reserve_gpu.ImpossibleError, match=f"^Of 2 GPUs, none has .*; {lost}"):
        reserve_gpu.reserve(wait=wait, **wish)
    assert variables() == {}


@pytest.mark.parametrize(
    ("devices", "count", "visible"),
    [
        (None, None, "0"),
        (None, 2, "0,1"),
        (1, None, "1"),
        ("1", None, "1"),
        ([1, 0], None, "1,0"),
        (("1", "GPU-aaaa"), None, "1,0"),
        ("1 0", None, "1,0"),
        (iter([1]), None, "1"),
    ],
)
def test_arguments(here: Here, devices: Any, count: int | None, visible: str) -> None:
    """Devices are an index, a name or several of them, in this order; else count says how many."""
    here.write(TWO_GPUS)
    assert got(devices, count=count) == visible


@pytest.mark.parametrize(
    "arguments",
    [
        *({"devices": devices} for devices in ([], "", -1, 2, [0, 0], "x", True, [None])),
        *({"count": count} for count in (0, -1, "2", "x", True, 1.5)),
        *({"note": 5}, {"name": 5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [[], [1]], ids=["holding nothing", "holding one"])
def test_bad_arguments(here: Here, before: list[int], arguments: dict[str, Any]) -> None:
    """An argument that makes no sense is a RequestError in one line, and changes nothing."""
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
def test_errors_are_one_family(
    here: Here,
    scenario: str,
    arguments: dict[str, Any],
    environ: dict[str, str],
    error: type[Exception],
) -> None:
    """Every error of reserve() is a ReserveGPUError, and a bad request is a ValueError too."""
    here.write(scenario)
    os.environ.update(environ)
    with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
        reserve_gpu.reserve(**arguments)
    assert type(caught.value) is error
    assert isinstance(caught.value, ValueError) is issubclass(error, reserve_gpu.RequestError)
    assert issubclass(reserve_gpu.TooLateError, reserve_gpu.ReserveGPUError)


@pytest.mark.full
def test_reserving_often_leaves_nothing(here: Here) -> None:
    """Reserving and releasing again and again leaves no descriptor, thread or object behind."""
    here.write(TWO_GPUS)

    def often(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            with reserve_gpu.reserve(memory="1GB"):
                reserve_gpu.reserve([0, 1])
            with pytest.raises(reserve_gpu.ImpossibleError):
                reserve_gpu.reserve(count=9)
            reserve_gpu.release()
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(gc.get_objects())

    before, after = often(10), often(60)
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 60


# -- the environment -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        {},
        {MEMORY: "123"},
        {ORDER: "FASTEST_FIRST"},
        {VISIBLE: "1", **IN_BUS_ORDER, MEMORY: ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.filterwarnings("ignore:You asked for")  # in a container such a GPU is unknown
def test_environment_is_restored(here: Here, before: dict[str, str], times: int) -> None:
    """Release restores every variable exactly, also after several different reservations."""
    here.write("gpu\ngpu\nfail nvmlDeviceGetMemoryInfo * 4\nfail nvmlDeviceGetMemoryInfo_v2 * 4")
    os.environ.update(before)
    for index in (1, 0)[:times]:
        if VISIBLE in before and index == 0:
            with pytest.raises(reserve_gpu.RequestError):
                reserve_gpu.reserve(index)  # the limit stands
        else:
            reserve_gpu.reserve(index)
            # The driver reports no memory: the variable is not kept from before either.
            assert variables() == {VISIBLE: str(index), **IN_BUS_ORDER}
    reserve_gpu.release()
    assert variables() == before


def test_environment_that_somebody_changed_is_theirs(here: Here) -> None:
    """A variable that was changed while a device was held is not overwritten by its release."""
    os.environ[VISIBLE] = "0,1"
    reserve_gpu.reserve()
    os.environ[VISIBLE] = "1"
    reserve_gpu.release()
    assert variables() == {VISIBLE: "1"}
    assert held(here) == []


@pytest.mark.parametrize("value", ["0", None])
def test_variables_that_were_changed_are_set_again(here: Here, value: str | None) -> None:
    """Asking again mends the variables that somebody changed since, and a warning says so."""
    reserve_gpu.reserve(1)
    before = variables()
    if value is None:
        for name in before:
            del os.environ[name]
    else:
        os.environ[VISIBLE] = value
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match="set for GPU1 again") as caught:
        reserve_gpu.reserve(1)
    assert len(texts(caught)) == 1
    assert (variables(), held(here)) == (before, [1])


# -- as a context manager --------------------------------------------------------------------------


def test_with(here: Here) -> None:
    """In `with` the device is held; at its end it is free and the variables are as they were."""
    os.environ[VISIBLE] = "1"
    reservation = reserve_gpu.reserve()
    with reservation as inside:
        assert inside is reservation is reserve_gpu.current()
        assert held(here) == [1]
    assert (variables(), held(here)) == ({VISIBLE: "1"}, [])


def test_with_and_an_exception(here: Here) -> None:
    """An exception leaves `with` as itself, and the device is free."""
    with pytest.raises(ZeroDivisionError), reserve_gpu.reserve("0,1"):
        1 / 0  # noqa: B018 - it is raised
    assert (variables(), held(here)) == ({}, [])


def test_with_inside_with(here: Here) -> None:
    """A `with` that asks for what is held already does not release it; the outer one does."""
    with reserve_gpu.reserve(1) as outer:
        with reserve_gpu.reserve() as inner:
            assert inner is outer
        assert (indices(), held(here), variables()[VISIBLE]) == ([1], [1], "1")
    assert (indices(), held(here), variables()) == ([], [], {})


def test_old_reservation_lets_go_of_nothing_that_is_in_use(here: Here) -> None:
    """The end of an earlier `with` does not free a device that a later reservation took over."""
    with reserve_gpu.reserve(0):
        later = reserve_gpu.reserve([0, 1])
    assert (indices(), held(here), variables()[VISIBLE]) == ([0, 1], [0, 1], "0,1")
    later.release()
    assert (variables(), held(here)) == ({}, [])


def test_release_twice(here: Here) -> None:
    """A second release of a reservation leaves alone what was reserved since."""
    old = reserve_gpu.reserve(0)
    old.release()
    reserve_gpu.reserve(0)
    old.release()
    assert (indices(), held(here), variables()[VISIBLE]) == ([0], [0], "0")


def test_an_inner_call_keeps_nothing_alive(here: Here) -> None:
    """A library that asks again inside of a `with` does not keep the GPU beyond its end."""
    with reserve_gpu.reserve(0):
        reserve_gpu.reserve()
    assert (variables(), held(here)) == ({}, [])


def test_a_with_of_what_is_held_already_ends_nothing(here: Here) -> None:
    """A `with` in a process that has reserved before leaves that reservation as it is."""
    reserve_gpu.reserve(0)
    with reserve_gpu.reserve():
        pass
    assert (indices(), held(here)) == ([0], [0])


def test_a_released_reservation_can_not_be_entered(here: Here) -> None:
    """`with` on a reservation that was released is an error, not a block without a GPU."""
    reservation = reserve_gpu.reserve(0)
    with reservation:
        with reservation:
            pass
        assert reserve_gpu.current() is reservation
    assert held(here) == []
    with pytest.raises(reserve_gpu.RequestError, match="has been released"):
        reservation.__enter__()


# -- asking again ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then", "visible"),
    [
        (0, {"devices": 1}, "1"),
        (1, {"count": 2}, "0,1"),
        (0, {"count": 2}, "0,1"),
        (1, {"devices": [0, 1]}, "0,1"),
        ([0, 1], {}, "0,1"),
        ([1, 0], {}, "1,0"),
        ([1, 0], {"count": 2}, "1,0"),
        ([0, 1], {"devices": [1, 0]}, "1,0"),
        (1, {}, "1"),
        (1, {"count": 1}, "1"),
        (1, {"devices": "GPU-bbbb"}, "1"),
        (1, {"min_memory": 8000}, "1"),
        (0, {"min_memory": 8000}, "1"),
    ],
)
def test_asking_again(here: Here, first: Any, then: dict[str, Any], visible: str) -> None:
    """What is held is kept where it is what is asked for; else it is free for its holder."""
    here.write(TWO_GPUS)
    reserve_gpu.reserve(first)
    assert got(**then) == variables()[VISIBLE] == visible
    assert held(here) == [index for index in (0, 1) if str(index) in visible]


def test_asking_again_for_the_same_looks_at_nothing_else(here: Here) -> None:
    """A request for what is held looks at that GPU alone, and takes no mutex."""
    reservation = reserve_gpu.reserve("1")
    calls = driver_calls(here)
    with opened(MUTEX) as times:
        for again in ({}, {"devices": "1"}, {"count": 1}, {"name": "gtx", "note": "mine"}):
            assert reserve_gpu.reserve(**again) is reservation
    assert times == []
    looked_at = {call.split()[1] for call in driver_calls(here)[len(calls) :] if " " in call}
    assert looked_at == {"1"}


def test_held_counts_as_free_though_in_use(here: Here) -> None:
    """A GPU that is held counts as free for its holder although a process computes on it by now."""
    reserve_gpu.reserve(0)
    here.write("gpu\n  compute 4321000 3500\ngpu")
    assert got(count=2) == "0,1"


def test_another_that_cannot_be_had(here: Here) -> None:
    """If the other GPU can't be had, the first one stays, and so do the variables."""
    reserve_gpu.reserve(0)
    before = variables()
    with here.rival("1"):
        for wanted in ({"devices": 1}, {"devices": [0, 1]}, {"count": 2}):
            text = refused(**wanted)
            assert "This process keeps GPU0" in text
            assert "No GPU is visible" not in text
            assert (variables(), indices(), held(here)) == (before, [0], [0, 1])


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ([1, 0], {"devices": 0}, [0]),
        ([1, 0], {"devices": 1}, [1]),
        ([0, 1, 2], {"devices": "2,0"}, [2, 0]),
        ([0, 1, 2], {"count": 1}, [0]),
        ([2, 0], {"count": 1}, [2]),
        ([0, 1, 2], {"count": 2}, [0, 1]),
        ([0, 1, 2], {"min_memory": 8000}, [1, 2]),
        ([0, 1, 2], {"min_memory": 8000, "count": 1}, [1]),
        ([0, 1, 2], {}, [0, 1, 2]),
    ],
)
def test_a_smaller_wish(here: Here, first: Any, then: dict[str, Any], kept: list[int]) -> None:
    """A smaller wish is met by a part of what is held, which stays locked; the rest is released."""
    here.write(THREE_GPUS)
    old = reserve_gpu.reserve(first)
    with opened(MUTEX) as times:
        reservation = reserve_gpu.reserve(**then)
    assert (indices(), held(here)) == (kept, sorted(kept))
    assert variables()[VISIBLE] == ",".join(map(str, kept))
    assert variables()[MEMORY] == ",".join(["4038", "8192", "8192"][index] for index in kept)
    assert times == []  # nothing was taken anew
    if reservation is not old:
        old.release()
        assert held(here) == sorted(kept)
    reserve_gpu.release()
    assert (variables(), held(here)) == ({}, [])


def test_a_smaller_wish_inside_with(here: Here) -> None:
    """Inside of a `with` block a smaller wish takes nothing from it, and a warning says so."""
    with reserve_gpu.reserve("0,1") as outer:
        with pytest.warns(reserve_gpu.ReserveGPUWarning, match="GPU1 stays reserved as well"):
            assert reserve_gpu.reserve("0") is outer
        assert (indices(), held(here)) == ([0, 1], [0, 1])
    assert (indices(), held(here)) == ([], [])


@pytest.mark.parametrize(
    ("new", "expected"), [(None, "till noon"), ("till two", "till two"), ("", "")]
)
@pytest.mark.parametrize("again", [{"devices": "0"}, {"devices": "0,1"}], ids=["less", "the same"])
def test_the_note_stays(here: Here, again: dict[str, Any], new: str | None, expected: str) -> None:
    """Asking again for less, or the same, leaves the note that others read, unless there is one."""
    reserve_gpu.reserve("0,1", note="till noon")
    reserve_gpu.reserve(**again, note=new)
    record = json.loads((here.locks / f"{here.uuid('0')}.lock").read_bytes())
    assert record["note"] == expected


# -- what can't be had -----------------------------------------------------------------------------


def test_a_reason_for_each_device(here: Here) -> None:
    """Where nothing is free the error says of every device why, and none is visible after it."""
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
    first = text.splitlines()[0]
    states = "3 busy, 1 prohibited, 1 reserved, 1 broken"
    assert first == f"No free GPU: {states}.  5 x Stand-in and 1 that can't be read"
    parts = ["4321000", "2.9 GiB", "prohibited", "777", f"pid {os.getpid()}", "lost"]
    for index, part in enumerate(parts):
        assert part in of_gpu(text, str(index))
    assert variables() == {VISIBLE: ""}
    reserve_gpu.release()
    assert variables() == {}


def test_what_is_free_in_place_of_a_named_gpu(here: Here) -> None:
    """Whoever names a GPU that is taken reads which others are free, and what to type for one."""
    here.write("gpu\ngpu\n compute 5000001 29000\ngpu\ngpu\n")
    with here.rival("0"):
        assert "GPU2 and GPU3 are free: reserve_gpu.reserve()\n" in refused("0")
        assert "GPU2 and GPU3 are free: reserve_gpu.reserve(count=2)\n" in refused("0,1")
        os.environ[VISIBLE] = "0,1"  # others are not for this process
        assert " are free: " not in refused("0,1")


def test_a_named_gpu_in_use_is_not_called_free(here: Here) -> None:
    """What would be taken as it was named is said as it is, not as free."""
    here.write("gpu\n compute 5000001 29000\ngpu\ngpu\n")
    with here.rival("1"):
        named = refused("0,1")
        with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
            reserve_gpu.reserve("0,1")
    head = "None of GPU0 and GPU1 is free: 1 busy, 1 reserved.  2 x Stand-in"
    assert named.splitlines()[0] == head
    line = of_gpu(named)
    assert line.startswith("busy: no reservation: pid 5000001, ")
    assert line.endswith(", you would get it because you named it")
    assert [row.would_be_taken for row in caught.value.rows] == [True, False]


def test_refusals_are_for_programs(here: Here) -> None:
    """The error carries of each device its state, who has it, what uses it and what is wrong."""
    here.write(
        f"{TWO_GPUS}gpu\n compute 4321000 3500\ngpu\n mode prohibited\ngpu\n"
        "fail nvmlDeviceGetHandleByIndex_v2 4 15"
    )
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve(count=2, min_memory="6GiB")
    unfit, free, busy, prohibited, lost = caught.value.rows
    states = [row.state for row in caught.value.rows]
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
    assert (lost.label, lost.holders) == ("GPU4", ())
    assert "lost" in (lost.reason or "")


def test_a_refusal_goes_to_other_processes(here: Here) -> None:
    """A refusal that is sent to another process, as by a pool of workers, keeps its words."""
    here.write(BUSY)
    with pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    received = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert (str(received), received.rows) == (str(caught.value), caught.value.rows)
    assert str(received).startswith("No free GPU")


def test_who_holds_is_for_programs(here: Here) -> None:
    """Of what is reserved the error carries the holder, and what uses the device meanwhile."""
    here.write(BUSY)
    with here.rival("0", note="long"), pytest.raises(reserve_gpu.NoFreeDeviceError) as caught:
        reserve_gpu.reserve()
    (row,) = caught.value.rows
    assert (row.label, row.state) == ("GPU0", State.RESERVED)
    (holder,) = row.holders
    assert (holder.pid, holder.note) == (os.getpid(), "long")
    assert row.usage
    assert row.usage.compute == 1


def test_all_or_nothing(here: Here) -> None:
    """Of several devices none stays held if one can't be had, whether they are named or counted."""
    here.write("gpu\ngpu\ngpu")
    with here.rival("1"):
        for wanted in ({"devices": [0, 1]}, {"devices": [2, 1, 0]}, {"count": 3}):
            assert f"pid {os.getpid()}" in refused(**wanted)
            assert held(here) == [1]
        assert got(count=2) == "0,2"


@pytest.mark.parametrize(("before", "there"), [({}, "2 GPUs"), ({VISIBLE: "1"}, "1 GPU")], ids=str)
def test_impossible_count(here: Here, before: dict[str, str], there: str) -> None:
    """More GPUs than there are is a bad request that says how many there are."""
    os.environ.update(before)
    with pytest.raises(
        reserve_gpu.ImpossibleError, match=f"There (is|are) {there} here; you asked for 9"
    ):
        reserve_gpu.reserve(count=9)
    assert (variables(), held(here)) == (before, [])


def test_named_busy_device(here: Here) -> None:
    """A busy device that nobody reserved is taken if it is named; one warning names the pid."""
    here.write(BUSY)
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=r"GPU0.*4321000") as caught:
        reserve_gpu.reserve(0)
    assert len(texts(caught)) == 1
    assert held(here) == [0]
    reserve_gpu.reserve(0)  # it is said once: another warning would be an error here


def test_a_warning_that_is_an_error_leaves_nothing_held(here: Here) -> None:
    """Where warnings are errors, a reservation that would have warned is none."""
    here.write(BUSY)
    with pytest.raises(reserve_gpu.ReserveGPUWarning):
        reserve_gpu.reserve(0)
    assert (variables(), indices(), held(here)) == ({}, [], [])


def test_named_reserved_device(here: Here) -> None:
    """A device that somebody reserved is refused to others also if it is named."""
    with here.rival("0"):
        assert f"pid {os.getpid()}" in refused(0)
        assert variables() == {VISIBLE: ""}
        assert got() == "1"


# -- several at once -------------------------------------------------------------------------------


def test_threads(here: Here) -> None:
    """Eight threads of one process that ask at the same moment get one and the same reservation."""
    here.add("delay nvmlInitWithFlags * 0.05")
    barrier = threading.Barrier(8)

    def ask(_: int) -> reserve_gpu.Reservation:
        barrier.wait()
        return reserve_gpu.reserve()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(ask, range(8))))) == 1
    assert (indices(), held(here)) == ([0], [0])


def test_many_gpus_cost_few_turns(here: Here) -> None:
    """Where the last of 64 GPUs is the free one the mutex is taken for many of them at once."""
    here.write("gpu\n" * 64)
    descriptors = [have(here.locks / f"{here.uuid(str(index))}.lock") for index in range(63)]
    for descriptor in descriptors:
        descriptor.__enter__()
    try:
        with opened(MUTEX) as times:
            assert got() == "63"
    finally:
        for descriptor in descriptors:
            descriptor.__exit__(None, None, None)
    assert 1 < len(times) < 32  # one turn for each GPU would be 64


@pytest.mark.full
def test_readings_that_hang_do_not_keep_others_out(here: Here) -> None:
    """All readings of a look have two seconds together: then others can look, and GPUs are left."""
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
        with directory.mutex(limit_s=15):  # a call on its own may take 20
            pass
    asking.join()
    assert answers == ["2,3"]


# -- an inherited CUDA_VISIBLE_DEVICES -------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("1", "1"),
        ("0,1", "0"),
        ("1,0", "0"),
        ("GPU-bbbb2222-0000-0000-0000-000000000000", "1"),
        ("GPU-bbbb", "1"),
        ("1,-1,0", "1"),
        ("1,7,0", "1"),
        ("1junk", "1"),
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
        ("0,0", None),
        ("7", None),
        ("GPU-cccc", None),
    ],
)
@pytest.mark.parametrize("order", [{}, IN_BUS_ORDER], ids=["unordered", "in bus order"])
def test_inherited_limit(
    here: Here, value: str, visible: str | None, order: dict[str, str]
) -> None:
    """What is reserved is inside an inherited CUDA_VISIBLE_DEVICES, as CUDA reads it.

    If that leaves no GPU, nothing changes, and waiting does not help.
    """
    here.write(TWO_GPUS.replace("memory 8192", "memory 4038"))
    before = {VISIBLE: value, **order}
    os.environ.update(before)
    if visible is None:
        with pytest.raises(reserve_gpu.ImpossibleError) as caught:
            reserve_gpu.reserve(wait=True)
        assert str(caught.value).startswith(f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU")
        assert (caught.value.exit_code, caught.value.retry_after_s) == (2, None)
        assert variables() == before
    else:
        assert got() == visible
    reserve_gpu.release()
    assert variables() == before


def test_named_outside_the_limit(here: Here) -> None:
    """A named device outside the limit is a bad request that names what is inside."""
    os.environ[VISIBLE] = "1"
    with pytest.raises(reserve_gpu.RequestError) as caught:
        reserve_gpu.reserve("0")
    assert "CUDA_VISIBLE_DEVICES='1'" in str(caught.value)
    assert "to GPU1" in str(caught.value)
    assert (variables(), held(here)) == ({VISIBLE: "1"}, [])
    assert got("1") == "1"


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_a_named_device_if_all_are_hidden(here: Here, value: str) -> None:
    """If the variable hides every GPU, a named device is refused for that reason."""
    os.environ[VISIBLE] = value
    with pytest.raises(reserve_gpu.ImpossibleError, match="hides every GPU"):
        reserve_gpu.reserve("0")
    assert (variables(), held(here)) == ({VISIBLE: value}, [])


def test_a_hidden_gpu_can_be_reserved_once_the_variable_is_unset(here: Here) -> None:
    """After the variable that hides every GPU is unset, the same request gets a GPU."""
    os.environ[VISIBLE] = "-1"
    with pytest.raises(reserve_gpu.ImpossibleError):
        reserve_gpu.reserve()
    del os.environ[VISIBLE]
    assert got() == "0"
    assert held(here) == [0]


@pytest.mark.parametrize("name", ["cuda:0", "CUDA:0"])
def test_number_of_cuda_in_a_limit(here: Here, name: str) -> None:
    """`cuda:0` is refused where CUDA counts in an inherited list: what is meant is not clear."""
    os.environ[VISIBLE] = "1,0"
    with pytest.raises(reserve_gpu.RequestError, match="refers to the entry '1'"):
        reserve_gpu.reserve(name)
    assert (variables(), held(here)) == ({VISIBLE: "1,0"}, [])


def test_number_of_cuda(here: Here) -> None:
    """`cuda:1` is nvidia-smi's GPU 1, also when it is asked for again; so the cell can be rerun."""
    assert got("cuda:1") == "1"
    assert got("cuda:1") == "1"
    assert held(here) == [1]
    assert got("0-1") == "0,1"


def test_the_limit_stays_while_something_is_held(here: Here) -> None:
    """What this process itself has set is no limit; what was set before still is."""
    here.write(THREE_GPUS)
    os.environ.update({VISIBLE: "0,1", **IN_BUS_ORDER})
    assert got("1") == "1"
    assert got(count=2) == "0,1"
    with pytest.raises(reserve_gpu.RequestError, match="GPU2 is not in"):
        reserve_gpu.reserve("2")


TWO_SIZES = "gpu\n name A100\n memory 40960\ngpu\n name A100\n memory 81920\n"


@pytest.mark.parametrize("order", ["FASTEST_FIRST", ""])
@pytest.mark.parametrize("scenario", [None, TWO_SIZES], ids=["models", "sizes"])
def test_number_on_mixed_models(here: Here, order: str, scenario: str | None) -> None:
    """A number that may mean another GPU to CUDA than to NVML is refused, with the way out."""
    here.write(scenario) if scenario else here.use("mixed")
    os.environ.update({VISIBLE: "0", ORDER: order})
    with pytest.raises(reserve_gpu.RequestError, match="UUIDs instead of numbers") as caught:
        reserve_gpu.reserve()
    assert ("without CUDA_DEVICE_ORDER" in str(caught.value)) is not bool(order)
    assert ("CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(caught.value)) is not bool(order)
    assert ("with CUDA_DEVICE_ORDER='FASTEST_FIRST'" in str(caught.value)) is bool(order)
    assert variables()[VISIBLE] == "0"
    os.environ[ORDER] = "PCI_BUS_ID"
    assert got() == "0"


def test_what_this_process_has_is_above_it(here: Here) -> None:
    """Where all inside the limit is held by a process that this one descends from, that is said."""
    os.environ[VISIBLE] = "1"
    with here.rival("1"), pytest.raises(reserve_gpu.ReservedAboveError) as caught:
        reserve_gpu.reserve()
    assert variables() == {VISIBLE: "1"}
    assert [row.label for row in caught.value.rows] == ["GPU1"]
