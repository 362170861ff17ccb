"""A stand-in for JAX."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tests.standins.standin import Cuda, Vector, arrive

if TYPE_CHECKING:
    from collections.abc import Iterator

arrive("jax")
_cuda = Cuda("jax")
_stack = [0]

__version__ = "0.4.20"


def devices(backend: str = "cuda") -> list[SimpleNamespace]:
    return [
        SimpleNamespace(id=10 + n, local_hardware_id=n, platform="gpu")
        for n in range(_cuda.start())
    ]


@contextmanager
def default_device(device: SimpleNamespace) -> Iterator[None]:
    _stack.append(device.local_hardware_id)
    yield
    _stack.pop()


def _arange(length: int, *, dtype: str) -> Vector:
    return Vector(_cuda, _stack[-1], length)


numpy = SimpleNamespace(arange=_arange)
