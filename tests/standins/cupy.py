"""A stand-in for CuPy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.standins.standin import Cuda, Vector, arrive

arrive("cupy")
_cuda = Cuda("cupy")
_stack = [0]

__version__ = "13.4.0"


class _Device:
    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        _stack.append(self.number)

    def __exit__(self, *_: object) -> None:
        _stack.pop()


def arange(length: int, *, dtype: str) -> Any:
    return Vector(_cuda, _stack[-1], length)


_runtime = SimpleNamespace(
    is_hip=False, getDeviceCount=_cuda.start, runtimeGetVersion=lambda: 11080
)


cuda = SimpleNamespace(runtime=_runtime, Device=_Device)
