"""Tests of the memory limits that a reservation of a part sets and restores."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.cuda_environment import (
    CUPY_LIMIT,
    OLD_XLA_FRACTION,
    TORCH_ALLOCATOR,
    XLA_FRACTION,
)
from reserve_gpu.model import errors
from reserve_gpu.model.devices import MIB
from tests.support.locked import held

if TYPE_CHECKING:
    from tests.support.here import Here


def limits() -> dict[str, str]:
    """Return the memory limits that are set in this process."""
    now = cuda_environment.read(cuda_environment.CAPS)
    return {name: value for name, value in now.items() if value is not None}


def test_limits_of_a_part(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are set for a part, change with its size, and are restored by a release."""
    monkeypatch.setenv(TORCH_ALLOCATOR, "expandable_segments:True")
    monkeypatch.setenv(CUPY_LIMIT, "")
    before = limits()
    reserve_gpu.reserve(memory="3GB")
    assert limits()[CUPY_LIMIT] == str(int(3e9) - 768 * MIB)
    reserve_gpu.reserve(memory="2GB")
    assert limits()[CUPY_LIMIT] == str(int(2e9) - 768 * MIB)
    reserve_gpu.release()
    assert limits() == before


def test_limits_are_set_again(here: Here) -> None:
    """A repeated reservation sets missing limits, but keeps limits that the user has set since.

    JAX raises an error if both of its variables are set.
    """
    first = reserve_gpu.reserve(memory="3GB")
    del os.environ[CUPY_LIMIT]
    os.environ[OLD_XLA_FRACTION] = "0.01"
    os.environ[TORCH_ALLOCATOR] = "expandable_segments:True"
    with pytest.warns(reserve_gpu.ReserveGPUWarning, match=OLD_XLA_FRACTION):
        assert reserve_gpu.reserve(memory="3GB") is first
    assert limits()[CUPY_LIMIT] == str(int(3e9) - 768 * MIB)
    assert XLA_FRACTION not in limits()
    assert {**os.environ, **first.environ} == os.environ
    assert XLA_FRACTION not in str(first)
    assert reserve_gpu.reserve(memory="3GB") is first
    reserve_gpu.release()
    assert limits() == {OLD_XLA_FRACTION: "0.01", TORCH_ALLOCATOR: "expandable_segments:True"}
    del os.environ[OLD_XLA_FRACTION], os.environ[TORCH_ALLOCATOR]


def test_an_invalid_allowance(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid allowance is refused without any change."""
    monkeypatch.setenv("RESERVE_GPU_CONTEXT_MEMORY", "much")
    before = dict(os.environ)
    with pytest.raises(errors.RequestError, match="RESERVE_GPU_CONTEXT_MEMORY"):
        reserve_gpu.reserve(memory="2GB")
    assert (dict(os.environ), held(here)) == (before, [])
