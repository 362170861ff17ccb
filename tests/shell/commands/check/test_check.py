"""`%reserve_gpu --check` without frameworks, and what it reads from the machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.commands.check.probes import is_installed
from reserve_gpu.gpus.nvml import Nvml
from tests.support.frameworks import installed

if TYPE_CHECKING:
    from tests.support.here import Here


def test_no_process_can_start(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "torch")
    monkeypatch.setattr(sys, "executable", str(here.folder / "nowhere"))
    with pytest.raises(reserve_gpu.ReserveGPUError) as caught:
        reserve_gpu.check()
    assert str(caught.value).endswith("nowhere: No such file or directory.")


MISSING = "missing nvmlSystemGetConfCompute"
READY_STATES = {
    "not ready": ("conf-compute on\n", True),
    "ready": ("conf-compute-ready 1\nconf-compute on\n", False),
    "off": ("conf-compute off\n", False),
    "unknown mode": (f"{MISSING}Settings\n{MISSING}State\nconf-compute on\n", None),
    "unknown state": (f"{MISSING}GpusReadyState\nconf-compute on\n", None),
}


@pytest.mark.parametrize("state", READY_STATES)
def test_the_ready_state_of_confidential_computing_is_read(here: Here, state: str) -> None:
    """None means that the driver does not report it."""
    scenario, awaits_ready_state = READY_STATES[state]
    here.write(f"{scenario}gpu\n  name NVIDIA H100 PCIe")
    with Nvml() as gpus:
        assert gpus.awaits_ready_state() is awaits_ready_state


def test_a_folder_is_not_a_framework(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("")
    (here.folder / "a_folder").mkdir()
    (here.folder / "a_module.py").touch()
    assert not is_installed("a_folder")
    assert is_installed("a_module")
