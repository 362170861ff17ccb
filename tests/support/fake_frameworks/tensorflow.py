"""A stand-in for TensorFlow."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from tests.support.fake_frameworks.standin import TARGETS, Cuda, arrive, trouble

arrive("tensorflow")
_cuda = Cuda("tensorflow")

__version__ = "2.19.0"


def _count() -> int:
    try:
        return _cuda.start()
    except RuntimeError as error:  # TensorFlow only logs the error
        print(f"W external/gpu.cc] {error}; skipping registering GPU devices", file=sys.stderr)
        return 0


def _physical(kind: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(name=f"/physical_device:{kind}:{n}") for n in range(_count())]


sysconfig = SimpleNamespace(
    get_build_info=lambda: {
        "cuda_version": "11.2",
        "cuda_compute_capabilities": TARGETS,
    }
)
test = SimpleNamespace(is_built_with_cuda=lambda: trouble("tensorflow") != "cpu")
config = SimpleNamespace(list_physical_devices=_physical)
