"""Properties of device names and of the magic's parser, for any text."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reserve_gpu.gpus import names
from reserve_gpu.ipython.parser import magic_parser
from reserve_gpu.model.devices import Device, Fault
from tests.support.properties import result_unless_refused

pytestmark = pytest.mark.full

HEX = "0123456789abcdef"
INDICES = st.integers(0, 9999).map(str)
INSTANCES = st.builds("{}:{}".format, st.integers(0, 9999), st.integers(0, 9))
UUIDS = st.builds("{}-{}".format, st.sampled_from(["GPU", "MIG"]), st.text(f"{HEX}-", min_size=1))
BUS_IDS = st.from_regex(r"([0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", fullmatch=True)
NAMES = st.one_of(INDICES, INDICES.map("GPU{}".format), INSTANCES, UUIDS, BUS_IDS)
SEPARATORS = st.sampled_from([",", " ", ", ", " ,\t", ",,", "\n"])
TEXT_OPTIONS, FLAGS = ("min-memory", "name", "note", "wait"), ("optional", "release")


@settings(max_examples=60)
@given(
    devices=st.lists(NAMES, max_size=4),
    count=st.none() | st.integers(0, 99),
    texts=st.dictionaries(st.sampled_from(TEXT_OPTIONS), st.text()),
    flags=st.sets(st.sampled_from(FLAGS)),
)
def test_the_magic_parses_quoted_words(
    devices: list[str], count: int | None, texts: dict[str, str], flags: set[str]
) -> None:
    """Words that `shlex.join` quotes come out of the parser unchanged."""
    words = devices + [f"--{name}={text}" for name, text in texts.items()]
    words += [f"--{flag}" for flag in flags] + ([] if count is None else [f"--count={count}"])
    typed = vars(magic_parser().parse_args(shlex.split(shlex.join(words), comments=True)))
    assert typed == typed | {
        "devices": devices,
        "count": count,
        **{name.replace("-", "_"): texts.get(name) for name in TEXT_OPTIONS},
        **{flag: flag in flags for flag in FLAGS},
    }


@given(st.lists(st.tuples(NAMES, SEPARATORS), min_size=1, max_size=6))
def test_a_list_of_devices_keeps_its_order(parts: list[tuple[str, str]]) -> None:
    """Text with any separators means the same devices as a Python list."""
    found = tuple(name for name, _ in parts)
    assert names.parse("".join(name + separator for name, separator in parts)) == found
    assert names.parse(list(found)) == found


@given(st.text(f"{HEX}GPUMIg:.-, /", max_size=30) | st.text())
def test_any_text_is_a_list_of_devices_or_refused(text: str) -> None:
    """The parsed names parse to themselves."""
    found = result_unless_refused(names.parse, text)
    assert found is None or names.parse(",".join(found)) == names.parse(found) == found


UUID_TAILS = st.lists(st.text(HEX[:3], min_size=6, max_size=6), min_size=1, max_size=5, unique=True)
MACHINES = UUID_TAILS.map(
    lambda tails: [
        Device(index, f"GPU-{tail}", bus_id=f"0000:{index + 1:02x}:00.0")
        for index, tail in enumerate(tails)
    ]
)


@given(MACHINES, st.data())
def test_every_name_of_a_device_means_that_device(
    devices: list[Device], data: st.DataObject
) -> None:
    """Index, UUID, unique prefix and bus ID name one device, in upper or lower case."""
    device = data.draw(st.sampled_from(devices))
    bus_id = device.bus_id or ""
    prefixes = [device.uuid[:length] for length in range(5, len(device.uuid) + 1)]
    unique = [p for p in prefixes if sum(other.uuid.startswith(p) for other in devices) == 1]
    for name in [str(device.index), f"GPU{device.index}", bus_id, bus_id[5:], *unique]:
        for spelling in (name, name.upper(), name.lower()):
            assert names.matching(spelling, devices) == [device]
            assert names.pick(spelling, devices) is device


@given(MACHINES, NAMES, st.data())
def test_a_name_means_one_device_or_is_refused(
    devices: list[Device], name: str, data: st.DataObject
) -> None:
    """A name selects one of the devices that it matches, or a device that can't be read."""
    broken = data.draw(st.sets(st.sampled_from([device.index for device in devices])))
    found = [Fault(d.index, "lost") if d.index in broken else d for d in devices]
    picked = result_unless_refused(names.pick, name, found)
    assert picked in [None, *found]
    if isinstance(picked, Device):
        assert names.matching(name, devices) == [picked]
