"""What a process holds outlives a reload of the package's modules, as by %autoreload."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.machine import ROOT

if TYPE_CHECKING:
    from tests.support.machine import Machine

CHANGE_ALL = """
import os, pathlib, reserve_gpu
for file in pathlib.Path(reserve_gpu.__file__).parent.rglob("*.py"):
    file.write_text(file.read_text() + "\\nchanged = True\\n")
    os.utime(file, (2e9, 2e9))
"""
FORK = """
child = os.fork()
if not child:
    os._exit(bool(reserve_gpu.current()))
print("the child says", os.waitpid(child, 0)[1])
"""


@pytest.mark.full
def test_a_reload_of_every_module(machine: Machine) -> None:
    """After a reload the reservation is said again and released; the next is closed in a fork."""
    shutil.copytree(ROOT / "reserve_gpu", machine.folder / "changing" / "reserve_gpu")
    done = machine.ipython(
        "%load_ext autoreload\n%autoreload 2",
        "%reserve_gpu 1",
        "%autoreload",  # notes how old the files of the modules are
        CHANGE_ALL,
        "%autoreload",
        "import reserve_gpu.reservation.session as s; print('changed', s.changed)",
        "%reserve_gpu",
        "%reserve_gpu --release",
        "%reserve_gpu 0",
        FORK,
        PYTHONPATH=str(machine.folder / "changing"),
    )
    words = [line for line in done.stdout.splitlines() if not line.startswith("CUDA_")]
    reserved = [line.partition(":")[0] for line in words if line.startswith("Reserving")]
    assert reserved == ["Reserving GPU1", "Reserving GPU1", "Reserving GPU0"], done
    assert "Released GPU1." in words
    assert "changed True" in words
    assert "the child says 0" in words
    assert not done.stderr
