"""Tests of the platforms in docs/machines.md: drivers, models, limits, and optional GPUs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model.errors import ImpossibleError, RequestError
from tests.support.reserving import got, of_gpu, refused, variables, would_be_refused

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.platforms import on_a_host


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_limit_that_hides_every_gpu(
    here: Here, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """If an inherited value hides every GPU, the error quotes it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(reserve_gpu.ImpossibleError) as caught:
        reserve_gpu.reserve()
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in str(caught.value)


def test_inherited_numbers_with_a_split_gpu(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inherited numbers are refused if a GPU is split, because only CUDA knows their meaning."""
    here.use("mig570")  # CUDA's first GPU is the split A100, the first on the bus the T4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(RequestError, match="CUDA_DEVICE_ORDER"):
        reserve_gpu.reserve()


def test_an_instance_by_its_uuid(here: Here) -> None:
    """A MIG instance can be named by its UUID or the start of it."""
    here.use("mig")
    uuid = here.uuid("1:5")
    with here.rival("1:5"):
        for spelling in (uuid, uuid[:-2], "1:5"):
            assert of_gpu(refused(spelling), "1:5").startswith("reserved: ")
    assert got(uuid[:-2]) == uuid
    assert variables()["CUDA_DEVICE_MEMORY"] == "19968"


# -- drivers and bindings --------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["r470", "r440"])
def test_old_drivers(here: Here, scenario: str) -> None:
    """With a driver that lacks newer functions, a busy GPU is found with its older functions."""
    here.use(scenario)
    assert of_gpu(refused(count=2)).startswith("busy: ")
    assert got() == "1"
    assert variables()["CUDA_DEVICE_MEMORY"] == "16160"


def test_drivers_with_a_broken_query(here: Here) -> None:
    """The third process query, which drivers 535.43 to 535.98 break, is only used for counts."""
    here.write(
        "driver 535.86.10\ngpu\n  graphics 1100 350\n  compute 4321000 3500\n"
        "  compute 4321001 7000\n  mps 777 100"
    )
    (row,) = would_be_refused().rows
    listed = {process.pid: process.memory_mib for process in row.processes}
    assert listed == {4321000: 3500, 4321001: 7000, 777: 100}
    functions = {call.split()[0] for call in here.calls()}
    assert "nvmlDeviceGetComputeRunningProcesses_v2" in functions
    assert "nvmlDeviceGetGraphicsRunningProcesses_v2" in functions
    assert "nvmlDeviceGetGraphicsRunningProcesses_v3" not in functions  # of others: the count alone


# -- states of GPUs --------------------------------------------------------------------------------


def test_faults_of_many_gpus(here: Here) -> None:
    """The only healthy GPU of eight is chosen, and without it, every GPU reports its fault."""
    here.use("trouble")
    causes = ["lost", "Permission", "Unknown Error", "prohibited", "4321000", "777", "MIG"]
    with here.rival("7"):
        text = refused()
    for index, cause in enumerate([*causes, "rival.ipynb"]):
        assert cause in of_gpu(text, str(index))
    assert got() == "7"


@on_a_host
def test_a_gpu_with_the_hosts_memory(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a GPU shares the host's memory, processes decide, and its memory is the host's."""
    here.use("gb10")
    monkeypatch.setenv("CUDA_DEVICE_MEMORY", "7")
    host_mib = int(re.findall(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())[0]) // 1024
    assert got() == "1"
    assert variables()["CUDA_DEVICE_MEMORY"] == str(host_mib)
    assert "4321000" in of_gpu(refused(count=2))
    reserve_gpu.release()
    assert variables() == {"CUDA_DEVICE_MEMORY": "7"}
    assert got(min_memory=f"{host_mib}MiB") == "1"
    with pytest.raises(ImpossibleError):
        reserve_gpu.reserve(min_memory=f"{host_mib + 1}MiB")


def test_a_desktop_is_idle(here: Here) -> None:
    """A GPU on which Xorg and a browser use 2 GB of graphics memory is idle."""
    here.use("desktop")
    assert got() == "0"


def test_memory_of_no_process(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with memory in use by no visible process is busy, above a configurable limit."""
    here.use("orphan")
    text = refused(count=2)
    assert of_gpu(text).startswith("busy: 2.9 GiB ")
    assert "fuser -v /dev/nvidia*" in text
    assert got() == "1"
    reserve_gpu.release()
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", "3GiB")
    assert got() == "0"


# -- optional GPUs ---------------------------------------------------------------------------------

BEFORE = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_MEMORY": "7"}
HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
# The scenario, additional variables, and the variables after a failed reservation.
OPTIONAL: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "no driver": ("gpu\nfail nvmlInitWithFlags * 9", {}, BEFORE),
    "no free GPU": ("gpu\n compute 1 500", {}, HIDDEN),
    "no lock directory": ("gpu", {"RESERVE_GPU_LOCK_DIR": "/proc/no"}, HIDDEN),
}


@pytest.mark.parametrize(("scenario", "extra", "expected"), OPTIONAL.values(), ids=OPTIONAL)
def test_optional(
    here: Here, monkeypatch: pytest.MonkeyPatch, scenario: str, extra: dict[str, str],
    expected: dict[str, str],
) -> None:  # fmt: skip
    """With --optional, a notebook continues without a GPU, and frameworks don't see any either."""
    here.write(scenario)
    for name, text in {**BEFORE, **extra}.items():
        monkeypatch.setenv(name, text)
    cell = here.shell().run("%reserve_gpu --optional")
    assert cell.error is None
    assert variables() == expected
    assert "without a GPU" in cell.stdout + cell.stderr


def test_optional_with_a_free_gpu(here: Here) -> None:
    """With --optional, a free GPU is reserved."""
    assert here.shell().run("%reserve_gpu --optional").error is None
    assert variables()["CUDA_VISIBLE_DEVICES"] == "0"


# -- choosing --------------------------------------------------------------------------------------


def test_linked_gpus_are_preferred(here: Here) -> None:
    """Two GPUs that NVLink connects are preferred to the first two free GPUs."""
    here.use("eight")
    with here.rival("0"), here.rival("3"):
        assert got(count=2) == "4,5"


@pytest.mark.parametrize(
    ("scenario", "arguments"),
    [
        ("eight", {"count": 9}),
        ("mixed", {"min_memory": "80GB"}),
        ("mixed", {"name": "H100"}),
        ("mixed", {"count": 3, "min_memory": "10GB"}),
    ],
)
def test_impossible_requests(
    here: Here, monkeypatch: pytest.MonkeyPatch, scenario: str, arguments: dict[str, Any]
) -> None:
    """A request that the machine can never satisfy is refused in one line, without changes."""
    here.use(scenario)
    monkeypatch.setenv("CUDA_DEVICE_MEMORY", "7")
    with pytest.raises(ImpossibleError) as caught:
        reserve_gpu.reserve(**arguments)
    assert "\n" not in str(caught.value)
    assert variables() == {"CUDA_DEVICE_MEMORY": "7"}


def test_a_request_that_is_only_impossible_now(here: Here) -> None:
    """A request for suitable GPUs of which too few are free is not impossible."""
    here.use("mixed")
    with here.rival("3"):
        text = refused(count=2, min_memory="10GB")
    assert "rival.ipynb" in of_gpu(text, "3")
    assert of_gpu(text, "0").startswith("unfit: ")
