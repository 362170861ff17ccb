"""Helpers of tests: top."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.machine import LIMIT_S

if TYPE_CHECKING:
    from tests.support.machine import Machine

pexpect = pytest.importorskip("pexpect")  # IPython brings it


def start(machine: Machine, term: str = "xterm") -> Any:
    return pexpect.spawn(
        sys.executable, ["-m", "reserve_gpu", "top"], env=machine.environ(TERM=term),
        cwd=str(machine.folder), dimensions=(24, 120), encoding="utf-8", timeout=LIMIT_S,
    )  # fmt: skip
