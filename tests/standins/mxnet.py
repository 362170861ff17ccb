"""A stand-in for MXNet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.standins.standin import Cuda, Vector, arrive, trouble

arrive("mxnet")
_cuda = Cuda("mxnet")

__version__ = "1.9.1"


class _Features:
    def is_enabled(self, name: str) -> bool:
        return name == "CUDA" and trouble("mxnet") != "cpu"


def gpu(number: int) -> int:
    return number


def _arange(length: int, *, ctx: int) -> Vector:
    return Vector(_cuda, ctx, length)


def _dot(one: Vector, other: Vector) -> Any:
    return SimpleNamespace(asscalar=lambda: one @ other)


runtime = SimpleNamespace(Features=_Features)
context = SimpleNamespace(num_gpus=_cuda.start)
nd = SimpleNamespace(arange=_arange, dot=_dot)
