"""A stand-in for TensorFlow."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.standins.standin import Cuda, Vector, arrive, trouble

if TYPE_CHECKING:
    from collections.abc import Iterator

arrive("tensorflow")
_cuda = Cuda("tensorflow")
_stack = [""]

__version__ = "2.19.0"
float32 = "float32"


@contextmanager
def device(name: str) -> Iterator[None]:
    _stack.append(name)
    yield
    _stack.pop()


def range(length: int, *, dtype: str) -> Vector:  # noqa: A001 - TensorFlow's name
    return Vector(_cuda, int(_stack[-1].rpartition(":")[2]), length)


class _Scalar(SimpleNamespace):
    def __float__(self) -> float:
        return float(self.value)


def tensordot(one: Vector, other: Vector, axes: int) -> Any:
    place = "/device:CPU:0" if trouble("tensorflow") == "elsewhere" else _stack[-1]
    return _Scalar(value=one @ other, device=place)


def _count() -> int:
    try:
        return _cuda.start()
    except RuntimeError as error:  # it says so in its log alone
        print(f"W external/gpu.cc] {error}; skipping registering GPU devices", file=sys.stderr)
        return 0


def _physical(kind: str) -> list[SimpleNamespace]:
    numbers = [n for n, _ in enumerate([None] * _count())]
    return [SimpleNamespace(name=f"/physical_device:{kind}:{n}") for n in numbers]


sysconfig = SimpleNamespace(get_build_info=lambda: {"cuda_version": "11.2"})
test = SimpleNamespace(is_built_with_cuda=lambda: trouble("tensorflow") != "cpu")
config = SimpleNamespace(list_physical_devices=_physical)
