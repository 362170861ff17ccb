"""Properties that hold for whatever people and programs may write."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from reserve_gpu.allocation import inherited_limit
from reserve_gpu.gpus import names
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.devices import Device
from tests.support.forker import Forker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here

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


# -- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------------
# What the inherited limit lets through against what the CUDA driver itself then enumerates.

GPU = "gpu\n name NVIDIA A100\n memory {memory}\n speed {speed}\n uuid GPU-{uuid}\n"
INSTANCE = " instance {slot}\n uuid MIG-{uuid}\n"
TAIL = "-0000-4000-8000-000000000000"
A1, A2, B3 = (beginning + TAIL for beginning in ("aaaa1111", "aaaa2222", "bbbb3333"))
C1, C2, D3 = (beginning + TAIL for beginning in ("cccc1111", "cccc2222", "dddd3333"))

ONE_MODEL = "".join(GPU.format(memory=40960, speed=10, uuid=uuid) for uuid in (A1, A2, B3))
MODELS = "".join(
    GPU.format(memory=1024 * speed, speed=speed, uuid=uuid)
    for speed, uuid in ((20, A1), (10, A2), (80, B3))
)
# GPU 0 whole, GPU 1 split into three instances, GPU 2 in MIG mode with none.
SPLIT = "".join(
    ["driver 570.86.15\n"]
    + [GPU.format(memory=40960, speed=10, uuid=uuid) + " mig on\n" for uuid in (A1, A2)]
    + [INSTANCE.format(slot=slot, uuid=uuid) for slot, uuid in ((0, C1), (2, C2), (5, D3))]
    + [GPU.format(memory=40960, speed=10, uuid=B3) + " mig on\n"]
).replace(" mig on\n", "", 1)

NUMBERS_SEEN = st.sampled_from([
    *("0", "1", "2", "3", "-1", "00", "+1", "+-1", "-0", " 1", "\t2", "\v0", "1 ", "1gpu2", "0x1"),
    *("1.9", "2:0", "", " ", "junk", "NoDevFiles", "none", "all", "\xa01", "1" * 30, "\u0663"),
])  # fmt: skip
UUIDS_SEEN = st.sampled_from([
    *(f"GPU-{uuid}" for uuid in (A1, A2, B3)),
    *("GPU-", "GPU", "GPU-aaaa", "GPU-aaaa1", "GPU-aaaa2222-", "GPU-b", "gpu-b", "GPU-B", "GPU-c"),
    *(" GPU-b", "\fGPU-b", "GPU-b ", "GPU-b\n", "\x1cGPU-b", "\xa0GPU-b", f"GPU-{B3}0", B3, "MIG-"),
])  # fmt: skip
INSTANCES_SEEN = st.sampled_from([
    *(f"MIG-{uuid}" for uuid in (C1, C2, D3)),
    *("MIG-", "MIG", "MIG-cccc", "MIG-cccc1", "MIG-cccc2222-", "MIG-d", "MIG-D", " MIG-d", "MIG-e"),
])  # fmt: skip
VALUES = st.lists(NUMBERS_SEEN | UUIDS_SEEN, max_size=5).map(",".join)
SIGNS = st.text("012 ,-+GPUMIgab\t", max_size=10)


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


def allowed(value: str | None, order: str | None) -> list[str]:
    """Return the devices that the inherited limit lets through, by their bare UUIDs."""
    before = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    with Nvml() as nvml:
        devices = [
            d for d in inherited_limit.devices_within_limit(nvml, before) if isinstance(d, Device)
        ]
    return sorted(names.bare_uuid(device.uuid) for device in devices)


def cuda_shows(forker: Forker, value: str | None, order: str | None) -> list[str]:
    """Return the devices that CUDA shows."""
    variables = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    set_ones = {name: text for name, text in variables.items() if text is not None}
    return sorted(forker.cuda({**os.environ, **set_ones}))


# What starts a process for each example is tried less often.
FEWER = settings(max_examples=80)


@FEWER
@given(st.none() | VALUES | SIGNS, st.sampled_from(["PCI_BUS_ID", "FASTEST_FIRST", None]))
@example("9" * 5000, None)
@example("0,-0", "PCI_BUS_ID")
def test_limit_on_one_model(
    here: Here, forker: Forker, value: str | None, order: str | None
) -> None:
    """On GPUs of one model, in any order, the limit is what CUDA shows."""
    here.write(ONE_MODEL)
    assert allowed(value, order) == cuda_shows(forker, value, order)


@FEWER
@given(VALUES | SIGNS)
def test_limit_on_several_models(here: Here, forker: Forker, value: str) -> None:
    """On GPUs of several models, in PCI bus order, the limit is what CUDA shows."""
    here.write(MODELS)
    assert allowed(value, "PCI_BUS_ID") == cuda_shows(forker, value, "PCI_BUS_ID")


@pytest.mark.parametrize("value", ["0", "1", "2", "2,0", "1,GPU-b", "GPU-aaaa2,1", "0,7,1", "1,1"])
def test_a_limit_that_only_cuda_knows(here: Here, value: str) -> None:
    """On GPUs of several models no number without CUDA_DEVICE_ORDER is taken for NVML's."""
    here.write(MODELS)
    assert unless_refused(allowed, value, None) is None


@FEWER
@given(st.lists(INSTANCES_SEEN, max_size=4).map(",".join), st.sampled_from(["PCI_BUS_ID", None]))
def test_limit_of_instances(here: Here, forker: Forker, value: str, order: str | None) -> None:
    """On a machine with MIG the limit of instances' UUIDs is what CUDA shows."""
    here.write(SPLIT)
    assert allowed(value, order) == cuda_shows(forker, value, order)


@pytest.mark.parametrize(
    "value",
    [
        *(f"MIG-GPU-{A2}/7/0", f"MIG-GPU-{A2}/9/0,MIG-d", f"MIG-GPU-{A2}/8/0", f"MIG-GPU-{A2}/7"),
        *("GPU-a", "GPU-", "GPU-aaaa1", f"GPU-{A1},MIG-d", f"MIG-d,GPU-{A1}", "GPU-b"),
    ],
)
def test_limit_on_a_machine_with_instances(here: Here, forker: Forker, value: str) -> None:
    """Old names of instances, and UUIDs among GPUs with MIG on, are read as CUDA reads them."""
    here.write(SPLIT)
    assert allowed(value, None) == cuda_shows(forker, value, None)


@pytest.mark.parametrize("value", ["1", f"GPU-{A2}", "GPU-aaaa2"])
def test_limit_of_a_split_gpu(here: Here, forker: Forker, value: str) -> None:
    """Who may use a GPU may use any of its instances, of which CUDA would show the first."""
    here.write(SPLIT)
    assert cuda_shows(forker, value, "PCI_BUS_ID") == [C1]
    assert allowed(value, "PCI_BUS_ID") == [C1, C2, D3]
