"""A stand-in for MXNet."""

from __future__ import annotations

from types import SimpleNamespace

from tests.standins.standin import Cuda, arrive, trouble

arrive("mxnet")

__version__ = "1.9.1"


class _Features:
    def is_enabled(self, name: str) -> bool:
        return name == "CUDA" and trouble("mxnet") != "cpu"


runtime = SimpleNamespace(Features=_Features)
context = SimpleNamespace(num_gpus=Cuda("mxnet").start)
