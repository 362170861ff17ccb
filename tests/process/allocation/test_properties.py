"""Properties that hold for whatever people and programs may write."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reserve_gpu.gpus import names
from reserve_gpu.model.devices import Device, Fault
from tests.support.properties import unless_refused

pytestmark = pytest.mark.full

settings.register_profile(
    "ours",
    deadline=None,
    derandomize=True,
    max_examples=150,
    # All examples of a test are on one machine: each leaves it as it found it.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("ours")

# -- what people type ------------------------------------------------------------------------------

HEX = "0123456789abcdef"
INDICES = st.integers(0, 9999).map(str)
INSTANCES = st.builds("{}:{}".format, st.integers(0, 9999), st.integers(0, 9))
UUIDS = st.builds("{}-{}".format, st.sampled_from(["GPU", "MIG"]), st.text(f"{HEX}-", min_size=1))
BUS_IDS = st.from_regex(r"([0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", fullmatch=True)
NAMES = st.one_of(INDICES, INDICES.map("GPU{}".format), INSTANCES, UUIDS, BUS_IDS)


# -- devices by name -------------------------------------------------------------------------------

UUID_TAILS = st.lists(st.text(HEX[:3], min_size=6, max_size=6), min_size=1, max_size=5, unique=True)
MACHINES = UUID_TAILS.map(
    lambda tails: [
        Device(index, f"GPU-{tail}", bus_id=f"0000:{index + 1:02x}:00.0")
        for index, tail in enumerate(tails)
    ]
)


@given(MACHINES, st.data())
def test_every_name_of_a_device_means_it(machine: list[Device], data: st.DataObject) -> None:
    """Index, UUID, unique prefix and bus id mean their device alone, in upper or lower case."""
    device = data.draw(st.sampled_from(machine))
    bus_id = device.bus_id or ""
    prefixes = [device.uuid[:length] for length in range(5, len(device.uuid) + 1)]
    unique = [p for p in prefixes if sum(other.uuid.startswith(p) for other in machine) == 1]
    for name in [str(device.index), f"GPU{device.index}", bus_id, bus_id[5:], *unique]:
        for spelling in (name, name.upper(), name.lower()):
            assert names.matching(spelling, machine) == [device]
            assert names.pick(spelling, machine) is device


@given(MACHINES, NAMES, st.data())
def test_a_name_means_a_device_or_is_refused(
    machine: list[Device], name: str, data: st.DataObject
) -> None:
    """A name picks one of the devices that it matches, or a broken one, or is refused."""
    broken = data.draw(st.sets(st.sampled_from([device.index for device in machine])))
    found = [Fault(d.index, "lost") if d.index in broken else d for d in machine]
    picked = unless_refused(names.pick, name, found)
    assert picked in [None, *found]
    if isinstance(picked, Device):
        assert names.matching(name, machine) == [picked]


# -- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------------
# What the inherited limit lets through against what the CUDA driver itself then enumerates.

GPU = "gpu\n name NVIDIA A100\n memory {memory}\n speed {speed}\n uuid GPU-{uuid}\n"
