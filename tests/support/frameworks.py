"""Replace the deep-learning frameworks of the test process with stand-ins."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from tests.support.machine import ROOT

if TYPE_CHECKING:
    import pytest

FOLDER = str(ROOT / "tests" / "support" / "fake_frameworks")
STANDINS = f"{ROOT}:{FOLDER}"  # a PYTHONPATH
KEYS = ("torch", "tensorflow", "jax", "cupy", "numba")
NAMES = ("PyTorch", "TensorFlow", "JAX", "CuPy", "Numba")


def installed(monkeypatch: pytest.MonkeyPatch, *keys: str, **troubles: str) -> None:
    """Let this process find stand-ins of these frameworks, and no other framework.

    Args:
        monkeypatch: Restores `sys.path` and `sys.modules` at the end of the test.
        keys: The names of frameworks without a fault.
        troubles: The name of the fault, by framework; see tests/support/fake_frameworks/standin.py.
    """
    told = ",".join(f"{key}={what}" for key, what in troubles.items())
    os.environ["STAND_IN_TROUBLE"] = told  # the fixture `here` restores it
    monkeypatch.setattr(sys, "path", [str(ROOT), FOLDER, *sys.path])
    for key in {*KEYS} - {*keys, *troubles}:
        monkeypatch.setitem(sys.modules, key, None)
