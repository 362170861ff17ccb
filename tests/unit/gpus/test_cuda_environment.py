"""The CUDA variables, whether CUDA has started, and what can be reserved after it has."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.cuda_environment import (
    MEMORY,
    ORDER,
    TORCH_ALLOCATOR,
    VISIBLE,
    XLA_FRACTION,
    Changes,
)
from reserve_gpu.model.devices import Device

WHOLE = Device(2, "GPU-a", memory_mib=4038)
OTHER = Device(0, "GPU-b", memory_mib=81920)
UNMEASURED = Device(1, "GPU-c")
INSTANCE = Device(1, "MIG-d", memory_mib=4864, instance=0)


@pytest.fixture
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in cuda_environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


# -- the variables ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "visible", "memory"),
    [
        ([WHOLE], "2", "4038"),
        ([WHOLE, OTHER], "2,0", "4038,81920"),
        ([OTHER, WHOLE], "0,2", "81920,4038"),
        ([INSTANCE], "MIG-d", "4864"),
        ([WHOLE, INSTANCE], "2,MIG-d", "4038,4864"),
        ([UNMEASURED], "1", None),
        ([WHOLE, UNMEASURED], "2,1", None),
    ],
)
def test_variables(devices: list[Device], visible: str, memory: str | None) -> None:
    """Whole GPUs go by index, instances by UUID; memory is in the same order or not set at all."""
    assert cuda_environment.variables(devices) == {
        MEMORY: memory,
        ORDER: "PCI_BUS_ID",
        VISIBLE: visible,
    }


def test_variables_of_a_part() -> None:
    """Of a part CUDA_DEVICE_MEMORY is the part's size, rounded down, for each device."""
    assert cuda_environment.variables([WHOLE, OTHER], 9536.7)[MEMORY] == "9536,9536"


@pytest.mark.usefixtures("_no_variables")
@pytest.mark.parametrize(
    ("before", "written", "now", "inherited"),
    [
        (None, None, None, None),
        (None, None, "7", "7"),
        ("0,1", "1", "1", "0,1"),
        (None, "1", "1", None),
        ("0,1", "1", "7", "7"),  # somebody has changed it since
        ("0,1", "1", None, None),
        ("0,1", "", "", "0,1"),
        ("123", None, None, "123"),  # it was unset by us
    ],
)
def test_inherited(
    monkeypatch: pytest.MonkeyPatch,
    before: str | None,
    written: str | None,
    now: str | None,
    inherited: str | None,
) -> None:
    """A variable is somebody else's unless it is still as this process has set it."""
    is_ours = before is not None or written is not None
    changes = Changes({VISIBLE: before}, {VISIBLE: written}) if is_ours else Changes()
    if now is not None:
        monkeypatch.setenv(VISIBLE, now)
    assert changes.inherited()[VISIBLE] == inherited


@pytest.mark.usefixtures("_no_variables")
def test_set_and_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several changes are taken back together, without what others have changed since."""
    monkeypatch.setenv(VISIBLE, "0,1")
    monkeypatch.setenv(ORDER, "FASTEST_FIRST")
    changes = Changes().apply({VISIBLE: "1", MEMORY: "4038"})
    assert _cuda() == {VISIBLE: "1", ORDER: "FASTEST_FIRST", MEMORY: "4038"}
    changes = changes.apply({VISIBLE: "0", ORDER: "PCI_BUS_ID", MEMORY: None})
    assert _cuda() == {VISIBLE: "0", ORDER: "PCI_BUS_ID", MEMORY: None}
    monkeypatch.setenv(ORDER, "theirs")
    changes.apply({})
    assert _cuda() == {VISIBLE: "0,1", ORDER: "theirs", MEMORY: None}


@pytest.mark.usefixtures("_no_variables")
def test_caps_that_are_not_set_again_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What capped a part is as it was outside once something else is reserved, CUDA's own stay."""
    monkeypatch.setenv(TORCH_ALLOCATOR, "backend:native")
    part = {VISIBLE: "1", XLA_FRACTION: "0.1", TORCH_ALLOCATOR: "backend:native,x:1"}
    changes = Changes().apply(part).apply({VISIBLE: "0"})
    assert {
        name: value for name, value in cuda_environment.read().items() if value is not None
    } == {
        VISIBLE: "0",
        TORCH_ALLOCATOR: "backend:native",
    }
    assert changes.written == {VISIBLE: "0"}
    changes.apply({})
    assert _cuda()[VISIBLE] is None
    assert cuda_environment.read()[TORCH_ALLOCATOR] == "backend:native"


@pytest.mark.parametrize(("now", "before"), [("0.5", {XLA_FRACTION: None}), ("0.7", {})])
def test_a_cap_that_was_changed_since_is_the_users(now: str, before: dict[str, None]) -> None:
    """A cap that an ancestor has set is given back; one that somebody has changed since is kept."""
    caps = cuda_environment.own_caps({XLA_FRACTION: "0.5"}, {})
    assert (
        cuda_environment.inherited_caps({cuda_environment.OWN_CAPS: caps, XLA_FRACTION: now})
        == before
    )


@pytest.mark.parametrize(
    ("mark", "visible", "before"),
    [
        (None, "", ""),
        ({VISIBLE: ["", None]}, "", None),
        ({VISIBLE: ["", "0,1"]}, "", "0,1"),
        ({VISIBLE: ["", ""]}, "", ""),
        ({VISIBLE: ["", None]}, "1", "1"),  # somebody has set it since
        ({VISIBLE: ["", None]}, "-1", "-1"),
        ({VISIBLE: ["", "0"]}, None, None),
        ({VISIBLE: ["1", None]}, "", ""),
        ({VISIBLE: ["", 7]}, "", ""),
        ({VISIBLE: ["", ["0"]]}, "", ""),
        ({VISIBLE: []}, "", ""),
        ({ORDER: ["", "x"], "PATH": ["", None]}, "", ""),
        (["CUDA_VISIBLE_DEVICES"], "", ""),
    ],
)
def test_a_refusal_of_a_parent_does_not_limit(
    mark: object, visible: str | None, before: str | None
) -> None:
    """An empty value counts as our refusal only with a valid mark, and gives way to the old one."""
    written = json.dumps(mark) if mark else None
    inherited = {VISIBLE: visible, ORDER: "", cuda_environment.HIDDEN: written}
    expected = {VISIBLE: before, ORDER: "", cuda_environment.HIDDEN: None}
    assert cuda_environment.before_hiding(inherited) == expected


@pytest.mark.parametrize("mark", ["{", "[" * 100_000, "\x00", '{"CUDA_VISIBLE_DEVICES": 1}', "7"])
def test_a_broken_mark_changes_nothing(mark: str) -> None:
    """A mark that can't be read is ignored."""
    assert (
        cuda_environment.before_hiding({VISIBLE: "", cuda_environment.HIDDEN: mark})[VISIBLE] == ""
    )


def test_hiding_twice_keeps_the_first_value() -> None:
    """A refusal below a refusal remembers what the user had set."""
    first = cuda_environment.hiding({VISIBLE: "0,1"})
    assert (first[VISIBLE], first[MEMORY]) == ("", None)
    assert cuda_environment.hiding(first) == first


class Unreadable(ModuleType):
    """A module that fails if its attributes are read, as a lazy module might."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("__dict__", "device_count"):
            raise RuntimeError(name)
        return super().__getattribute__(name)


class Imitation:
    """A function that imitates a cached one."""

    def cache_info(self) -> Any:
        raise RuntimeError("called")

    __call__ = cache_info


def torch_cuda(**attributes: Any) -> ModuleType:
    """Return a module that has these attributes, and fails if another attribute is read."""
    module = ModuleType("torch.cuda")
    vars(module).update(attributes, __getattr__=Imitation())
    return module


def counted(count: object) -> Any:
    """Return a cached function that has already returned its result."""
    function = lru_cache(maxsize=1)(lambda: count)
    function()
    return function


def not_counted() -> int:
    raise RuntimeError("called")


def torch_version(cuda: str | None) -> ModuleType:
    """Return the module that contains the CUDA version that PyTorch was built for."""
    module = ModuleType("torch.version")
    vars(module).update(cuda=cuda)
    return module


@pytest.mark.parametrize("version", [torch_version(None), Unreadable("torch.version"), None])
def test_a_build_without_cuda_has_no_count(monkeypatch: pytest.MonkeyPatch, version: Any) -> None:
    """PyTorch's count is ignored unless PyTorch was built for CUDA."""
    monkeypatch.setitem(sys.modules, "torch.version", version)
    monkeypatch.setitem(sys.modules, "torch.cuda", torch_cuda(device_count=counted(0)))
    assert cuda_environment.kept_torch_count() is None


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (torch_cuda(device_count=counted(8)), 8),
        (torch_cuda(device_count=counted(0)), 0),
        (torch_cuda(device_count=counted("8")), None),
        (torch_cuda(device_count=lru_cache(maxsize=1)(not_counted)), None),
        (torch_cuda(device_count=not_counted), None),
        (torch_cuda(device_count=Imitation()), None),
        (torch_cuda(), None),
        (Unreadable("torch.cuda"), None),
        (SimpleNamespace(device_count=counted(8)), None),
        (None, None),
    ],
)
def test_only_a_kept_count_is_read(
    monkeypatch: pytest.MonkeyPatch, module: Any, count: int | None
) -> None:
    """PyTorch's count is read only from a filled cache, and no code of the module runs."""
    monkeypatch.setitem(sys.modules, "torch.version", torch_version("12.1"))
    monkeypatch.setitem(sys.modules, "torch.cuda", module)
    assert cuda_environment.kept_torch_count() == count


def test_order() -> None:
    """Devices come as CUDA numbers them; those that it does not see come last."""
    devices = [OTHER, INSTANCE, WHOLE, UNMEASURED]
    expected = (WHOLE, UNMEASURED, OTHER, INSTANCE)
    assert cuda_environment.in_visible_order(devices, "2,1") == expected


def _cuda() -> dict[str, str | None]:
    return cuda_environment.read(cuda_environment.CUDA)
