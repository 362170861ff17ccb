"""What readings and requests mean, as tables of literals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from reserve_gpu import choosing, possible, quantities
from reserve_gpu.device import Device, Refusal, Request, State, Usage
from reserve_gpu.errors import RequestError
from reserve_gpu.links import Link
from reserve_gpu.text import gib

A100 = Device(0, "GPU-a", name="NVIDIA A100-SXM4-40GB", bus_id="0000:01:00.0", memory_mib=40960)
T4 = Device(1, "GPU-b", name="Tesla T4", bus_id="0000:02:00.0", memory_mib=15360)
NAMELESS = Device(2, "GPU-c", bus_id="0000:03:00.0")
INSTANCE = Device(3, "MIG-d", name="NVIDIA A100 MIG 1g.5gb", memory_mib=4864, instance=0)

# -- idle? -----------------------------------------------------------------------------------------

SEEN = Usage(compute=0, mps=0, total_mib=40960, used_mib=0)

IDLE = [
    SEEN,
    Usage(compute=0, used_mib=0, total_mib=40960, mode="default"),
    Usage(compute=0, mps=0),  # no memory reading, but all processes seen
    Usage(used_mib=0, total_mib=40960, sees_all=False),  # no process list, but memory
    Usage(compute=0, mps=0, used_mib=3, total_mib=40960, sees_all=False),
    SEEN.replace(used_mib=1024),
    SEEN.replace(used_mib=204.8, total_mib=4096),
    SEEN.replace(used_mib=640, total_mib=4096, reserve_known=False),
    SEEN.replace(used_mib=3048, graphics_mib=2024),
    SEEN.replace(used_mib=500, graphics_mib=2000),
    SEEN.replace(mode="exclusive process"),
    SEEN.replace(mode="mode 17"),
]
BUSY = [
    (SEEN.replace(compute=1), "1 compute process"),
    (SEEN.replace(compute=2), "2 compute processes"),
    (SEEN.replace(mps=1), "1 MPS client"),
    (SEEN.replace(mps=3), "3 MPS clients"),
    (SEEN.replace(mode="prohibited"), "prohibited"),
    (Usage(mode="prohibited"), "prohibited"),
    (Usage(compute=1), "1 compute process"),
    (SEEN.replace(compute=1, sees_all=False), "1 compute process"),
    (SEEN.replace(used_mib=1025), "1.0 GiB"),
    (SEEN.replace(used_mib=205, total_mib=4096), "205 MiB"),
    (SEEN.replace(used_mib=641, total_mib=4096, reserve_known=False), "641 MiB"),
    (SEEN.replace(used_mib=3049, graphics_mib=2024), "1.0 GiB"),
    (Usage(used_mib=5000, total_mib=40960), "4.9 GiB"),
]
UNKNOWN = [
    Usage(),
    Usage(compute=0, mps=0, sees_all=False),
    Usage(mps=0),
    Usage(mode="default", total_mib=40960),
    Usage(graphics_mib=100.0),
]


@pytest.mark.parametrize("usage", IDLE)
def test_idle(usage: Usage) -> None:
    """No sign of use and one reading that can be trusted make a device idle."""
    assert choosing.judge(usage) == (State.IDLE, "")


@pytest.mark.parametrize(("usage", "said"), BUSY)
def test_busy(usage: Usage, said: str) -> None:
    """Any sign of use makes a device busy, and which one is said."""
    state, reason = choosing.judge(usage)
    assert state is State.BUSY
    assert said in reason


@pytest.mark.parametrize("usage", UNKNOWN)
def test_unknown(usage: Usage) -> None:
    """Without a reading that can be trusted a device is not taken for idle."""
    state, reason = choosing.judge(usage)
    assert state is State.UNKNOWN
    assert reason


@pytest.mark.parametrize(
    ("usage", "configured", "limit"),
    [
        (Usage(), None, 1024),
        (Usage(total_mib=81920), None, 1024),
        (Usage(total_mib=20480), None, 1024),
        (Usage(total_mib=10240), None, 512),
        (Usage(total_mib=2048), None, 102.4),
        (Usage(total_mib=2048, reserve_known=False), None, 640),
        (Usage(total_mib=81920, reserve_known=False), None, 1024),
        (Usage(reserve_known=False), None, 1024),
        (Usage(total_mib=2048), 3000.0, 3000),
        (Usage(total_mib=81920), 0.0, 0),
        (Usage(total_mib=2048, reserve_known=False), 5.0, 5),
    ],
)
def test_idle_limit(usage: Usage, configured: float | None, limit: float) -> None:
    """1 GiB or 5 %, the lesser; the driver's reserve is allowed for; a setting overrides both."""
    assert choosing.idle_limit_mib(usage, configured) == pytest.approx(limit)


def test_configured_limit_decides() -> None:
    """Memory up to the configured limit is idle, memory above it busy."""
    assert choosing.judge(SEEN.replace(used_mib=3000), 3000)[0] is State.IDLE
    assert choosing.judge(SEEN.replace(used_mib=1), 0)[0] is State.BUSY
    assert choosing.judge(SEEN, 0)[0] is State.IDLE


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (SEEN, True),
        (Usage(), True),
        (SEEN.replace(compute=3, mode="default"), True),
        (SEEN.replace(mode="prohibited"), False),
        (SEEN.replace(mode="exclusive process"), True),
        (SEEN.replace(mode="exclusive process", compute=1), False),
        (SEEN.replace(mode="exclusive process", mps=1), False),
        (Usage(mode="exclusive process"), True),
    ],
)
def test_usable(usage: Usage, expected: bool) -> None:  # noqa: FBT001
    """CUDA lets nobody onto a prohibited device, and no second process onto an exclusive one."""
    assert choosing.usable(usage) is expected


def test_unreported_memory_is_the_most() -> None:
    """A device that reports no use of memory comes behind all that do."""
    assert choosing.used_mib(SEEN.replace(used_mib=12)) == 12
    assert choosing.used_mib(Usage()) > choosing.used_mib(SEEN.replace(used_mib=10**9))


# -- fits? -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "wanted", "reason"),
    [
        (A100, Request(), None),
        (NAMELESS, Request(), None),
        (A100, Request(min_memory_mib=40960), None),
        (A100, Request(min_memory_mib=40960.5), "40.0 GiB"),
        (T4, Request(min_memory_mib=16384), "15.0 GiB"),
        (NAMELESS, Request(min_memory_mib=1), "how much memory"),
        (INSTANCE, Request(min_memory_mib=5000), "4.8 GiB"),
        (A100, Request(model="a100"), None),
        (A100, Request(model="SXM4-40gb"), None),
        (T4, Request(model="A100"), "Tesla T4"),
        (NAMELESS, Request(model="A100"), "without a name"),
        (T4, Request(model="T4", min_memory_mib=20000), "15.0 GiB"),
    ],
)
def test_unfit(device: Device, wanted: Request, reason: str | None) -> None:
    """A device fits if the text is in its name and its total memory is enough."""
    found = choosing.unfit(device, wanted)
    assert found is None if reason is None else reason in (found or "")


def refusals(*states: str) -> list[Refusal]:
    return [Refusal(f"GPU{number}", state, f"why{number}") for number, state in enumerate(states)]


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [
        (refusals("busy"), Request(), None),
        (refusals("broken"), Request(), None),
        (refusals("unfit", "reserved"), Request(), None),
        (refusals("free", "busy"), Request(count=2), None),
        (refusals(), Request(), None),  # a fence around nothing: that is no fault of the request
        (refusals("unfit"), Request(model="h100"), ["1 GPU", "h100", "GPU0 why0"]),
        (refusals("free", "unfit"), Request(count=2), ["2 GPUs", "GPU0", "GPU1 why1"]),
        (refusals("busy", "busy"), Request(count=9), ["9 GPUs", "GPU0, GPU1"]),
        (refusals("unfit"), Request(min_memory_mib=81920), ["80.0 GiB", "GPU0 why0"]),
    ],
)
def test_impossible(found: list[Refusal], wanted: Request, said: list[str] | None) -> None:
    """A request is impossible where too few devices fit, and then what there is is said."""
    reason = possible.impossible(found, wanted)
    assert (reason is None) == (said is None)
    assert all(part in (reason or "") for part in said or [])


PARTS = [Refusal("GPU0", "busy", "why"), Refusal("GPU1:0", "busy", "why")]


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        (refusals("busy"), Request(), True),
        (refusals("reserved"), Request(), True),
        (refusals("awaited"), Request(), True),
        (refusals("unknown"), Request(), True),
        (refusals("unfit", "reserved"), Request(), True),
        (refusals("free", "busy"), Request(count=2), True),
        (refusals("reserved", "unfit", "awaited"), Request(count=2), True),
        (refusals(), Request(), False),
        (refusals("unfit"), Request(), False),
        (refusals("busy"), Request(count=2), False),
        (refusals("free", "unfit"), Request(count=2), False),
        (PARTS, Request(), True),
        (PARTS, Request(count=2), False),
    ],
)
def test_may_come_free(found: list[Refusal], wanted: Request, expected: bool) -> None:  # noqa: FBT001
    """It makes sense to wait where as many devices as are wanted would do, were they free."""
    assert possible.may_come_free(found, wanted) is expected


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        ([A100], Request(), True),
        ([A100, T4], Request(), True),
        ([A100, T4], Request(count=2), True),
        ([A100], Request(count=2), False),
        ([A100], Request(("0",)), True),
        ([A100], Request(("GPU-a",)), True),
        ([A100], Request(("01:00.0",)), True),
        ([A100], Request(("1",)), False),
        ([A100, T4], Request(("0",)), False),
        ([A100, T4], Request(("0", "1"), 2), True),
        ([A100, T4], Request(("1", "0"), 2), False),
        ([INSTANCE], Request(("3:0",)), True),
        ([INSTANCE], Request(("3",)), False),
        ([A100], Request(min_memory_mib=40960), True),
        ([A100, T4], Request(min_memory_mib=40960), False),
        ([T4], Request(model="t4"), True),
        ([T4], Request(model="a100"), False),
        ([A100], Request(exclude=("1",)), True),
        ([A100], Request(exclude=("0",)), False),
        ([INSTANCE], Request(exclude=("3",)), False),
        ([A100], Request(share=True, note="x"), True),
    ],
)
def test_satisfies(held: list[Device], wanted: Request, expected: bool) -> None:  # noqa: FBT001
    """What is held will do if it is what is named, in that order, or enough that fits."""
    assert choosing.satisfies(held, wanted) is expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Request(), True),
        (Request(min_memory_mib=1, model="x", exclude=("0",)), True),
        (Request(count=2), False),
        (Request(("0",)), False),
        (Request(share=True), False),
    ],
)
def test_first_will_do(wanted: Request, expected: bool) -> None:  # noqa: FBT001
    """The first free device is as good as any only where one is wanted, any one, not shared."""
    assert choosing.first_will_do(wanted) is expected


# -- which are closest? ----------------------------------------------------------------------------


def pairs(one: Device, other: Device) -> int:
    """Eight GPUs: NVLink in pairs, two pairs on a PCIe switch, the halves on two sockets."""
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
    found = choosing.closest(devices, count, pairs)
    assert "".join(str(device.index) for device in found) == chosen


@pytest.mark.parametrize("count", range(1, 9))
def test_closest_of_equals(count: int) -> None:
    """Where all are connected alike the first ones are taken."""
    devices = [Device(index, f"GPU-{index}") for index in range(8)]
    assert choosing.closest(devices, count, alike) == devices[:count]


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"devices": None}, Request()),
        ({"devices": 2}, Request(("2",))),
        ({"devices": "1,3"}, Request(("1", "3"), 2)),
        ({"devices": [1, "GPU-a"]}, Request(("1", "GPU-a"), 2)),
        ({"devices": "1 3", "count": 2}, Request(("1", "3"), 2)),
        ({"devices": None, "count": 4}, Request(count=4)),
        ({"devices": None, "min_memory": "16GiB"}, Request(min_memory_mib=16384)),
        ({"devices": None, "min_memory": 16000}, Request(min_memory_mib=16000)),
        ({"devices": None, "min_memory": 0.5}, Request(min_memory_mib=0.5)),
        ({"devices": None, "name": "a100"}, Request(model="a100")),
        ({"devices": None, "exclude": "0 2"}, Request(exclude=("0", "2"))),
        ({"devices": None, "exclude": [0, "1:0"]}, Request(exclude=("0", "1:0"))),
        ({"devices": None, "share": True, "note": "x"}, Request(share=True, note="x")),
    ],
)
def test_request(arguments: dict[str, Any], expected: Request) -> None:
    """The arguments of reserve() become a request."""
    assert choosing.request(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"devices": ""}, "No GPU is named"),
        ({"devices": " , "}, "No GPU is named"),
        ({"devices": []}, "No GPU is named"),
        ({"devices": "all"}, "'all'"),
        ({"devices": "-1"}, "'-1'"),
        ({"devices": -1}, "'-1'"),
        ({"devices": None, "count": 0}, "0"),
        ({"devices": None, "count": -2}, "-2"),
        ({"devices": None, "count": True}, "True"),
        ({"devices": None, "count": 1.5}, "1.5"),
        ({"devices": None, "count": float("nan")}, "nan"),
        ({"devices": None, "count": float("inf")}, "inf"),
        ({"devices": None, "count": "two"}, "two"),
        ({"devices": "0,1", "count": 1}, "2 named and 1"),
        ({"devices": "0", "count": 2}, "1 named and 2"),
        ({"devices": None, "min_memory": "lots"}, "'lots'"),
        ({"devices": None, "min_memory": -1}, "'-1'"),
        ({"devices": None, "min_memory": True}, "'True'"),
        ({"devices": None, "exclude": "gpu"}, "'gpu'"),
    ],
)
def test_bad_request(arguments: dict[str, Any], said: str) -> None:
    """What makes no request is a RequestError that names what is wrong."""
    with pytest.raises(RequestError) as caught:
        choosing.request(**arguments)
    assert said in str(caught.value)


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        (16000, 16000),
        (0, 0),
        (1.5, 1.5),
        ("16000", 16000),
        ("16GiB", 16384),
        ("16gib", 16384),
        (" 16 GiB ", 16384),
        ("16GB", 15258.789),
        ("16G", 15258.789),
        ("1.5GiB", 1536),
        ("2TiB", 2097152),
        ("1TB", 953674.316),
        ("500MiB", 500),
        ("500MB", 476.837),
        ("1024KiB", 1),
        ("0GB", 0),
    ],
)
def test_size(text: str | float, mib: float) -> None:
    """GB are powers of ten, GiB powers of two, a bare number is MiB."""
    assert quantities.parse_size(text) == pytest.approx(mib)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GB", "-1", "-1GB", "+1", "1e3", "0x10", "1,5GB", "1.GB", ".5GB", "1 6GB"),
        *("16B", "16iB", "16GBs", "16PB", "16 G B", "nan", "inf", "1_000", "\u0661GB", "16GB\x00"),
    ],
)
def test_bad_size(text: str) -> None:
    """What is no size is refused, with examples of what is one."""
    with pytest.raises(RequestError, match="16GiB"):
        quantities.parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90),
        (0, 0),
        (1.5, 1.5),
        (0.1 + 0.2, 0.3),
        (1 / 3, 1 / 3),
        (1e-06, 1e-06),
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("1.5h", 5400),
        ("0s", 0),
        ("10M", 600),
        (" 10 m ", 600),
        (True, math.inf),
    ],
)
def test_duration(text: str | float, seconds: float) -> None:
    """A bare number is seconds, s, m, h and d are units, True is for ever."""
    assert quantities.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "m", "-1", "-1m", "+1", "1e3", "0x10", "1,5h", "1.h", ".5h", "1 0m", "1h30m"),
        *("1:30", "10min", "5ms", "1w", "nan", "1_000", "\u0661m", "10m\x00", "forever", "True"),
        *(-1, -0.5, math.nan, False, None, [], b"90"),
    ],
)
def test_bad_duration(text: object) -> None:
    """What is no duration is refused, with examples of what is one."""
    with pytest.raises(RequestError, match="10m"):
        quantities.parse_duration(text)


@pytest.mark.parametrize(
    ("mib", "text"),
    [
        (0, "0 MiB"),
        (1023, "1023 MiB"),
        (1024, "1.0 GiB"),
        (10444.8, "10.2 GiB"),
        (81920, "80.0 GiB"),
    ],
)
def test_memory_for_people(mib: float, text: str) -> None:
    """Memory is shown in GiB, below one in MiB."""
    assert gib(mib) == text
