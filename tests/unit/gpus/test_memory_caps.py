"""What keeps frameworks within a part of a GPU: the variables, and lines for people to type."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.gpus import cuda_environment, memory_caps
from reserve_gpu.gpus.cuda_environment import (
    CUPY_LIMIT,
    OLD_TORCH_ALLOCATOR,
    OLD_XLA_FRACTION,
    TF_GROWTH,
    TORCH_ALLOCATOR,
    XLA_FRACTION,
)
from reserve_gpu.model.devices import MIB, Device
from reserve_gpu.reservation.environment_changes import memory_limit_notices

if TYPE_CHECKING:
    from pathlib import Path


BIG = Device(2, "GPU-a", memory_mib=81920)
SMALL = Device(3, "GPU-b", memory_mib=40960)
INSTANCE = Device(1, "MIG-d", memory_mib=20096, instance=0)
PART_MIB = 11_008.0  # which leaves 10 GiB beside the context
ROOM = str(10_240 * MIB)
NO_CAPS: dict[str, str | None] = dict.fromkeys(cuda_environment.CAPS)


TORCH, OLD_TORCH = "torch-2.10.0.dist-info", "torch-2.9.1+cu128.dist-info"
TENSORFLOW = "tensorflow-2.19.0.dist-info"
SEGMENTS = "expandable_segments:True"


# -- the variables ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "fraction"),
    [
        ([BIG], "0.125000"),
        ([BIG, SMALL], "0.125000"),
        ([SMALL], "0.250000"),
        ([INSTANCE], "0.509554"),
    ],
)
def test_each_framework_in_its_own_unit(
    packages: Any, devices: list[Device], fraction: str
) -> None:
    """JAX and PyTorch get a fraction of the largest device, rounded down, and CuPy bytes."""
    packages(TORCH)
    assert memory_caps.variables(devices, PART_MIB, NO_CAPS) == {
        XLA_FRACTION: fraction,
        CUPY_LIMIT: ROOM,
        TORCH_ALLOCATOR: f"per_process_memory_fraction:{fraction}",
        TF_GROWTH: "true",
    }


@pytest.mark.parametrize(
    ("version", "knows"),
    [
        ("2.9.1+cu128", False),
        ("1.13.1", False),
        ("2.10.0", True),
        ("2.10.0a0+git1", True),
        ("2.13.0+cpu", True),
        ("3.0", True),
        ("unknown", False),
    ],
)
def test_pytorch_that_would_raise_gets_no_word(packages: Any, version: str, *, knows: bool) -> None:
    """A PyTorch that raises on a word that it does not know is not given it."""
    packages(f"torch-{version}.dist-info")
    assert (TORCH_ALLOCATOR in memory_caps.variables([BIG], PART_MIB, NO_CAPS)) is knows


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([OLD_TORCH, TENSORFLOW], {"torch": "2.9.1+cu128", "tensorflow": "2.19.0"}),
        (["torch-1.13.1.egg-info"], {"torch": "1.13.1"}),
        (["torch-2.5.1-py3.12.egg-info"], {"torch": "2.5.1"}),
        (["torch-2.10.0a0+b558c986e8.nv25.11.dist-info"], {"torch": "2.10.0a0+b558c986e8.nv25.11"}),
        (["torch", "torch_geometric-2.6.1.dist-info", "~orch-2.9.1.dist-info"], {}),
        (["tensorflow_cpu-2.19.0.dist-info", "tensorflow-estimator-2.15.dist-info"], {}),
    ],
)
def test_what_is_installed(packages: Any, names: list[str], found: dict[str, str]) -> None:
    """PyTorch and TensorFlow are known by the folders beside them, whoever has installed them."""
    packages(*names)
    assert memory_caps.installed() == found


def test_the_first_on_the_path_counts(
    packages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two versions that one counts which Python imports; odd entries of the path none."""
    packages(TORCH)
    (tmp_path / OLD_TORCH).mkdir()
    monkeypatch.chdir(tmp_path)
    odd: list[Any] = [tmp_path, 7, b".", "\udcff", "a\0b", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "path", [*odd, *sys.path, ""])
    assert memory_caps.installed() == {"torch": "2.10.0"}
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert memory_caps.installed() == {"torch": "2.9.1+cu128"}


@pytest.mark.parametrize(
    ("theirs", "missing", "stands"),
    [
        ({XLA_FRACTION: ".5"}, {XLA_FRACTION}, [XLA_FRACTION]),
        ({OLD_XLA_FRACTION: ".5"}, {XLA_FRACTION}, [OLD_XLA_FRACTION]),
        ({CUPY_LIMIT: "50%"}, {CUPY_LIMIT}, [CUPY_LIMIT]),
        ({TF_GROWTH: "false"}, {TF_GROWTH}, []),
        (
            {TORCH_ALLOCATOR: "backend:native,per_process_memory_fraction:0.5"},
            {TORCH_ALLOCATOR},
            [TORCH_ALLOCATOR],
        ),
        (
            {OLD_TORCH_ALLOCATOR: "per_process_memory_fraction:0.5"},
            {TORCH_ALLOCATOR},
            [OLD_TORCH_ALLOCATOR],
        ),
        ({XLA_FRACTION: "", CUPY_LIMIT: ""}, set(), []),
    ],
)
def test_what_the_user_set_stays(
    packages: Any, theirs: dict[str, str], missing: set[str], stands: list[str]
) -> None:
    """No value that the user has set is replaced, by either of its names, and it is named."""
    packages(TORCH)
    inherited = {**NO_CAPS, **theirs}
    everything = {XLA_FRACTION, CUPY_LIMIT, TORCH_ALLOCATOR, TF_GROWTH}
    assert memory_caps.variables([BIG], PART_MIB, inherited).keys() == everything - missing
    assert [*memory_caps.capped_by(inherited).values()] == stands


def test_pytorchs_other_words_stay(packages: Any) -> None:
    """The fraction is appended to what PyTorch would have read."""
    packages(TORCH)
    written = memory_caps.variables([BIG], PART_MIB, {**NO_CAPS, TORCH_ALLOCATOR: f"{SEGMENTS},"})
    assert written[TORCH_ALLOCATOR] == f"{SEGMENTS},per_process_memory_fraction:0.125000"


@pytest.mark.parametrize("beside", [{}, {TORCH_ALLOCATOR: "ignored:1"}])
def test_pytorchs_older_name_stands(packages: Any, beside: dict[str, str]) -> None:
    """Where the user has set the name that PyTorch reads first, the line to type is left."""
    packages(TORCH)
    theirs = {OLD_TORCH_ALLOCATOR: SEGMENTS, **beside}
    written = memory_caps.variables([BIG], PART_MIB, {**NO_CAPS, **theirs})
    assert written.keys() == {XLA_FRACTION, CUPY_LIMIT, TF_GROWTH}
    assert lines([BIG], theirs) == [TORCH_LINE]


def test_the_allowance_can_be_set(packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allowance for the CUDA context is a setting."""
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", "1008MiB")
    assert memory_caps.variables([BIG], PART_MIB, NO_CAPS)[CUPY_LIMIT] == str(10_000 * MIB)


# -- what there is to type -------------------------------------------------------------------------

TORCH_LINE = "torch.cuda.set_per_process_memory_fraction(0.125000)"
TENSORFLOW_LINE = (
    'for gpu in tf.config.list_physical_devices("GPU"): '
    "tf.config.set_logical_device_configuration(gpu, "
    "[tf.config.LogicalDeviceConfiguration(memory_limit=10240)])"
)


LATE = (
    "CUDA is already running: JAX, TensorFlow and CuPy keep the limit that they started with until "
    "you restart."
)


def lines(
    devices: list[Device], inherited: dict[str, str] | None = None, *, is_late: bool = False
) -> list[str]:
    """Return the notes of a part of these devices; of those with a line to type, the line alone."""
    values = {**NO_CAPS, **(inherited or {})}
    written = memory_caps.variables(devices, PART_MIB, values)
    told = memory_limit_notices(devices, PART_MIB, values, written, is_late=is_late)
    return [note.partition("\n")[2] or note for note in told]


@pytest.mark.parametrize(
    ("names", "typed"),
    [
        ([], []),
        ([TORCH], []),
        ([OLD_TORCH], [TORCH_LINE]),
        ([TENSORFLOW], [TENSORFLOW_LINE]),
        ([OLD_TORCH, TENSORFLOW], [TENSORFLOW_LINE, TORCH_LINE]),
    ],
)
def test_a_line_to_type(packages: Any, names: list[str], typed: list[str]) -> None:
    """Where a framework is installed that no variable caps, the user reads what to type."""
    packages(*names)
    assert lines([BIG]) == typed


def test_lines_for_several_gpus(packages: Any) -> None:
    """What is typed caps each of several GPUs, PyTorch by the fraction of the largest."""
    packages(OLD_TORCH, TENSORFLOW)
    line = "for n in range(2): torch.cuda.set_per_process_memory_fraction(0.125000, n)"
    assert lines([BIG, SMALL]) == [TENSORFLOW_LINE, line]


def test_what_is_typed_caps(packages: Any) -> None:
    """The lines are Python, and call PyTorch and TensorFlow with the right numbers."""
    packages(OLD_TORCH, TENSORFLOW)
    calls: list[Any] = []

    def note(*arguments: Any) -> None:
        calls.append(arguments)

    names = {
        "torch": SimpleNamespace(cuda=SimpleNamespace(set_per_process_memory_fraction=note)),
        "tf": SimpleNamespace(
            config=SimpleNamespace(
                list_physical_devices=lambda kind: [f"{kind}:0", f"{kind}:1"],
                set_logical_device_configuration=note,
                LogicalDeviceConfiguration=lambda memory_limit: memory_limit,
            )
        ),
    }
    for line in (*lines([BIG]), *lines([BIG, BIG])):
        exec(line, names)
    gpus = [("GPU:0", [10240]), ("GPU:1", [10240])]
    assert calls == [*gpus, (0.125,), *gpus, (0.125, 0), (0.125, 1)]


def test_no_line_beside_a_cap_of_the_users(packages: Any) -> None:
    """Who has capped PyTorch by its variable is told that it stands, and gets nothing to type."""
    packages(OLD_TORCH)
    (told,) = lines([BIG], {OLD_TORCH_ALLOCATOR: "per_process_memory_fraction:0.5"})
    assert told.startswith(f"{OLD_TORCH_ALLOCATOR} is already set, and keeps its value")


def test_no_fraction_without_a_size(packages: Any) -> None:
    """Where the memory of a GPU is not known there is no fraction to type either."""
    packages(OLD_TORCH)
    assert lines([Device(0, "GPU-c")]) == []


def test_once_cuda_runs(packages: Any) -> None:
    """What runs reads no variable any more: that is said, and what to type for any PyTorch."""
    packages(TORCH)
    assert lines([BIG], is_late=True) == [LATE, TORCH_LINE]
    (stands, late) = lines(
        [BIG], {TORCH_ALLOCATOR: "per_process_memory_fraction:0.5"}, is_late=True
    )
    assert (stands.split()[0], late) == (TORCH_ALLOCATOR, LATE)


@pytest.mark.parametrize("allocator", ["platform", "cuda_async", "default"])
def test_an_allocator_that_keeps_to_no_limit(packages: Any, allocator: str) -> None:
    """With some of JAX's allocators its cap is none."""
    packages()
    values = {XLA_FRACTION: "0.1", CUPY_LIMIT: "1", "XLA_PYTHON_CLIENT_ALLOCATOR": allocator}
    kept = {"cupy": CUPY_LIMIT} | ({"jax": XLA_FRACTION} if allocator == "default" else {})
    assert memory_caps.limiting_variables(values) == kept
