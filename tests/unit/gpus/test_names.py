"""Tests of device names: as users write them, and as CUDA reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.gpus import names
from reserve_gpu.model.devices import Device, Fault
from reserve_gpu.model.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

# The UUIDs of GPU0 and GPU1 start alike. GPU2 is split, with gaps. GPU3 and an instance of GPU2 are
# broken.
A = Device(0, "GPU-aaaa1111-0000", bus_id="0000:01:00.0")
B = Device(1, "GPU-aaaa2222-0000", bus_id="0001:0B:00.0")
C = Device(2, "MIG-cccc1111-0000", bus_id="0000:03:00.0", instance=0)
D = Device(2, "MIG-cccc2222-0000", bus_id="0000:03:00.0", instance=3)
LOST = Fault(3, "GPU is lost")
BROKEN = Fault(2, "Unknown Error", 5)
DEVICES = [A, B, C, D]
EVERYTHING: list[Device | Fault] = [A, B, C, D, LOST]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 3 ,\t1,, ", ["3", "1"]),
        ("", []),
        (iter([3, "1,2"]), ["3", "1", "2"]),
        ("gpu2 GPU1:0 1:0", ["gpu2", "GPU1:0", "1:0"]),
        ("0000:03:00.0 03:00.0 00000000:0a:1F.7", ["0000:03:00.0", "03:00.0", "00000000:0a:1F.7"]),
        ("7,gpu1-GPU2 2-2", ["7", "1", "2", "2"]),
        ("cuda:0 CUDA:1", ["cuda:0", "CUDA:1"]),
    ],
)
def test_parse(text: Any, expected: list[str]) -> None:
    """Names are split at commas and blanks, ranges are expanded, and the order is kept."""
    assert names.parse(text) == tuple(expected)


@pytest.mark.parametrize(
    "text",
    [
        *("12345", "1:12", "GPU-", "3:00.0", "03:00.8", "3-0", "0:1-2"),
        *("cuda:0-1", "\u0661", "GPU-\n1\x1b[31m"),
    ],
)
def test_parse_refuses(text: str) -> None:
    """Text that can't name a device is refused, and quoted without its control characters."""
    with pytest.raises(RequestError) as caught:
        names.parse(text)
    assert str(caught.value).isprintable()


MATCHING: list[tuple[str, list[Device]]] = [
    ("GPU1", [B]),
    ("2", []),  # split: it is no device
    ("2:0", [C]),
    ("gpu2:3", [D]),
    ("gpu-AAAA1", [A]),
    ("GPU-aaaa", [A, B]),
    ("GPU-aaaa1111-0000-more", []),
    ("01:00.0", [A]),
    ("00000000:01:00.0", [A]),
    ("0001:0b:00.0", [B]),
    ("0b:00.0", []),  # without a domain it is domain 0
    ("03:00.0", []),  # the bus id of a split GPU names none of its instances
]


@pytest.mark.parametrize(("name", "expected"), MATCHING)
def test_matching(name: str, expected: list[Device]) -> None:
    """A name matches one device, or every device whose UUID starts with it."""
    assert names.matching(name, DEVICES) == expected


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        *((name, DEVICES, matches[0]) for name, matches in MATCHING if len(matches) == 1),
        ("3", [LOST], LOST),
        ("3:1", [LOST], LOST),
        ("2:5", [C, D, BROKEN], BROKEN),
    ],
)
def test_pick(name: str, found: Sequence[Device | Fault], expected: Device | Fault) -> None:
    """A name picks the device that it matches, or the fault in its place."""
    assert names.pick(name, found) == expected


@pytest.mark.parametrize(("name", "found"), [("GPU-aaaa", EVERYTHING), ("2:4", [C, D, BROKEN])])
def test_pick_refuses(name: str, found: Sequence[Device | Fault]) -> None:
    """A name that matches no device, or several, is refused."""
    with pytest.raises(RequestError):
        names.pick(name, found)


@pytest.mark.parametrize(
    ("one", "wanted", "expected"),
    [
        (A, ["0"], True),
        (A, ["1", "GPU-aaaa1"], True),
        (A, ["01:00.0"], True),
        (A, ["1"], False),
        (C, ["2"], True),  # a GPU includes its instances
        (C, ["2:3"], False),
        (BROKEN, ["2:5"], True),
        (BROKEN, ["2:0"], False),
    ],
)
def test_is_one_of(one: Device | Fault, wanted: list[str], expected: bool) -> None:  # noqa: FBT001
    """A list of names includes a device if it names the device, or the GPU of an instance."""
    assert bool(names.is_one_of(one, wanted)) is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", []),
        ("00,+1, 2,3 ", [0, 1, 2, 3]),
        ("1gpu2,0x1,1.9", [1, 0, 1]),
        (" GPU-8f2a,1,MIG-1", ["GPU-8f2a", 1, "MIG-1"]),
        ("0,gpu-8f2a,1", [0]),
        ("\u0661", []),
    ],
)
def test_entries(value: str, expected: list[int | str]) -> None:
    """Numbers are parsed like strtoul, UUIDs are kept, and any other text ends the list."""
    assert names.entries(value) == expected


@pytest.mark.parametrize("value", ["-1,0", "99999999999999999999,0", "9" * 5000])
def test_entries_out_of_range(value: str) -> None:
    """A negative or too large number hides itself and all entries after it."""
    assert names.visible(names.entries(value), EVERYTHING) == []


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([1, 0], [A, B]),
        ([2], [C, D]),  # the GPU's instances
        ([0, 4, 1], [A]),
        ([0, 9, 0], [A]),
        ([0, "GPU-aaaa", 1], [A]),
        (["GPU-AAAA1"], [LOST]),  # the UUID might be that of the GPU that can't be read
        (["MIG-cccc2", "MIG-cccc1"], [C, D]),
        ([0, "GPU-aaaa1"], []),
        (["MIG-cccc1", 2], []),
    ],
)
def test_visible(listed: list[int | str], expected: list[Any]) -> None:
    """The list ends at an unknown device, a duplicate hides all, and the rest is in bus order."""
    assert names.visible(listed, EVERYTHING) == expected


@pytest.mark.parametrize(
    ("device", "model"),
    [
        (Device(0, "GPU-a", name="A MIG thing"), "A MIG thing"),
        (Device(0, "GPU-a"), ""),
        (Device(0, "MIG-a", name="NVIDIA A100 MIG 1g.5gb", instance=0), "NVIDIA A100"),
    ],
)
def test_model(device: Device, model: str) -> None:
    """An instance's model is that of its GPU."""
    assert names.model(device) == model
