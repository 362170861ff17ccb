"""A stand-in for JAX."""

from __future__ import annotations

from types import SimpleNamespace

from tests.support.fake_frameworks.standin import Cuda, arrive

arrive("jax")
_cuda = Cuda("jax")

__version__ = "0.4.20"


def devices(backend: str = "cuda") -> list[SimpleNamespace]:
    """Return the devices, after creating a context on each, as JAX does."""
    found = []
    for n in range(_cuda.start()):
        _cuda.take_context(n)
        found.append(SimpleNamespace(id=10 + n, local_hardware_id=n, platform="gpu"))
    return found
