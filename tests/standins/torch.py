"""A stand-in for PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

from tests.standins.standin import TARGETS, Cuda, arrive, trouble

arrive("torch")
_cuda = Cuda("torch")

__version__ = "2.9.0"
version = SimpleNamespace(cuda={"cpu": None, "old": "99.1"}.get(trouble("torch"), "11.4"))
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


cuda = SimpleNamespace(
    init=_init,
    is_available=lambda: _cuda.start() > 0,
    device_count=_cuda.start,
    get_arch_list=lambda: TARGETS,
)
