"""A stand-in for PyTorch."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace
from typing import Any

from tests.standins.standin import Cuda, Vector, arrive, trouble

arrive("torch")
_cuda = Cuda("torch")

__version__ = "2.9.0"
version = SimpleNamespace(cuda={"cpu": None, "old": "99.1"}.get(trouble("torch"), "11.4"))
float32, uint8 = "float32", "uint8"


def arange(length: int, *, dtype: str, device: str) -> Vector:
    return Vector(_cuda, int(device.removeprefix("cuda:")), length)


def empty(size: int, *, dtype: str, device: str) -> Any:
    found = re.search("fraction:([0-9.]+)", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    number = int(device.removeprefix("cuda:"))
    return _cuda.take(number, size, lambda total: float(found[1]) * total if found else None)


def _init() -> None:
    if version.cuda is None:
        raise AssertionError("Torch not compiled with CUDA enabled")
    _cuda.start()


cuda = SimpleNamespace(
    init=_init,
    is_available=lambda: _cuda.start() > 0,
    device_count=_cuda.start,
)
