"""The output and the usage errors of %reserve_gpu."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

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
