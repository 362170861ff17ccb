"""A stand-in for Numba."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.fake_frameworks.standin import Cuda, arrive, trouble

if TYPE_CHECKING:
    from collections.abc import Iterator

arrive("numba")
_cuda = Cuda("numba")

__version__ = "0.61.0"
config = SimpleNamespace(ENABLE_CUDASIM=trouble("numba") == "simulates")


class _Gpus:
    def __iter__(self) -> Iterator[SimpleNamespace]:
        return (SimpleNamespace(id=number) for number in range(_cuda.start()))


cuda: Any = ModuleType("numba.cuda")
cuda.gpus = _Gpus()
sys.modules["numba.cuda"] = cuda
