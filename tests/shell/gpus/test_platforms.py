"""A notebook on every machine people have: the rows of the table in docs/machines.md.

What users, kernels, locks and single readings have to do with it is in the tests of their own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.model.errors import DriverError, ImpossibleError, RequestError
from tests.support.reserving import got, of_gpu, refused, variables, would_be_refused

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.platforms import on_a_host


@on_a_host
def test_a_host_is_not_told_of_containers(here: Here) -> None:
    """Outside of containers there is no such warning."""
    assert got() == "0"  # a warning would be an error here


@pytest.mark.parametrize("value", ["", "-1"])
def test_no_gpu_is_said_to_be_the_limits_doing(
    here: Here, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """If an inherited value hides every GPU, the error says so and quotes it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(reserve_gpu.ImpossibleError) as caught:
        reserve_gpu.reserve()
    assert str(caught.value).startswith(f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU")


def test_numbers_on_a_machine_where_one_model_is_split(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split GPU counts as a model: a number is refused, as only CUDA knows what it means."""
    here.use("mig570")  # CUDA's first is the split A100, the bus's first the T4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(RequestError, match="CUDA_DEVICE_ORDER"):
        reserve_gpu.reserve()


def test_an_instance_by_its_uuid(here: Here) -> None:
    """An instance is also named by its UUID or a start of it, and reserved for all who look."""
    here.use("mig")
    uuid = here.uuid("1:5")
    with here.rival("1:5"):
        for spelling in (uuid, uuid[:-2], "1:5"):
            assert of_gpu(refused(spelling), "1:5").startswith("reserved: ")
    assert got(uuid[:-2]) == uuid
    assert variables()["CUDA_DEVICE_MEMORY"] == "19968"


# -- drivers and bindings --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "words"), [("r470", "pid 4321000"), ("r440", "1 compute process")]
)
def test_old_drivers(here: Here, scenario: str, words: str) -> None:
    """A driver without today's queries gives right answers by those that it has."""
    here.use(scenario)
    assert words in of_gpu(refused(count=2))
    assert got() == "1"
    assert variables()["CUDA_DEVICE_MEMORY"] == "16160"


def test_drivers_that_get_a_struct_wrong(here: Here) -> None:
    """Processes are listed by the second query; drivers 535.43 to 535.98 break the third one."""
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


def test_ancient_driver(here: Here) -> None:
    """A driver that lacks even the initialisation of today's bindings is one line."""
    here.write("missing nvmlInitWithFlags\ngpu")
    with pytest.raises(DriverError, match=r"^[^\n]*Update the driver[^\n]*$"):
        reserve_gpu.reserve()
    assert variables() == {}


# -- GPUs in trouble, without a memory reading, with a desktop -------------------------------------


def test_gpus_in_trouble(here: Here) -> None:
    """Of eight GPUs the one without trouble is served; where it is gone each says its trouble."""
    here.use("trouble")
    causes = ["lost", "Permission", "Unknown Error", "prohibited", "4321000", "777", "MIG"]
    with here.rival("7"):
        text = refused()
    for index, cause in enumerate([*causes, "rival.ipynb"]):
        assert cause in of_gpu(text, str(index))
    for index in (3, 4):  # CUDA would refuse to let us in
        assert of_gpu(refused(index), str(index))
    assert got() == "7"


@on_a_host
def test_without_a_memory_reading(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes decide, the memory is the host's, and the variable comes back with the release."""
    here.use("gb10")
    monkeypatch.setenv("CUDA_DEVICE_MEMORY", "7")
    host_mib = int(re.findall(r"MemTotal: *(\d+) kB", Path("/proc/meminfo").read_text())[0]) // 1024
    assert got() == "1"
    assert variables()["CUDA_DEVICE_MEMORY"] == str(host_mib)
    assert "4321000" in of_gpu(refused(count=2))
    reserve_gpu.release()
    assert variables() == {"CUDA_DEVICE_MEMORY": "7"}
    assert got(min_memory=f"{host_mib}MiB") == "1"
    with pytest.raises(ImpossibleError, match="none has"):
        reserve_gpu.reserve(min_memory=f"{host_mib + 1}MiB")


def test_a_desktop_is_idle(here: Here) -> None:
    """Xorg and a browser with 2 GB of graphics memory on GPU 0 do not make it busy."""
    here.use("desktop")
    assert got() == "0"


def test_memory_of_nobody(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no process accounts for makes a GPU busy, above a threshold that can be set."""
    here.use("orphan")
    text = refused(count=2)
    assert of_gpu(text) == "busy: 2.9 GiB in use by no visible process"
    _, advice, wait, *_ = text.splitlines()
    assert advice.endswith(": fuser -v /dev/nvidia*")
    assert wait.startswith("Or wait in the queue: ")
    here.write("gpu\n memory 8192\n used 3000")
    assert advice in str(reserve_gpu.status())
    here.use("orphan")
    assert got() == "1"
    reserve_gpu.release()
    monkeypatch.setenv("RESERVE_GPU_IDLE_MEMORY", "3GiB")
    assert got() == "0"


# -- going on without ------------------------------------------------------------------------------

BEFORE = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_MEMORY": "7"}
CLOSED = {"CUDA_VISIBLE_DEVICES": ""}
# Scenario, more environment, the variables then, and what is said.
OPTIONAL: dict[str, tuple[str, dict[str, str], str | dict[str, str], str]] = {
    "a GPU is there": ("gpu\ngpu", {}, "0", "Reserving GPU0"),
    "no driver": ("gpu\nfail nvmlInitWithFlags * 9", {}, BEFORE, "kernel module"),
    "nothing free": ("gpu\n compute 1 500", {}, CLOSED, "0    busy "),
    "no lock directory": ("gpu", {"RESERVE_GPU_LOCK_DIR": "/proc/no"}, CLOSED, "/proc/no"),
}


@pytest.mark.parametrize(
    ("scenario", "extra", "expected", "words"), OPTIONAL.values(), ids=OPTIONAL.keys()
)
def test_optional(
    here: Here,
    monkeypatch: pytest.MonkeyPatch,
    scenario: str,
    extra: dict[str, str],
    expected: str | dict[str, str],
    words: str,
) -> None:
    """With --optional a notebook goes on, with no GPU to land on by mistake, and says why."""
    here.write(scenario)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if expected == "0" else {}
    for name, text in {**BEFORE, **order, **extra}.items():
        monkeypatch.setenv(name, text)
    cell = here.shell().run("%reserve_gpu --optional")
    assert cell.error is None
    assert words in cell.all
    if isinstance(expected, str):
        assert variables()["CUDA_VISIBLE_DEVICES"] == expected
    else:
        assert variables() == expected
        assert "Continuing without a GPU." in cell.stdout + cell.stderr


# -- choosing --------------------------------------------------------------------------------------

CHOICES: list[tuple[str, dict[str, Any], str]] = [
    ("eight", {"count": 2}, "0,1"),
    ("mixed", {"min_memory": "9GB"}, "1"),
    ("mixed", {"min_memory": "12GiB"}, "3"),
    ("mixed", {"name": "rtx"}, "1"),
    ("mixed", {"count": 2, "name": "GeForce", "min_memory": "10000"}, "1,3"),
]


@pytest.mark.parametrize(("scenario", "wishes", "visible"), CHOICES)
def test_choosing(here: Here, scenario: str, wishes: dict[str, Any], visible: str) -> None:
    """A GPU is had by number, memory, and text in the name."""
    here.use(scenario)
    assert got(**wishes) == visible


def test_two_of_eight_are_a_pair(here: Here) -> None:
    """Of the free GPUs two that NVLink connects come before the two that come first."""
    here.use("eight")
    with here.rival("0"), here.rival("3"):
        assert got(count=2) == "4,5"


# What can never be had, and what must be said of it.
IMPOSSIBLE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("eight", {"count": 9}, ["There are 8 GPUs here; you asked for 9"]),
    ("mixed", {"min_memory": "80GB"}, ["none has 80GB (74.5 GiB); the largest has 23.9 GiB"]),
    ("mixed", {"name": "H100"}, ["H100", "1 GeForce RTX 2080 Ti"]),
    ("mixed", {"count": 3, "min_memory": "10GB"}, ["3 GPUs", "GPU1 and GPU3 are suitable"]),
]


@pytest.mark.parametrize(("scenario", "wishes", "words"), IMPOSSIBLE)
def test_the_impossible(
    here: Here, monkeypatch: pytest.MonkeyPatch, scenario: str, wishes: dict[str, Any],
    words: list[str],
) -> None:  # fmt: skip
    """What no state of the machine could satisfy is one line with what there is, and no more."""
    here.use(scenario)
    monkeypatch.setenv("CUDA_DEVICE_MEMORY", "7")
    with pytest.raises(RequestError) as caught:
        reserve_gpu.reserve(**wishes)
    assert all(part in str(caught.value) for part in words), caught.value
    assert "\n" not in str(caught.value)
    assert variables() == {"CUDA_DEVICE_MEMORY": "7"}


def test_the_possible_that_is_not_free_is_not_impossible(here: Here) -> None:
    """Where enough GPUs fit but not enough are free, the request may be repeated later."""
    here.use("mixed")
    with here.rival("3"):
        text = refused(count=2, min_memory="10GB")
    assert "rival.ipynb" in of_gpu(text, "3")
    assert of_gpu(text, "0") == "unfit: has 8.0 GiB"
