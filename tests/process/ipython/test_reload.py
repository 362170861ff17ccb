"""A reservation survives a reload of the package's modules, for example by %autoreload."""

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
print("status of the child", os.waitpid(child, 0)[1])
"""


@pytest.mark.full
def test_reload_of_every_module(machine: Machine) -> None:
    """After a reload, the reservation is known, can be released, and is closed in a fork."""
    shutil.copytree(ROOT / "reserve_gpu", machine.folder / "changing" / "reserve_gpu")
    done = machine.ipython(
        "%load_ext autoreload\n%autoreload 2",
        "%reserve_gpu 1",
        "%autoreload",  # records the modification times of the modules
        CHANGE_ALL,
        "%autoreload",
        "import reserve_gpu.reservation.session as s; print('changed', s.changed)",
        "%reserve_gpu",
        "%reserve_gpu --release",
        "%reserve_gpu 0",
        FORK,
        PYTHONPATH=str(machine.folder / "changing"),
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("CUDA_")]
    reserved = [line.partition(":")[0] for line in lines if line.startswith("Reserving")]
    assert reserved == ["Reserving GPU1", "Reserving GPU1", "Reserving GPU0"], done
    assert "Released GPU1." in lines
    assert "changed True" in lines
    assert "status of the child 0" in lines
    assert not done.stderr
