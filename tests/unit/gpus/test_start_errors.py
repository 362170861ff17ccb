"""Tests of the causes of a driver that does not start; the texts are in tests/unit/texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.gpus import start_errors
from reserve_gpu.gpus.start_errors import Surroundings, is_without_driver

if TYPE_CHECKING:
    from pathlib import Path

WITHOUT_LIBRARY = Surroundings(unloadable=())


@pytest.mark.parametrize(
    ("around", "code", "expected"),
    [
        (WITHOUT_LIBRARY, 12, True),
        (Surroundings(), 12, True),
        (Surroundings(), 9, True),
        (Surroundings(), 18, False),
        (WITHOUT_LIBRARY._replace(has_cuda=True), 12, False),
        (WITHOUT_LIBRARY._replace(is_jetson=True), 12, False),
        (WITHOUT_LIBRARY._replace(unloadable=["wrong ELF class"]), 12, False),
    ],
)
def test_is_without_driver(around: Surroundings, code: int, *, expected: bool) -> None:
    """A driver that lacks only NVML is not an absent driver, because CUDA can use its GPUs."""
    assert is_without_driver(code, around) is expected


def test_libraries_that_belong_to_no_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stubs and compatibility libraries in LD_LIBRARY_PATH do not count as a driver."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    if start_errors.read_surroundings().has_cuda:
        pytest.skip("this machine has an NVIDIA driver")
    for folder, has_cuda in (("compat", False), ("lib64/stubs", False), ("lib64", True)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "libcuda.so.1").touch()
        monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path / folder}")
        assert start_errors.read_surroundings().has_cuda is has_cuda
