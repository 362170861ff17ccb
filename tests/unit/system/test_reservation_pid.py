"""The variable RESERVE_GPU_HELD names the process that holds a reservation."""

from __future__ import annotations

import os

import pytest

from reserve_gpu.system import procfs


@pytest.mark.parametrize(
    ("text", "is_own"),
    [
        ("PID", True),
        ("PID BEGAN", True),
        ("PID 1", False),
        ('PID {"began": BEGAN, "before": {}}', True),
        ('PID {"began": 1, "before": {}}', False),
        ('PID {"before": {}}', True),
        ("PIDx", False),
        ("1 BEGAN", False),
        ("", False),
    ],
)
def test_process_is_identified_by_pid_and_start_time(
    monkeypatch: pytest.MonkeyPatch, text: str, *, is_own: bool
) -> None:
    """A later process with the same pid is another process; older versions wrote only the pid."""
    pid, began = procfs.stamp(os.getpid()).split()
    monkeypatch.setenv("RESERVE_GPU_HELD", text.replace("PID", pid).replace("BEGAN", began))
    assert (procfs.reservation_pid() == os.getpid()) == is_own
