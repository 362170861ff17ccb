"""`kernel install --slurm`: what it writes and refuses, for which a stand-in of srun is enough."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import US

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.slurm_spec import folder, words

pytest.importorskip("ipykernel.kernelspec")

FIRST = ["--ntasks=1", "--nodes=1", "--job-name=jupyter"]


def test_a_shell_types_it(here: Here, srun: str) -> None:
    """`reserve-gpu kernel install --slurm -- -p gpu` as a process of its own does the same."""
    line = (*US, "kernel", "install", "--slurm", "--prefix", ".", "--", "-p", "gpu")
    done = here.command(*line)
    assert done.returncode == 0, done.stderr
    spec = json.loads((folder(here) / "kernel.json").read_text())
    assert words(spec)[1] == [srun, *FIRST, "--gres=gpu:1", "-p", "gpu"]
