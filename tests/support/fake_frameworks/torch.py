"""A stand-in for PyTorch."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

from tests.support.fake_frameworks.standin import TARGETS, Cuda, arrive, trouble

arrive("torch")
_cuda = Cuda("torch")

__version__ = "2.9.0"
version: Any = ModuleType("torch.version")
version.cuda = {"cpu": None, "old": "99.1"}.get(trouble("torch"), "11.4")
sys.modules["torch.version"] = version
float32 = "float32"


class _Vector:
    def __matmul__(self, _: _Vector) -> float:
        return 0.0


def arange(length: int, *, dtype: str, device: str) -> _Vector:
    _cuda.take_context(int(device.removeprefix("cuda:")))
    return _Vector()


def _init() -> None:
    if version.cuda is None:
        raise AssertionError("Torch not compiled with CUDA enabled")
    _cuda.start()


def _count_without_cuda() -> int:
    """Count the visible GPUs through NVML, which does not start CUDA."""
    nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count.value if visible is None else len([*filter(None, visible.split(","))])


# PyTorch counts without CUDA. Before 2.4, it keeps the first count.
_counters = {
    "counts": _count_without_cuda,
    "keeps-count": lru_cache(maxsize=1)(_count_without_cuda),
}

cuda: Any = ModuleType("torch.cuda")
cuda.init = _init
cuda.is_available = lambda: _cuda.start() > 0
cuda.device_count = _counters.get(trouble("torch"), _cuda.start)
cuda.get_arch_list = lambda: TARGETS
sys.modules["torch.cuda"] = cuda
