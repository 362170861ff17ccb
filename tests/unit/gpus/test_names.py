"""What people and programs call devices, as tables of literals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.gpus import names
from reserve_gpu.model.devices import Device, Fault
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.untrusted import sanitize

if TYPE_CHECKING:
    from collections.abc import Sequence

# GPU 0 and 1 begin alike; GPU 2 is split, with a gap; GPU 3 is broken, and so is an instance of 2.
A = Device(0, "GPU-aaaa1111-0000", bus_id="0000:01:00.0")
B = Device(1, "GPU-aaaa2222-0000", bus_id="0001:0B:00.0")
C = Device(2, "MIG-cccc1111-0000", bus_id="0000:03:00.0", instance=0)
D = Device(2, "MIG-cccc2222-0000", bus_id="0000:03:00.0", instance=3)
LOST = Fault(3, "GPU is lost")
BROKEN = Fault(2, "Unknown Error", 5)
DEVICES = [A, B, C, D]
EVERYTHING: list[Device | Fault] = [A, B, C, D, LOST]

# -- as people type them ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", ["2"]),
        (2, ["2"]),
        (0, ["0"]),
        ("1,3", ["1", "3"]),
        ("3 1", ["3", "1"]),
        (" 3 ,\t1,, ", ["3", "1"]),
        ([3, "1,2"], ["3", "1", "2"]),
        ((), []),
        ("", []),
        ("gpu2 GPU1:0 1:0", ["gpu2", "GPU1:0", "1:0"]),
        ("GPU-8f2a MIG-1", ["GPU-8f2a", "MIG-1"]),
        ("MIG-GPU-8f2a/7/0", ["MIG-GPU-8f2a/7/0"]),
        ("0000:03:00.0 03:00.0 00000000:0a:1F.7", ["0000:03:00.0", "03:00.0", "00000000:0a:1F.7"]),
        (iter(["0"]), ["0"]),
        ("0-3", ["0", "1", "2", "3"]),
        ("7,gpu1-GPU2 2-2", ["7", "1", "2", "2"]),
        ("cuda:0 CUDA:1", ["cuda:0", "CUDA:1"]),
    ],
)
def test_parse(text: Any, expected: list[str]) -> None:
    """Names are taken apart at commas and blanks, ranges are spelled out; the order is kept."""
    assert names.parse(text) == tuple(expected)


@pytest.mark.parametrize(
    "text",
    [
        *("-1", "+1", "1.5", "0x1", "12345", "1:", ":0", "1:2:3", "1:1234", "GPU", "GPU-", "GPU2-"),
        *("all", "1;2", "1/0", "*", "TPU-1", "3:00.0", "03:00.8", "0000:03:00.0.0"),
        *("3-0", "0-", "-3", "0-1-2", "0:1-2", "cuda:", "cuda:0:1", "cuda:GPU0", "cuda:0-1"),
        *("GPU-8f2a_", "GPU-8f2a:0", "\u0661", "\uff11", "0\x00", "GPU-\n1\x1b[31m"),
    ],
)
def test_parse_refuses(text: str) -> None:
    """What can't name a device is refused, and shown without its control characters."""
    with pytest.raises(RequestError) as caught:
        names.parse(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("2", 2),
        ("GPU02", 2),
        ("gpu2", 2),
        ("cuda:2", 2),
        ("2:0", 2),
        ("GPU2:3", 2),
        ("GPU-2", None),
        ("02:00.0", None),
    ],
)
def test_index(name: str, of: int | None) -> None:
    """An index names a GPU, an instance's name says of which GPU it is, others say neither."""
    assert names.gpu_index(name) == of


MATCHING: list[tuple[str, list[Device]]] = [
    ("0", [A]),
    ("GPU1", [B]),
    ("00", [A]),
    ("2", []),  # split: it is no device
    ("2:0", [C]),
    ("gpu2:3", [D]),
    ("2:1", []),
    ("0:0", []),
    ("7", []),
    ("GPU-aaaa1111-0000", [A]),
    ("gpu-AAAA1", [A]),
    ("GPU-aaaa", [A, B]),
    ("GPU-b", []),
    ("MIG-cccc", [C, D]),
    ("MIG-cccc2", [D]),
    ("GPU-aaaa1111-0000-more", []),
    ("01:00.0", [A]),
    ("0000:01:00.0", [A]),
    ("00000000:01:00.0", [A]),
    ("0001:0b:00.0", [B]),
    ("0b:00.0", []),  # without a domain it is domain 0
    ("03:00.0", []),  # the bus id of a split GPU names none of its instances
]


@pytest.mark.parametrize(("name", "expected"), MATCHING)
def test_matching(name: str, expected: list[Device]) -> None:
    """A name means one device, or several if it is the beginning of several UUIDs."""
    assert names.matching(name, DEVICES) == expected


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        *((name, DEVICES, matches[0]) for name, matches in MATCHING if len(matches) == 1),
        ("3", [LOST], LOST),
        ("gpu3", [LOST], LOST),
        ("3:1", [LOST], LOST),  # whatever was to be there, this is why it can't be had
        ("2:5", [C, D, BROKEN], BROKEN),
        ("GPU2:5", [C, D, BROKEN], BROKEN),
        ("2:0", [C, D, BROKEN], C),
        ("GPU-aaaa1", EVERYTHING, A),
    ],
)
def test_pick(name: str, found: Sequence[Device | Fault], expected: Device | Fault) -> None:
    """A name picks the device that it means, or what is wrong in its place."""
    assert names.pick(name, found) == expected


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("GPU-aaaa", EVERYTHING, ["several", A.uuid, B.uuid]),
        ("2", [C, D], ["split into MIG instances", "2:0, 2:3"]),
        ("2", [C, D, BROKEN], ["split into MIG instances", "2:0, 2:3"]),
        ("2:4", [C, D], ["2:0, 2:3"]),
        ("2:4", [C, D, BROKEN], ["2:0, 2:3"]),
        ("0:1", [A], ["0:1, because GPU0 has no MIG instances", "range of GPUs, write 0-1."]),
        (
            "GPU-ffff",
            EVERYTHING,
            ["GPU-ffff", "This machine has GPU0 to GPU3. GPU3", "GPU is lost"],
        ),
        ("07:00.0", EVERYTHING, ["07:00.0", "This machine has GPU0 to GPU3.", "GPU is lost"]),
        ("9", [A, B], ["This machine has GPU0 and GPU1."]),
    ],
)
def test_pick_refuses(name: str, found: Sequence[Device | Fault], said: list[str]) -> None:
    """A name that means none, or several, is refused, and what there is is said."""
    with pytest.raises(RequestError) as caught:
        names.pick(name, found)
    assert all(part in str(caught.value) for part in said), str(caught.value)


def test_a_fault_is_shown_safely() -> None:
    """The driver's words for what is broken are made fit to print where it is listed."""
    with pytest.raises(RequestError) as caught:
        names.pick("GPU-ffff", [Fault(0, "\x1b[31mlost\n" + "x" * 999)])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("one", "wanted", "expected"),
    [
        (A, ["0"], True),
        (A, ["1", "GPU-aaaa1"], True),
        (A, ["GPU-"], True),
        (A, ["01:00.0"], True),
        (A, ["1"], False),
        (A, ["0:0"], False),
        (A, [], False),
        (C, ["2"], True),  # the whole GPU and so all its instances
        (C, ["2:0"], True),
        (C, ["2:3"], False),
        (C, ["0"], False),
        (LOST, ["3"], True),
        (LOST, ["2"], False),
        (LOST, ["GPU-aaaa"], False),
        (BROKEN, ["2"], True),
        (BROKEN, ["2:5"], True),
        (BROKEN, ["2:0"], False),
    ],
)
def test_is_one_of(one: Device | Fault, wanted: list[str], expected: bool) -> None:  # noqa: FBT001
    """A device is one of those named by its own name, or by that of the GPU it is a part of."""
    assert bool(names.is_one_of(one, wanted)) is expected


@pytest.mark.parametrize(
    ("found", "twice"),
    [([], None), ([A, B, C, D], None), ([LOST, BROKEN], None), ([A, B, A], "GPU0"),
     ([C, D, D], "GPU2:3"), ([LOST, LOST], "GPU3")],
)  # fmt: skip
def test_require_distinct(found: list[Device | Fault], twice: str | None) -> None:
    """The same device twice is refused and named."""
    if twice is None:
        names.require_distinct(found)
        return
    with pytest.raises(RequestError, match=f"^{twice} is named twice"):
        names.require_distinct(found)


@pytest.mark.parametrize(
    ("found", "is_mixed"),
    [
        ([], False),
        ([A, B], False),
        ([C, D], False),
        ([C, BROKEN], False),
        ([A, LOST], False),
        ([A, C], True),
        ([D, B], True),
        ([LOST, D], True),
        ([A, BROKEN], True),
    ],
)
def test_require_one_kind(found: list[Device | Fault], *, is_mixed: bool) -> None:
    """Whole GPUs and MIG instances together are refused, and one of each is named."""
    if not is_mixed:
        names.require_one_kind(found)
        return
    with pytest.raises(RequestError, match="CUDA does not let one process use both") as caught:
        names.require_one_kind(found)
    for device in found:
        assert device.label in str(caught.value)


# -- as CUDA reads them ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        ("00,+1, 2,3 ", [0, 1, 2, 3]),
        ("1gpu2,0x1,1.9", [1, 0, 1]),
        ("0,,1", [0]),
        ("0,junk,1", [0]),
        ("NoDevFiles", []),
        ("GPU-8f2a,1,MIG-1", ["GPU-8f2a", 1, "MIG-1"]),
        (" GPU-8f2a", ["GPU-8f2a"]),
        ("0,gpu-8f2a,1", [0]),
        ("MIG-GPU-8f2a/7/0", ["MIG-GPU-8f2a/7/0"]),
        ("\u0661", []),
    ],
)
def test_entries(value: str, expected: list[int | str]) -> None:
    """Numbers are read as strtoul does, UUIDs as they stand, and other text ends the list."""
    assert names.entries(value) == expected


@pytest.mark.parametrize("value", ["-1", "-1,0", "5", "99999999999999999999,0", "9" * 5000])
def test_entries_out_of_range(value: str) -> None:
    """A negative number, or one that is too large, lets nothing through, whatever follows."""
    assert names.visible(names.entries(value), EVERYTHING) == []


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([], []),
        ([0], [A]),
        ([1, 0], [A, B]),
        ([3], [LOST]),
        ([2], [C, D]),  # the GPU's instances
        ([0, 4, 1], [A]),
        ([0, 0], []),
        ([0, 1, 0], []),
        ([0, 9, 0], [A]),
        (["GPU-aaaa1"], [A]),
        (["GPU-aaaa"], []),
        ([0, "GPU-aaaa", 1], [A]),
        (["GPU-AAAA1"], [LOST]),  # none that can be read, so perhaps the one that can't
        (["MIG-cccc2", "MIG-cccc1"], [C, D]),
        ([0, "GPU-aaaa1"], []),
        (["MIG-cccc1", 2], []),
    ],
)
def test_visible(listed: list[int | str], expected: list[Any]) -> None:
    """The list ends at what means no device; a device twice leaves none; the rest in bus order."""
    assert names.visible(listed, EVERYTHING) == expected


@pytest.mark.parametrize(
    ("listed", "count", "expected"),
    [
        ([], 4, []),
        ([0], 4, [0]),
        ([3, 1], 4, [1, 3]),
        ([1, 4, 2], 4, [1]),
        ([4], 4, []),
        ([1, 1], 4, []),
        ([1, 4, 1], 4, [1]),
        ([0, 1], 1, [0]),
    ],
)
def test_numbers_within(listed: list[int], count: int, expected: list[int]) -> None:
    """Numbers alone are read as `visible` reads them, without a look at any device."""
    assert names.numbers_within(listed, count) == expected
    devices: list[Device | Fault] = [Device(index, f"GPU-{index}") for index in range(count)]
    visible = names.visible(listed, devices)
    assert visible == [devices[index] for index in expected]


@pytest.mark.parametrize(
    ("uuid", "bare"),
    [
        ("GPU-8F2A-11", "8f2a-11"),
        ("MIG-8f2a-11", "8f2a-11"),
        ("8f2a-11", "8f2a-11"),
        ("MIG-GPU-8f2a/7/0", "8f2a/7/0"),  # before driver 470
    ],
)
def test_bare_uuid(uuid: str, bare: str) -> None:
    """CUDA gives a UUID as sixteen bytes: without a word before it, in small letters."""
    assert names.bare_uuid(uuid) == bare


@pytest.mark.parametrize(
    ("device", "model"),
    [
        (Device(0, "GPU-a", name="Tesla T4"), "Tesla T4"),
        (Device(0, "GPU-a", name="A MIG thing"), "A MIG thing"),
        (Device(0, "GPU-a"), ""),
        (Device(0, "MIG-a", name="NVIDIA A100 MIG 1g.5gb", instance=0), "NVIDIA A100"),
        (Device(0, "MIG-a", name="Odd", instance=0), "Odd"),
    ],
)
def test_model(device: Device, model: str) -> None:
    """An instance is of the model of its GPU."""
    assert names.model(device) == model


# -- foreign text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("train.ipynb", 80, "train.ipynb"),
        ("\u00fcbung \u65e5\u672c.ipynb", 80, "\u00fcbung \u65e5\u672c.ipynb"),
        ("a\nb\rc\td", 80, "a\ufffdb\ufffdc\ufffdd"),
        ("\x1b[31mred\x1b[0m", 80, "\ufffd[31mred\ufffd[0m"),
        ("a\u2028b\u202ec\u200b\x85", 80, "a\ufffdb\ufffdc\ufffd\ufffd"),
        ("\ud800", 80, "\ufffd"),
        ("<b>&", 80, "<b>&"),
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcde\u2026"),
        ("", 80, ""),
    ],
)
def test_shown(text: str, limit: int, expected: str) -> None:
    """Foreign text becomes one line of bounded length without control characters."""
    assert sanitize(text, limit) == expected
