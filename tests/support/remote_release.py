"""Helpers of tests: remote_release."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from tests.support.machine import Machine


def reserve_gpu(machine: Machine, *words: str) -> CompletedProcess[str]:
    return machine.command(sys.executable, "-m", "reserve_gpu", *words)
