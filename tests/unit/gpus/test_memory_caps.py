"""Tests of the variables and lines of code that limit frameworks to a part of a GPU."""

from __future__ import annotations

import sys
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
PART_MIB = 11_008.0  # 10 GiB without the allowance for the CUDA context
ROOM = str(10_240 * MIB)
NO_CAPS: dict[str, str | None] = dict.fromkeys(cuda_environment.CAPS)
TORCH, OLD_TORCH = "torch-2.10.0.dist-info", "torch-2.9.1+cu128.dist-info"
TENSORFLOW = "tensorflow-2.19.0.dist-info"
SEGMENTS = "expandable_segments:True"


@pytest.mark.parametrize(
    ("devices", "fraction"),
    [([BIG], "0.125000"), ([SMALL, BIG], "0.125000")],
)
def test_each_framework_is_limited_in_its_own_unit(
    packages: Any, devices: list[Device], fraction: str
) -> None:
    """CuPy's limit is in bytes, and JAX's and PyTorch's a fraction of the largest device."""
    packages(TORCH)
    assert memory_caps.variables(devices, PART_MIB, NO_CAPS) == {
        XLA_FRACTION: fraction,
        CUPY_LIMIT: ROOM,
        TORCH_ALLOCATOR: f"per_process_memory_fraction:{fraction}",
        TF_GROWTH: "true",
    }


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.9.1+cu128", False),
        ("2.10.0", True),
        ("2.10.0a0+git1", True),
        (None, False),
    ],
)
def test_pytorch_versions_with_a_fraction(version: str | None, *, expected: bool) -> None:
    """The fraction is set from PyTorch 2.10 on, because earlier versions raise an error for it."""
    assert memory_caps.knows_fraction(version) is expected


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([OLD_TORCH, TENSORFLOW], {"torch": "2.9.1+cu128", "tensorflow": "2.19.0"}),
        (["torch-2.5.1-py3.12.egg-info"], {"torch": "2.5.1"}),
        (["torch", "torch_geometric-2.6.1.dist-info", "tensorflow-estimator-2.15.dist-info"], {}),
    ],
)
def test_installed_versions(packages: Any, names: list[str], found: dict[str, str]) -> None:
    """The versions of PyTorch and TensorFlow are read from the names of their metadata folders."""
    packages(*names)
    assert memory_caps.installed() == found


def test_the_first_version_on_the_path_counts(
    packages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that Python would import is found, and unusable entries of the path skipped."""
    packages(TORCH)
    (tmp_path / OLD_TORCH).mkdir()
    monkeypatch.chdir(tmp_path)
    odd: list[Any] = [tmp_path, 7, b".", "\udcff", "a\0b", str(tmp_path / "none")]
    monkeypatch.setattr(sys, "path", [*odd, *sys.path, ""])
    assert memory_caps.installed() == {"torch": "2.10.0"}
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert memory_caps.installed() == {"torch": "2.9.1+cu128"}


@pytest.mark.parametrize(
    ("user_values", "missing", "kept"),
    [
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
        ({OLD_TORCH_ALLOCATOR: SEGMENTS, TORCH_ALLOCATOR: "ignored:1"}, {TORCH_ALLOCATOR}, []),
    ],
)
def test_the_users_limits_are_kept(
    packages: Any, user_values: dict[str, str], missing: set[str], kept: list[str]
) -> None:
    """A limit that the user has set is not replaced, whichever of its names the user chose."""
    packages(TORCH)
    inherited = {**NO_CAPS, **user_values}
    everything = {XLA_FRACTION, CUPY_LIMIT, TORCH_ALLOCATOR, TF_GROWTH}
    assert memory_caps.variables([BIG], PART_MIB, inherited).keys() == everything - missing
    assert [*memory_caps.capped_by(inherited).values()] == kept


def test_pytorchs_other_settings_are_kept(packages: Any) -> None:
    """The fraction is appended to the settings that PyTorch would have read."""
    packages(TORCH)
    written = memory_caps.variables([BIG], PART_MIB, {**NO_CAPS, TORCH_ALLOCATOR: f"{SEGMENTS},"})
    assert written[TORCH_ALLOCATOR] == f"{SEGMENTS},per_process_memory_fraction:0.125000"


@pytest.mark.parametrize(
    ("setting", "part_mib", "room_mib"),
    [("1008MiB", PART_MIB, 10_000), ("", 512.0, 256), ("", 1537.0, 769)],
)
def test_allowance_for_the_context(
    packages: Any, monkeypatch: pytest.MonkeyPatch, setting: str, part_mib: float, room_mib: int
) -> None:
    """The allowance for the CUDA context is a setting, and at most half of the part."""
    packages()
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", setting)
    written = memory_caps.variables([BIG], part_mib, NO_CAPS)
    assert written[CUPY_LIMIT] == str(room_mib * MIB)


def notices(devices: list[Device], inherited: dict[str, str]) -> list[str]:
    """Return the names of the frameworks with a line of code, and the other notices."""
    values = {**NO_CAPS, **inherited}
    written = memory_caps.variables(devices, PART_MIB, values)
    told = memory_limit_notices(devices, PART_MIB, values, written, is_late=False)
    lines = {line: name for name, line in memory_caps.code_lines(devices, PART_MIB).items()}
    return [lines.get(note.partition("\n")[2], note) for note in told]


@pytest.mark.parametrize(
    ("names", "inherited", "expected"),
    [
        ([TORCH], {}, []),
        ([OLD_TORCH, TENSORFLOW], {}, ["tensorflow", "torch"]),
        ([TORCH], {OLD_TORCH_ALLOCATOR: SEGMENTS}, ["torch"]),
    ],
)
def test_frameworks_with_a_line_of_code(
    packages: Any, names: list[str], inherited: dict[str, str], expected: list[str]
) -> None:
    """The user gets a line of code for each installed framework that no variable limits."""
    packages(*names)
    assert notices([BIG], inherited) == expected


@pytest.mark.parametrize(
    ("allocator", "jax"),
    [("platform", {}), ("default", {"jax": XLA_FRACTION})],
)
def test_jax_allocators_without_a_limit(allocator: str, jax: dict[str, str]) -> None:
    """JAX's fraction does not count as a limit with allocators that ignore it."""
    values = {XLA_FRACTION: "0.1", CUPY_LIMIT: "1", "XLA_PYTHON_CLIENT_ALLOCATOR": allocator}
    assert memory_caps.limiting_variables(values) == {"cupy": CUPY_LIMIT, **jax}
