"""The output and the usage errors of %reserve_gpu."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu import extension
from tests.support.locked import held
from tests.support.magic import FOUR_GPUS, MISTAKES, run_cell
from tests.support.reserving import variables

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from tests.support.here import Here


def test_usage_errors(here: Here, snapshot: SnapshotAssertion) -> None:
    """A mistake is one line on stderr, and changes neither a variable nor a lock."""
    here.write(FOUR_GPUS)
    before = {"CUDA_DEVICE_MEMORY": "77", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    os.environ.update(before)
    shell = here.shell()
    lines = []
    for words in MISTAKES:
        cell = run_cell(shell, f"%reserve_gpu {words}")
        assert (cell.error, cell.stdout, cell.stderr.count("\n")) == ("UsageError", "", 1), words
        lines.append(f"%reserve_gpu {words}\n    {cell.stderr.removeprefix('UsageError: ')}")
    assert (variables(), held(here)) == (before, [])
    assert "".join(lines) == snapshot


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(["%reserve_gpu", "%reserve_gpu --release"], id="reserve and release"),
        pytest.param(["%reserve_gpu --memory 2GB", "%reserve_gpu --release"], id="a part of a GPU"),
        pytest.param(
            ["%reserve_gpu 1", "%env CUDA_DEVICE_ORDER=FASTEST_FIRST", "%reserve_gpu"],
            id="a changed variable",
        ),
    ],
)
def test_output(cells: list[str], here: Here, snapshot: SnapshotAssertion) -> None:
    shell = here.shell()
    shown = [run_cell(shell, code) for code in cells]
    assert "\n".join(cell.stdout + cell.stderr for cell in shown) == snapshot


def test_gpu_that_fails(here: Here, snapshot: SnapshotAssertion) -> None:
    """The holder learns that its GPU fails, and which commands reserve another GPU."""
    shell = here.shell()
    shell.run("%reserve_gpu")
    here.add("fail nvmlDeviceGetHandleByIndex_v2 0 999")
    assert shell.run("%reserve_gpu").stderr == snapshot


def test_optional(here: Here, snapshot: SnapshotAssertion) -> None:
    """--optional names the GPU that the kernel keeps, if any."""
    shell = here.shell()
    shell.run("%reserve_gpu 1")
    with here.rival("0"):
        kept = shell.run("%reserve_gpu 0 --optional").stdout
        shell.run("%reserve_gpu --release")
        assert kept + shell.run("%reserve_gpu 0 --optional").stdout == snapshot


def test_all_gpus_of_a_machine_with_one_gpu(here: Here, snapshot: SnapshotAssertion) -> None:
    here.write("gpu")
    assert run_cell(here.shell(), "%reserve_gpu all").stderr == snapshot


def test_package_that_was_replaced(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """The package was updated, then removed, while the kernel or the script was running."""
    magics = extension.ReserveGPU()
    magics.package = (0, 0)
    texts = [magics._change()]
    for module in (extension, reserve_gpu):
        monkeypatch.setattr(module, "__file__", "/removed/__init__.py")
    texts.append(magics._change())
    monkeypatch.setitem(sys.modules, "reserve_gpu.api", None)
    with pytest.raises(ImportError) as caught:
        _ = reserve_gpu.reserve
    assert [*texts, str(caught.value)] == snapshot


def test_restart_that_fails(caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion) -> None:
    extension.ReserveGPU().leave_to_restart({"new": True})  # without a kernel
    assert caplog.messages == snapshot
