"""Tests of the CUDA variables, of hidden GPUs, and of PyTorch's cached GPU count."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.cuda_environment import (
    HIDDEN,
    MEMORY,
    ORDER,
    VISIBLE,
)
from reserve_gpu.model.devices import Device

WHOLE = Device(2, "GPU-a", memory_mib=4038)
OTHER = Device(0, "GPU-b", memory_mib=81920)
UNMEASURED = Device(1, "GPU-c")


@pytest.mark.parametrize(
    ("devices", "limit_mib", "visible", "memory"),
    [
        ([WHOLE, OTHER], None, "2,0", "4038,81920"),
        ([WHOLE, UNMEASURED], None, "2,1", None),
        ([WHOLE, OTHER], 9536.7, "2,0", "9536,9536"),
    ],
)
def test_variables(
    devices: list[Device], limit_mib: float | None, visible: str, memory: str | None
) -> None:
    """GPUs are listed by index, instances by UUID, and memory in the same order if all is known."""
    assert cuda_environment.variables(devices, limit_mib) == {
        MEMORY: memory,
        ORDER: "PCI_BUS_ID",
        VISIBLE: visible,
    }


@pytest.mark.parametrize(
    ("mark", "visible", "before"),
    [
        (None, "", ""),
        ({VISIBLE: ["", "0,1"]}, "", "0,1"),
        ({VISIBLE: ["", None]}, "1", "1"),
        ({VISIBLE: ["1", None]}, "", ""),
        ({VISIBLE: ["", 7]}, "", ""),
        ({VISIBLE: 1}, "", ""),
        ({ORDER: ["", "x"]}, "", ""),
        (["CUDA_VISIBLE_DEVICES"], "", ""),
    ],
)
def test_visible_devices_before_an_ancestor_hid_them(
    mark: object, visible: str | None, before: str | None
) -> None:
    """An empty CUDA_VISIBLE_DEVICES is replaced only if a valid mark says that we set it."""
    inherited = {VISIBLE: visible, ORDER: "", HIDDEN: json.dumps(mark) if mark else None}
    expected = {VISIBLE: before, ORDER: "", HIDDEN: None}
    assert cuda_environment.before_hiding(inherited) == expected


@pytest.mark.parametrize("mark", ["{", "[" * 100_000, "\x00"])
def test_a_mark_that_is_not_json_is_ignored(mark: str) -> None:
    assert cuda_environment.before_hiding({VISIBLE: "", HIDDEN: mark})[VISIBLE] == ""


def test_hiding_twice_keeps_the_first_value() -> None:
    """If GPUs are hidden in a child of a process that hid them, the user's value is kept."""
    first = cuda_environment.hiding({VISIBLE: "0,1"})
    assert (first[VISIBLE], first[MEMORY]) == ("", None)
    assert cuda_environment.hiding(first) == first


class UncachedFunction:
    """A function that fails if it is called, and imitates the interface of a cached one."""

    def cache_info(self) -> Any:
        raise RuntimeError("called")

    __call__ = cache_info


def torch_module(name: str, **attributes: Any) -> ModuleType:
    """Return a module that has these attributes, and fails if another attribute is read."""
    module = ModuleType(name)
    vars(module).update(attributes, __getattr__=UncachedFunction())
    return module


def cached_count(count: object) -> Any:
    """Return a cached function that has already returned its result."""
    function = lru_cache(maxsize=1)(lambda: count)
    function()
    return function


CUDA_BUILD = torch_module("torch.version", cuda="12.1")
COUNT_IS_8 = torch_module("torch.cuda", device_count=cached_count(8))


@pytest.mark.parametrize(
    ("version", "cuda", "count"),
    [
        (CUDA_BUILD, COUNT_IS_8, 8),
        (CUDA_BUILD, torch_module("torch.cuda", device_count=cached_count("8")), None),
        (CUDA_BUILD, torch_module("torch.cuda", device_count=lru_cache(lambda: 1 / 0)), None),
        (CUDA_BUILD, torch_module("torch.cuda", device_count=UncachedFunction()), None),
        (CUDA_BUILD, SimpleNamespace(device_count=cached_count(8)), None),
        (torch_module("torch.version", cuda=None), COUNT_IS_8, None),
        (None, COUNT_IS_8, None),
    ],
)
def test_cached_torch_count(
    monkeypatch: pytest.MonkeyPatch, version: Any, cuda: Any, count: int | None
) -> None:
    """PyTorch's count is read only from the cache of a CUDA build, without running its code."""
    monkeypatch.setitem(sys.modules, "torch.version", version)
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)
    assert cuda_environment.kept_torch_count() == count


def test_order() -> None:
    """Devices are sorted as CUDA numbers them, and devices that it does not see come last."""
    devices = [OTHER, WHOLE, UNMEASURED]
    expected = (WHOLE, UNMEASURED, OTHER)
    assert cuda_environment.in_visible_order(devices, "2,1") == expected
