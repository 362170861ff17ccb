"""The previous holder of a busy GPU, by the records in its lock files, as tables."""

from __future__ import annotations

import os

import pytest

from reserve_gpu.allocation.previous_holders import FREEING_S, could_start, last_holder
from reserve_gpu.model.devices import Device, Process, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder, ProcessInfo, Record

PID = 4321
NOW_BOOT = 1e6
BUSY = DeviceStatus(
    Device(0, "GPU-0"), State.BUSY, Usage(compute=0, used_mib=3000), use_state=State.BUSY
)


def previous(written_s: float, *, released: bool, pid: int = PID) -> Holder:
    """Return a previous holder whose record was written some seconds ago."""
    record = Record(
        ProcessInfo(pid=pid, notebook="train.ipynb"),
        written_boot=NOW_BOOT - written_s,
        released=released,
    )
    return Holder(record, record_owner=os.geteuid())


@pytest.mark.parametrize(
    ("holder", "expected"),
    [
        (previous(3.0, released=True), 3),
        (previous(FREEING_S + 1, released=True), None),
        (previous(-5.0, released=True), None),  # a record from the future
        (previous(86400.0, released=False), -1),
    ],
)
def test_a_release_counts_for_30_seconds(holder: Holder, expected: int | None) -> None:
    """The time at which a process ended without a release is unknown."""
    last = last_holder(BUSY, [holder], NOW_BOOT)
    seconds = None if last is None else -1 if last.released_s is None else int(last.released_s)
    assert seconds == expected


@pytest.mark.parametrize(
    ("holder", "began_s", "expected"),
    [
        (previous(60.0, released=True), 61.0, True),
        (previous(60.0, released=True), 59.0, False),
        (previous(60.0, released=False), 59.0, True),  # the holder ended at an unknown time
    ],
)
def test_a_process_that_began_after_a_release_is_not_left_over(
    holder: Holder, began_s: float, *, expected: bool
) -> None:
    """After a release, another process can have the holder's PID and start processes."""
    assert could_start(holder, NOW_BOOT - began_s) is expected


def test_the_holder_that_the_driver_lists_comes_first() -> None:
    """The previous holder that the driver still lists is named before a later one."""
    row = BUSY._replace(processes=(Process(PID, 3000, has_ended=True),))
    holders = [previous(3.0, released=True, pid=1), previous(60.0, released=False)]
    last = last_holder(row, holders, NOW_BOOT)
    assert last
    assert last.holder.pid == PID
