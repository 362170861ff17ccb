"""Tests of the short forms of commands, and of what a record says about its holder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.locks import holders
from reserve_gpu.model.holders import Record
from reserve_gpu.system import process_identity, procfs

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize(
    ("words", "short"),
    [
        (["/usr/bin/python3.11", "/home/alice/thesis/train.py", "--epochs", "3"],
         "python3.11 train.py --epochs 3"),
        (["python", "-u", "/srv/train.py"], "python -u train.py"),
        (["python3", "-c", "import x\nx.y(1 / 2)"], "python3 -c import x x.y(1 / 2)"),
        (["/venv/bin/python", "/venv/bin/ipython", "--pylab"], "ipython --pylab"),
        (["/opt/app/run", "/data/set"], "run set"),
        (["ray::train /data/set"], "ray::train /data/set"),
        (["/bin/python", "-m", "ipykernel_launcher", "-f", "/tmp/kernel.json"], "kernel"),
        ([], None),
    ],
)  # fmt: skip
def test_short_command(words: Sequence[str], short: str | None) -> None:
    """A command is shortened to the names of its program and script, and its arguments."""
    assert process_identity.command(words) == short


@pytest.mark.parametrize(("changed", "last_cell"), [(100.5, None), (160.0, 160.0)])
def test_last_cell(changed: float, last_cell: float | None) -> None:
    """A change of the lock file shows a cell only if it is later than the record."""
    record = Record(written=100.0)
    assert holders.named(record, 17, changed).last_cell == last_cell


def test_delay_between_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is suspended between two clocks does not mistake this for a clock change."""
    read, delays = time.time, [0.7]

    def read_late() -> float:
        wall = read()
        time.sleep(delays.pop() if delays else 0.0)
        return wall

    before = procfs.now()
    monkeypatch.setattr(time, "time", read_late)
    now = procfs.now()
    assert not delays
    assert now.clock_set_s(*before) == 0.0
