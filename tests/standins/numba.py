"""A stand-in for Numba."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.standins.standin import Cuda, arrive, trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

arrive("numba")
_cuda = Cuda("numba")
_stack = [0]

__version__ = "0.61.0"
config = SimpleNamespace(ENABLE_CUDASIM=trouble("numba") == "simulates")


class _Gpu:
    def __init__(self, number: int) -> None:
        self.id = number

    def __enter__(self) -> None:
        _stack.append(self.id)

    def __exit__(self, *_: object) -> None:
        _stack.pop()


class _Gpus:
    def __iter__(self) -> Iterator[_Gpu]:
        return (_Gpu(number) for number, _ in enumerate([None] * _cuda.start()))

    def __getitem__(self, number: int) -> _Gpu:
        return _Gpu(number)


class _Array(list[float]):
    def copy_to_host(self) -> list[float]:
        return self


class _Kernel:
    def __init__(self, function: Callable[[Any], None]) -> None:
        self.function = function

    def __getitem__(self, _: tuple[int, int]) -> Callable[[Any], None]:
        return self

    def __call__(self, result: _Array) -> None:
        self.function(result)
        result[0] += _cuda.dot(_stack[-1], [0.0])


cuda: Any = ModuleType("numba.cuda")
cuda.gpus, cuda.jit = _Gpus(), _Kernel
cuda.device_array = lambda length, _: _Array([0.0] * length)
sys.modules["numba.cuda"] = cuda
