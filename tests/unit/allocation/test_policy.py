"""Does it fit, which is best, will what is held do, can it ever be had? Tables of values."""

from __future__ import annotations

import pytest

from reserve_gpu.allocation import policy
from reserve_gpu.gpus.nvml import Link
from reserve_gpu.model.devices import ComputeMode, Device, Fault, State, Unfit, Usage
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from tests.support.holders import a_holder

A100 = Device(0, "GPU-a", name="NVIDIA A100-SXM4-40GB", bus_id="0000:01:00.0", memory_mib=40960)
T4 = Device(1, "GPU-b", name="Tesla T4", bus_id="0000:02:00.0", memory_mib=15360)
NAMELESS = Device(2, "GPU-c", bus_id="0000:03:00.0")
INSTANCE = Device(3, "MIG-d", name="NVIDIA A100 MIG 1g.5gb", memory_mib=4864, instance=0)
SECOND = Device(3, "MIG-e", name="NVIDIA A100 MIG 1g.5gb", memory_mib=4864, instance=1)

# -- fits? -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "request_", "driver", "reason"),
    [
        (A100, Request(), None, None),
        (NAMELESS, Request(), None, None),
        (A100, Request(min_memory_mib=40960), None, None),
        (A100, Request(min_memory_mib=40960.5), None, Unfit.MEMORY),
        (T4, Request(min_memory_mib=16384), None, Unfit.MEMORY),
        (NAMELESS, Request(min_memory_mib=1), None, Unfit.MEMORY_UNKNOWN),
        (INSTANCE, Request(min_memory_mib=5000), None, Unfit.MEMORY),
        (A100, Request(model="a100"), None, None),
        (A100, Request(model="SXM4-40gb"), None, None),
        (T4, Request(model="A100"), None, Unfit.MODEL),
        (NAMELESS, Request(model="A100"), None, Unfit.MODEL),
        (T4, Request(model="T4", min_memory_mib=20000), None, Unfit.MEMORY),
        (T4, Request(model="A100", min_memory_mib=20000), None, Unfit.MODEL),
        (INSTANCE, Request(), "550.54.15", None),
        (INSTANCE, Request(count=2), "550.54.15", Unfit.SECOND_INSTANCE),
        (INSTANCE, Request(("3:0", "3:1")), "550.54.15", Unfit.SECOND_INSTANCE),
        (INSTANCE, Request(count=2), "569.99", Unfit.SECOND_INSTANCE),
        (INSTANCE, Request(count=2), "570.26", None),
        (INSTANCE, Request(count=2), None, None),  # nobody can say
        (INSTANCE, Request(count=2), "of old", None),
        (A100, Request(count=2), "550.54.15", None),
        (Fault(1, "GPU is lost"), Request(count=2), None, None),
        (Fault(1, "GPU is lost"), Request(model="A100"), None, Unfit.UNREADABLE),
        (Fault(1, "GPU is lost"), Request(min_memory_mib=1), None, Unfit.UNREADABLE),
    ],
)
def test_unfit(
    device: Device | Fault, request_: Request, driver: str | None, reason: Unfit | None
) -> None:
    """A device fits if the text is in its name, its memory is enough, and CUDA lets it be used."""
    assert policy.unfit(device, request_, driver) is reason


IDLE = Usage(compute=0, mps=0, used_mib=0)
PART = Request(terms=ReservationTerms(Size(1024.0)))
EXCLUSIVE = Usage(compute=1, mode=ComputeMode.EXCLUSIVE_PROCESS)


@pytest.mark.parametrize(
    ("request_", "state", "reading", "expected"),
    [
        (Request(), State.IDLE, IDLE, True),
        (Request(("0",)), State.IDLE, IDLE, True),
        (PART, State.IDLE, IDLE, True),
        (Request(), State.BUSY, Usage(compute=1), False),
        (Request(), State.UNKNOWN, Usage(), False),
        (Request(("0",)), State.BUSY, Usage(compute=1), True),
        (Request(("0",)), State.UNKNOWN, Usage(), True),
        (Request(("0",)), State.BUSY, EXCLUSIVE, False),
        (Request(("0",)), State.PROHIBITED, Usage(mode=ComputeMode.PROHIBITED), False),
        # Whose processes they are can't be told, but for a part what others use is counted.
        (PART, State.BUSY, Usage(compute=1), True),
        (PART, State.BUSY, EXCLUSIVE, False),
        (PART, State.UNKNOWN, Usage(), False),
        (PART._replace(devices=("0",)), State.BUSY, Usage(compute=1), True),
    ],
)
def test_is_to_be_taken(request_: Request, state: State, reading: Usage, *, expected: bool) -> None:
    """What is in use is taken by name, or for a part; never where CUDA lets nobody on."""
    assert policy.should_take(request_, state, reading) is expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(), True),
        (Request(count=1), True),
        (Request(min_memory_mib=1, model="x"), True),
        (Request(count=2), False),
        (Request(("0",)), False),
        (PART, False),
    ],
)
def test_first_will_do(request_: Request, *, expected: bool) -> None:
    """The first free device is as good as any only where one is wanted, any one, not shared."""
    assert policy.first_will_do(request_) is expected


# -- can it ever be had? ---------------------------------------------------------------------------

UNFIT, FREE, BUSY = State.UNFIT, State.FREE, State.BUSY
RESERVED, AWAITED = State.RESERVED, State.AWAITED


def rows(*states: State, instances: int = 0) -> list[DeviceStatus]:
    """Return a row for each state. instances: how many of them, the last, are MIG instances."""
    whole = len(states) - instances
    return [
        DeviceStatus(Device(i, f"GPU-{i}", instance=None if i < whole else i), state)
        for i, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("given", "request_", "is_impossible", "may_come_free"),
    [
        (rows(BUSY), Request(), False, True),
        (rows(RESERVED), Request(), False, True),
        (rows(AWAITED), Request(), False, True),
        (rows(State.UNKNOWN), Request(), False, True),
        (rows(State.BROKEN), Request(), False, True),
        (rows(State.PROHIBITED), Request(), False, True),
        (rows(UNFIT, RESERVED), Request(), False, True),
        (rows(FREE, BUSY), Request(count=2), False, True),
        (rows(RESERVED, UNFIT, AWAITED), Request(count=2), False, True),
        # An inherited limit around nothing is no fault of the request, but nothing to wait for.
        (rows(), Request(), False, False),
        (rows(UNFIT), Request(model="h100"), True, False),
        (rows(BUSY), Request(count=2), True, False),
        (rows(FREE, UNFIT), Request(count=2), True, False),
        (rows(BUSY, BUSY), Request(count=9), True, False),
        (rows(BUSY, BUSY, instances=1), Request(), False, True),
        (rows(BUSY, BUSY, instances=1), Request(count=2), True, False),
        (rows(BUSY, BUSY, instances=2), Request(count=2), False, True),
        ([DeviceStatus(Fault(0, "lost"), State.BROKEN)], Request(), False, True),
        ([*rows(BUSY), DeviceStatus(Fault(1, "lost"), State.BROKEN)], Request(), False, True),
        ([*rows(UNFIT), DeviceStatus(Fault(1, "lost"), State.BROKEN)], Request(), True, False),
    ],
)
def test_impossible(
    given: list[DeviceStatus], request_: Request, *, is_impossible: bool, may_come_free: bool
) -> None:
    """It makes sense to wait where as many devices of one kind as are wanted would do, if free."""
    assert policy.is_impossible(given, request_) is is_impossible
    assert policy.may_come_free(given, request_) is may_come_free


HELD_BY_7 = DeviceStatus(A100, RESERVED, holders=(a_holder(7, seen=True),))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([HELD_BY_7], True),
        ([HELD_BY_7, DeviceStatus(T4, UNFIT)], True),
        ([HELD_BY_7, DeviceStatus(T4, RESERVED, holders=(a_holder(8, seen=True),))], True),
        ([HELD_BY_7, DeviceStatus(T4, RESERVED, holders=(a_holder(9, seen=True),))], False),
        ([HELD_BY_7, DeviceStatus(T4, BUSY)], False),
        (
            [DeviceStatus(A100, RESERVED, holders=(a_holder(7),))],
            False,
        ),  # by the record's word alone
        ([HELD_BY_7._replace(holders=(a_holder(9, seen=True), a_holder(7, seen=True)))], True),
        ([HELD_BY_7._replace(state=State.FULL)], False),  # others may make room
        ([DeviceStatus(T4, UNFIT)], False),
        ([], False),
    ],
)
def test_is_above(given: list[DeviceStatus], *, expected: bool) -> None:
    """What the processes hold that this one descends from is above it, by the kernel's word."""
    assert policy.is_above(given, {7, 8}) is expected


@pytest.mark.parametrize(
    ("states", "is_lively", "is_told", "seconds"),
    [
        ([RESERVED], False, True, 5.0),
        ([RESERVED, UNFIT, FREE], False, True, 5.0),
        ([RESERVED, AWAITED], False, True, 1.0),  # who is ahead may be stopped
        ([RESERVED, BUSY], False, True, 1.0),
        ([RESERVED, State.FULL], False, True, 1.0),  # somebody may use less of it
        ([State.UNKNOWN], False, True, 1.0),
        ([State.BROKEN], False, True, 1.0),
        ([State.PROHIBITED], False, True, 1.0),
        ([RESERVED], False, False, 1.0),
        ([RESERVED], True, True, 0.25),
        ([BUSY], True, False, 0.25),
    ],
)
def test_next_look(states: list[State], *, is_lively: bool, is_told: bool, seconds: float) -> None:
    """Who waits looks each second, seldom where the kernel tells of changes, often after one."""
    assert policy.next_check_s(rows(*states), is_lively=is_lively, is_told=is_told) == seconds


# -- will what is held do? -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "request_", "kept"),
    [
        ([], Request(), None),
        ([A100], Request(), [A100]),
        ([A100, T4], Request(), [A100, T4]),
        ([A100, T4], Request(count=2), [A100, T4]),
        ([A100, T4], Request(count=1), [A100]),
        ([T4, A100], Request(count=1), [T4]),
        ([A100], Request(count=2), None),
        ([A100], Request(("0",)), [A100]),
        ([A100], Request(("GPU-a",)), [A100]),
        ([A100], Request(("01:00.0",)), [A100]),
        ([A100], Request(("1",)), None),
        ([A100, T4], Request(("0",)), [A100]),
        ([A100, T4], Request(("1",)), [T4]),
        ([A100, T4], Request(("0", "1"), 2), [A100, T4]),
        ([A100, T4], Request(("1", "0"), 2), [T4, A100]),
        ([A100, T4], Request(("0", "0")), None),
        ([A100, T4], Request(("0", "GPU-a")), None),
        ([A100, T4], Request(("GPU-",)), None),  # the beginning of two
        ([A100, T4], Request(("1", "2")), None),
        ([INSTANCE], Request(("3:0",)), [INSTANCE]),
        ([INSTANCE], Request(("3",)), None),
        ([INSTANCE, SECOND], Request(("3:1",)), [SECOND]),
        ([A100], Request(min_memory_mib=40960), [A100]),
        ([A100, T4], Request(min_memory_mib=40960), [A100]),
        ([T4, A100], Request(min_memory_mib=40960, count=1), [A100]),
        ([T4], Request(min_memory_mib=40960), None),
        ([T4], Request(model="t4"), [T4]),
        ([T4], Request(model="a100"), None),
        ([A100, T4], Request(("0", "1"), model="t4"), None),
        ([A100], Request(terms=ReservationTerms(note="x")), [A100]),
    ],
)
def test_kept(held: list[Device], request_: Request, kept: list[Device] | None) -> None:
    """Of what is held what is named, in that order, else the first that fit, else all that do."""
    assert policy.matching_held(held, request_) == kept


@pytest.mark.parametrize(
    ("seen", "request_", "numbers"),
    [
        ([A100], Request(), ("0",)),
        ([A100], Request(("0",)), ("0",)),
        ([A100], Request(count=1, min_memory_mib=40960), ("0",)),
        ([INSTANCE], Request(("3:0",)), ("3:0",)),
        ([A100, T4], Request(("0", "1")), ("0", "1")),
        ([A100, T4], Request(count=2), ("0", "1")),
        ([T4, A100], Request(("1", "0")), ("1", "0")),
        ([A100], Request(terms=ReservationTerms(note="x")), ("0",)),
        ([A100], Request(("1",)), None),
        ([A100], Request(model="t4"), None),
        ([A100], Request(count=2), None),
        ([A100, T4], Request(), None),
        ([A100, T4], Request(count=1), None),
        ([A100, T4], Request(("0",)), None),
        ([A100, T4], Request(("1", "0")), None),
        ([A100, T4], Request(("0", "1", "2")), None),
        ([], Request(), None),
    ],
)
def test_reclaim(seen: list[Device], request_: Request, numbers: tuple[str, ...] | None) -> None:
    """Once CUDA has started, all that it sees can be reserved again, in its order, or nothing."""
    narrowed = policy.reclaim(request_, seen)
    assert (narrowed and narrowed.devices) == numbers
    if narrowed:
        assert narrowed.terms == request_.terms
        assert narrowed.needed == len(seen)


# -- which is best? --------------------------------------------------------------------------------


def pairs(one: Device, other: Device) -> int:
    """Make eight GPUs: NVLink in pairs, two pairs on a PCIe switch, the halves on two sockets."""
    a, b = one.index, other.index
    if a // 2 == b // 2:
        return Link.NVLINK
    return Link.SWITCH if a // 4 == b // 4 else Link.SYSTEM


def alike(_one: Device, _other: Device) -> int:
    return Link.SOCKET


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        ("01234567", 2, "01"),
        ("1234567", 2, "23"),
        ("134567", 2, "45"),
        ("1357", 2, "13"),
        ("0367", 2, "67"),
        ("1246", 2, "12"),
        ("01234567", 4, "0123"),
        ("0134567", 4, "4567"),
        ("0124567", 3, "012"),
        ("014567", 4, "4567"),
        ("02467", 3, "467"),
        ("0246", 3, "024"),
        ("01234567", 8, "01234567"),
        ("35", 2, "35"),
        ("357", 1, "3"),
    ],
)
def test_closest(free: str, count: int, chosen: str) -> None:
    """Those connected by NVLink come first, then by a switch; of equals the first; in bus order."""
    devices = [Device(int(index), f"GPU-{index}") for index in free]
    best = policy.closest(devices, count, pairs)
    assert "".join(str(device.index) for device in best) == chosen


@pytest.mark.parametrize("count", range(1, 9))
def test_closest_of_equals(count: int) -> None:
    """Where all are connected alike the first ones are taken."""
    devices = [Device(index, f"GPU-{index}") for index in range(8)]
    assert policy.closest(devices, count, alike) == devices[:count]


CROWD = {
    A100.uuid: (True, 300.0),
    T4.uuid: (False, 200.0),
    NAMELESS.uuid: (False, 100.0),
    INSTANCE.uuid: (False, 0.0),
    SECOND.uuid: (True, 0.0),
}


@pytest.mark.parametrize(
    ("devices", "request_", "chosen"),
    [
        ([T4, A100], Request(("1", "0")), [T4, A100]),
        ([T4], Request(("1", "0")), None),
        ([A100, T4], Request(), [A100]),
        ([], Request(), None),
        ([A100, T4, NAMELESS], PART, [NAMELESS]),
        ([A100, T4], PART, [T4]),
        ([A100], PART, [A100]),
        ([A100, T4, NAMELESS], PART._replace(count=2), [NAMELESS, T4]),
        ([A100, INSTANCE], Request(count=2), None),
        ([A100, INSTANCE, SECOND], Request(count=2), [INSTANCE, SECOND]),
        ([A100, INSTANCE, T4, SECOND], Request(count=2), [A100, T4]),
    ],
)
def test_choose(devices: list[Device], request_: Request, chosen: list[Device] | None) -> None:
    """All that are named; of one kind; for sharers the emptiest, others' company last."""
    assert policy.choose(devices, request_, CROWD, alike) == chosen


def test_the_next_one_looks_first() -> None:
    """Of those who wait each looks a moment after the one before it, none much later."""
    assert [policy.turn_s(ahead) for ahead in (0, 1, 2, 1000)] == [0, 0.02, 0.04, 0.25]
