"""A stand-in for CuPy."""

from __future__ import annotations

from types import SimpleNamespace

from tests.support.fake_frameworks.standin import Cuda, arrive

arrive("cupy")

__version__ = "13.4.0"
_runtime = SimpleNamespace(
    is_hip=False, getDeviceCount=Cuda("cupy").start, runtimeGetVersion=lambda: 11080
)
cuda = SimpleNamespace(runtime=_runtime)
