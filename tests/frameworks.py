"""Which frameworks this process has: stand-ins, or none."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tests.machine import ROOT

if TYPE_CHECKING:
    import pytest

FOLDER = str(ROOT / "tests" / "standins")
STANDINS = f"{ROOT}:{FOLDER}"  # a PYTHONPATH
KEYS = ("torch", "tensorflow", "jax", "cupy", "numba", "mxnet")
NAMES = ("PyTorch", "TensorFlow", "JAX", "CuPy", "Numba", "MXNet")


def installed(monkeypatch: pytest.MonkeyPatch, *keys: str, **troubles: str) -> None:
    """Have stand-ins of these frameworks, and no other framework.

    troubles: by framework; see tests/standins/standin.py. Whoever is in one is installed, too.
    """
    told = ",".join(f"{key}={what}" for key, what in troubles.items())
    monkeypatch.setitem(os.environ, "STAND_IN_TROUBLE", told)
    monkeypatch.setattr(sys, "path", [str(ROOT), FOLDER, *sys.path])
    for key in {*KEYS} - {*keys, *troubles}:
        monkeypatch.setitem(sys.modules, key, None)
