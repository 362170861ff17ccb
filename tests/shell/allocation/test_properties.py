"""Properties of the magic, and of the inherited device limit compared to the CUDA driver's."""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from IPython.core.error import UsageError

import reserve_gpu
from reserve_gpu.allocation import inherited_limit
from reserve_gpu.gpus import names
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model.devices import Device
from tests.support.forker import Forker
from tests.support.properties import result_unless_refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.shell import Shell

pytestmark = pytest.mark.full

# -- the magic -------------------------------------------------------------------------------------

TYPED = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12)
OPTIONS = "-n --count --min-memory --name --note --optional --release --rel --wait -- -"
WORDS = st.one_of(
    st.sampled_from(["0", "1", "0,1", "GPU-", "GPU0", "0000:01:00.0", "7", "0:0", "16GB", "1MiB"]),
    st.sampled_from(OPTIONS.split()),
    st.sampled_from(["-1", "-n1", "-n=x", "--count=0", "--note=", "-h", "--he", "@x", "$x", "{1}"]),
    st.sampled_from(["'", '"', "\\", "1e9", "9" * 5000]),
    TYPED,
)


@pytest.fixture
def shell(here: Here) -> Shell:
    """Return an IPython shell on a machine with two idle GPUs."""
    return here.shell()


@given(st.lists(WORDS, max_size=5).map(" ".join) | TYPED)
@example("-n " + "9" * 5000)
@example("--min-memory " + "9" * 5000)
def test_the_magic_runs_any_line_or_raises_a_usage_error(shell: Shell, line: str) -> None:
    """On an idle machine, the only exception is a usage error with one line of text."""
    text = ""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            shell.shell.run_line_magic("reserve_gpu", line)
    except UsageError as error:
        text = str(error) or "\n\n"
    finally:
        reserve_gpu.release()
    assert len(text.splitlines()) <= 1


# -- CUDA_VISIBLE_DEVICES --------------------------------------------------------------------------

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

NUMBERS = st.sampled_from([
    *("0", "1", "2", "3", "-1", "00", "+1", "+-1", "-0", " 1", "\t2", "\v0", "1 ", "1gpu2", "0x1"),
    *("1.9", "2:0", "", " ", "junk", "NoDevFiles", "none", "all", "\xa01", "1" * 30, "\u0663"),
])  # fmt: skip
UUIDS = st.sampled_from([
    *(f"GPU-{uuid}" for uuid in (A1, A2, B3)),
    *("GPU-", "GPU", "GPU-aaaa", "GPU-aaaa1", "GPU-aaaa2222-", "GPU-b", "gpu-b", "GPU-B", "GPU-c"),
    *(" GPU-b", "\fGPU-b", "GPU-b ", "GPU-b\n", "\x1cGPU-b", "\xa0GPU-b", f"GPU-{B3}0", B3, "MIG-"),
])  # fmt: skip
INSTANCES = st.sampled_from([
    *(f"MIG-{uuid}" for uuid in (C1, C2, D3)),
    *("MIG-", "MIG", "MIG-cccc", "MIG-cccc1", "MIG-cccc2222-", "MIG-d", "MIG-D", " MIG-d", "MIG-e"),
])  # fmt: skip
VALUES = st.lists(NUMBERS | UUIDS, max_size=5).map(",".join)
CHARACTERS = st.text("012 ,-+GPUMIgab\t", max_size=10)


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Return a process that forks a child for each CUDA start."""
    with Forker(tmp_path_factory.mktemp("forker")) as forker:
        yield forker


def allowed(value: str | None, order: str | None) -> list[str]:
    """Return the bare UUIDs of the devices within the inherited limit."""
    before = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    with Nvml() as nvml:
        devices = [
            d for d in inherited_limit.devices_within_limit(nvml, before) if isinstance(d, Device)
        ]
    return sorted(names.bare_uuid(device.uuid) for device in devices)


def cuda_shows(forker: Forker, value: str | None, order: str | None) -> list[str]:
    """Return the bare UUIDs of the devices that CUDA enumerates."""
    variables = {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": order}
    set_ones = {name: text for name, text in variables.items() if text is not None}
    return sorted(forker.cuda({**os.environ, **set_ones}))


# Each example of these tests starts a process.
FEWER = settings(max_examples=80)


@FEWER
@given(st.none() | VALUES | CHARACTERS, st.sampled_from(["PCI_BUS_ID", "FASTEST_FIRST", None]))
@example("9" * 5000, None)
@example("0,-0", "PCI_BUS_ID")
def test_the_limit_on_one_model_is_what_cuda_enumerates(
    here: Here, forker: Forker, value: str | None, order: str | None
) -> None:
    """If all GPUs are of one model, the limit is correct in any order."""
    here.write(ONE_MODEL)
    assert allowed(value, order) == cuda_shows(forker, value, order)


@FEWER
@given(VALUES | CHARACTERS)
def test_the_limit_on_several_models_is_what_cuda_enumerates(
    here: Here, forker: Forker, value: str
) -> None:
    """In PCI bus order, the limit is also correct for GPUs of several models."""
    here.write(MODELS)
    assert allowed(value, "PCI_BUS_ID") == cuda_shows(forker, value, "PCI_BUS_ID")


@pytest.mark.parametrize("value", ["0", "2", "1,GPU-b", "GPU-aaaa2,1", "0,7,1"])
def test_numbers_without_an_order_are_refused_on_several_models(here: Here, value: str) -> None:
    """Without CUDA_DEVICE_ORDER, CUDA's numbers can differ from NVML's."""
    here.write(MODELS)
    assert result_unless_refused(allowed, value, None) is None


@FEWER
@given(st.lists(INSTANCES, max_size=4).map(",".join), st.sampled_from(["PCI_BUS_ID", None]))
def test_the_limit_to_mig_instances_is_what_cuda_enumerates(
    here: Here, forker: Forker, value: str, order: str | None
) -> None:
    """Prefixes of UUIDs of MIG instances are read as CUDA reads them."""
    here.write(SPLIT)
    assert allowed(value, order) == cuda_shows(forker, value, order)


@pytest.mark.parametrize(
    "value",
    [
        *(f"MIG-GPU-{A2}/7/0", f"MIG-GPU-{A2}/9/0,MIG-d", f"MIG-GPU-{A2}/8/0", f"MIG-GPU-{A2}/7"),
        *("GPU-a", "GPU-", "GPU-aaaa1", f"GPU-{A1},MIG-d", f"MIG-d,GPU-{A1}", "GPU-b"),
    ],
)
def test_the_limit_on_a_machine_with_mig_is_what_cuda_enumerates(
    here: Here, forker: Forker, value: str
) -> None:
    """Old names of instances, and UUIDs of GPUs in MIG mode, are read as CUDA reads them."""
    here.write(SPLIT)
    assert allowed(value, None) == cuda_shows(forker, value, None)


@pytest.mark.parametrize("value", ["1", f"GPU-{A2}", "GPU-aaaa2"])
def test_a_limit_to_a_mig_gpu_allows_all_its_instances(
    here: Here, forker: Forker, value: str
) -> None:
    """CUDA enumerates only the first instance of such a GPU."""
    here.write(SPLIT)
    assert cuda_shows(forker, value, "PCI_BUS_ID") == [C1]
    assert allowed(value, "PCI_BUS_ID") == [C1, C2, D3]
