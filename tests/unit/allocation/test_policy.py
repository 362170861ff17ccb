"""The decisions of an allocation, as tables: suitable, possible, kept, best and next check."""

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
MIG_0 = Device(3, "MIG-d", name="NVIDIA A100 MIG 1g.5gb", memory_mib=4864, instance=0)
MIG_1 = Device(3, "MIG-e", name="NVIDIA A100 MIG 1g.5gb", memory_mib=4864, instance=1)
LOST = Fault(1, "GPU is lost")
ONE_INSTANCE, SEVERAL_INSTANCES = "569.99", "570.26"  # driver versions


@pytest.mark.parametrize(
    ("device", "request_", "driver", "reason"),
    [
        (A100, Request(min_memory_mib=40960), None, None),
        (A100, Request(min_memory_mib=40960.5), None, Unfit.MEMORY),
        (NAMELESS, Request(min_memory_mib=1), None, Unfit.MEMORY_UNKNOWN),
        (A100, Request(model="SXM4-40gb"), None, None),
        (T4, Request(model="A100"), None, Unfit.MODEL),
        (NAMELESS, Request(model="A100"), None, Unfit.MODEL),
        (MIG_0, Request(), ONE_INSTANCE, None),
        (MIG_0, Request(count=2), ONE_INSTANCE, Unfit.SECOND_INSTANCE),
        (MIG_0, Request(count=2), SEVERAL_INSTANCES, None),
        (MIG_0, Request(count=2), None, None),
        (A100, Request(count=2), ONE_INSTANCE, None),
        (LOST, Request(count=2), None, None),
        (LOST, Request(model="A100"), None, Unfit.UNREADABLE),
        (LOST, Request(min_memory_mib=1), None, Unfit.UNREADABLE),
    ],
)
def test_a_device_is_unsuitable_for_a_reason(
    device: Device | Fault, request_: Request, driver: str | None, reason: Unfit | None
) -> None:
    """Model, memory, and the number of MIG instances that CUDA can use decide, in this order."""
    assert policy.unfit(device, request_, driver) is reason


IDLE = Usage(compute=0, mps=0, used_mib=0)
USED = Usage(compute=1)
EXCLUSIVE = Usage(compute=1, mode=ComputeMode.EXCLUSIVE_PROCESS)
NAMED = Request(("0",))
PART = Request(terms=ReservationTerms(Size(1024.0)))


@pytest.mark.parametrize(
    ("request_", "state", "reading", "expected"),
    [
        (Request(), State.IDLE, IDLE, True),
        (Request(), State.BUSY, USED, False),
        (Request(), State.UNKNOWN, Usage(), False),
        (NAMED, State.BUSY, USED, True),
        (NAMED, State.BUSY, EXCLUSIVE, False),
        (PART, State.BUSY, USED, True),
        (PART, State.UNKNOWN, Usage(), False),
    ],
)
def test_a_used_device_is_taken_only_by_name_or_for_a_part(
    request_: Request, state: State, reading: Usage, *, expected: bool
) -> None:
    """A device that CUDA would not allow another process to use is never taken."""
    assert policy.should_take(request_, state, reading) is expected


# -- whether waiting helps -------------------------------------------------------------------------

UNFIT, FREE, BUSY = State.UNFIT, State.FREE, State.BUSY
RESERVED, AWAITED = State.RESERVED, State.AWAITED


def rows(*states: State, instances: int = 0) -> list[DeviceStatus]:
    """Return a device in each state; the last `instances` of them are MIG instances."""
    whole = len(states) - instances
    return [
        DeviceStatus(Device(i, f"GPU-{i}", instance=None if i < whole else i), state)
        for i, state in enumerate(states)
    ]


BROKEN = DeviceStatus(LOST, State.BROKEN)


@pytest.mark.parametrize(
    ("given", "request_", "is_impossible", "may_come_free"),
    [
        (rows(UNFIT, RESERVED), Request(), False, True),
        (rows(RESERVED, UNFIT, AWAITED), Request(count=2), False, True),
        (rows(), Request(), False, False),  # an inherited limit that allows no device
        (rows(BUSY), Request(count=2), True, False),
        (rows(BUSY, BUSY, instances=1), Request(count=2), True, False),
        (rows(BUSY, BUSY, instances=2), Request(count=2), False, True),
        ([BROKEN], Request(), False, True),
        ([*rows(UNFIT), BROKEN], Request(), True, False),
    ],
)
def test_a_request_is_possible_if_enough_devices_of_one_kind_are_suitable(
    given: list[DeviceStatus], request_: Request, *, is_impossible: bool, may_come_free: bool
) -> None:
    """Whole GPUs and MIG instances are not combined."""
    assert policy.is_impossible(given, request_) is is_impossible
    assert policy.may_come_free(given, request_) is may_come_free


def held_by(*pids: int, state: State = RESERVED, seen: bool = True) -> DeviceStatus:
    """Return a device that these processes hold, by the kernel's lock list or by a record only."""
    return DeviceStatus(A100, state, holders=tuple(a_holder(pid, seen=seen) for pid in pids))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([held_by(7), DeviceStatus(T4, UNFIT)], True),
        ([held_by(7), held_by(9)], False),
        ([held_by(7), DeviceStatus(T4, BUSY)], False),
        ([held_by(7, seen=False)], False),
        ([held_by(9, 7)], True),
        ([held_by(7, state=State.FULL)], False),  # other holders of parts can make room
        ([], False),
    ],
)
def test_devices_can_all_be_reserved_by_ancestors(
    given: list[DeviceStatus], *, expected: bool
) -> None:
    """This is true if ancestors, by the kernel's lock list, hold every suitable device."""
    assert policy.is_above(given, {7, 8}) is expected


@pytest.mark.parametrize(
    ("states", "is_lively", "is_told", "seconds"),
    [
        ([RESERVED, UNFIT, FREE], False, True, 5.0),
        ([RESERVED, AWAITED], False, True, 1.0),  # the waiter ahead may be stopped
        *(([RESERVED, state], False, True, 1.0) for state in (BUSY, State.FULL, State.UNKNOWN)),
        ([State.BROKEN], False, True, 1.0),
        ([RESERVED], False, False, 1.0),
        ([RESERVED], True, True, 0.25),
    ],
)
def test_a_waiter_checks_as_often_as_changes_can_go_unnoticed(
    states: list[State], *, is_lively: bool, is_told: bool, seconds: float
) -> None:
    """Releases can be noticed in the kernel's lock list, but the use of a device can't."""
    assert policy.next_check_s(rows(*states), is_lively=is_lively, is_told=is_told) == seconds


def test_each_waiter_checks_shortly_after_the_one_ahead() -> None:
    assert [policy.turn_s(ahead) for ahead in (0, 1, 2, 1000)] == [0, 0.02, 0.04, 0.25]


# -- devices that this process already holds -------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "request_", "kept"),
    [
        ([], Request(), None),
        ([A100, T4], Request(), [A100, T4]),
        ([T4, A100], Request(count=1), [T4]),
        ([A100], Request(count=2), None),
        ([A100, T4], Request(("1", "0"), 2), [T4, A100]),
        ([A100, T4], Request(("0", "GPU-a")), None),
        ([A100, T4], Request(("GPU-",)), None),  # ambiguous
        ([A100, T4], Request(("1", "2")), None),
        ([A100, T4], Request(min_memory_mib=40960), [A100]),
        ([T4], Request(model="a100"), None),
    ],
)
def test_held_devices_that_satisfy_a_request_are_kept(
    held: list[Device], request_: Request, kept: list[Device] | None
) -> None:
    """Named devices are kept in that order, else the first suitable ones, else all suitable."""
    assert policy.matching_held(held, request_) == kept


@pytest.mark.parametrize(
    ("seen", "request_", "numbers"),
    [
        ([A100], Request(), ("0",)),
        ([A100, T4], Request(count=2), ("0", "1")),
        ([T4, A100], Request(("1", "0")), ("1", "0")),
        ([A100], Request(model="t4"), None),
        ([A100, T4], Request(), None),
        ([A100, T4], NAMED, None),
        ([A100, T4], Request(("1", "0")), None),
        ([], Request(), None),
    ],
)
def test_after_cuda_has_started_only_its_devices_can_be_reserved(
    seen: list[Device], request_: Request, numbers: tuple[str, ...] | None
) -> None:
    """The request is narrowed to all devices that CUDA enumerates, in its order."""
    narrowed = policy.reclaim(request_, seen)
    assert (narrowed and narrowed.devices) == numbers
    if narrowed:
        assert (narrowed.terms, narrowed.needed) == (request_.terms, len(seen))


# -- the best devices ------------------------------------------------------------------------------


def links_of_eight(one: Device, other: Device) -> int:
    """Return the link of two of eight GPUs: NVLink in pairs, a switch for four, two sockets."""
    a, b = one.index, other.index
    if a // 2 == b // 2:
        return Link.NVLINK
    return Link.SWITCH if a // 4 == b // 4 else Link.SYSTEM


def same_link(_one: Device, _other: Device) -> int:
    """Return the same link for all devices."""
    return Link.SOCKET


def devices(indices: str) -> list[Device]:
    """Return devices with these indices."""
    return [Device(int(index), f"GPU-{index}") for index in indices]


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        ("1234567", 2, "23"),
        ("1246", 2, "12"),
        ("0134567", 4, "4567"),
        ("02467", 3, "467"),
    ],
)
def test_the_devices_with_the_fastest_links_are_chosen(free: str, count: int, chosen: str) -> None:
    """NVLink is preferred to a PCIe switch, and equals are chosen in bus order."""
    assert policy.closest(devices(free), count, links_of_eight) == devices(chosen)


CROWD = {
    A100.uuid: (True, 300.0),
    T4.uuid: (False, 200.0),
    NAMELESS.uuid: (False, 100.0),
    MIG_0.uuid: (False, 0.0),
    MIG_1.uuid: (True, 0.0),
}


@pytest.mark.parametrize(
    ("available", "request_", "chosen"),
    [
        ([T4, A100], Request(("1", "0")), [T4, A100]),
        ([T4], Request(("1", "0")), None),
        ([A100, T4], Request(), [A100]),
        ([], Request(), None),
        ([A100, T4, NAMELESS], PART._replace(count=2), [NAMELESS, T4]),
        ([A100, MIG_0], Request(count=2), None),
        ([A100, MIG_0, MIG_1], Request(count=2), [MIG_0, MIG_1]),
        ([A100, MIG_0, T4, MIG_1], Request(count=2), [A100, T4]),
    ],
)
def test_the_best_of_the_available_devices_are_chosen(
    available: list[Device], request_: Request, chosen: list[Device] | None
) -> None:
    """A part goes to the device with the least room, and last to one with unreserved use."""
    assert policy.choose(available, request_, CROWD, same_link) == chosen
