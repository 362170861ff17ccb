"""The command line: reserve, then become the command."""

from __future__ import annotations

import os

import pytest

from reserve_gpu.model import errors
from reserve_gpu.system import procfs


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ReserveGPUError, 70),
        (errors.RequestError, 2),
        (errors.ImpossibleError, 2),
        (errors.TooLateError, 70),
        (errors.NoFreeDeviceError, 75),
        (errors.WaitTimeoutError, 75),
        (errors.ReservedAboveError, 75),
        (errors.DriverError, 69),
        (errors.NoDriverError, 69),
        (errors.LockError, 78),
        (errors.MutexHeldError, 75),
    ],
)
def test_exit_codes(kind: type[errors.ReserveGPUError], code: int) -> None:
    """Each error has its exit code: 75 where another try may do, 69 and 78 where none will."""
    assert kind("text").exit_code == code


@pytest.mark.parametrize(
    ("text", "is_own"),
    [
        ("PID", True),
        ("PID BEGAN", True),
        ("PID BEGAN 100", True),
        ("PID 1", False),
        ("PID 1 100", False),
        ('PID {"began": BEGAN, "before": {}}', True),
        ('PID {"began": 1, "before": {}}', False),
        ('PID {"began": null, "before": {}}', True),
        ('PID {"before": {}}', True),
        ("PIDx", False),
        ("1 BEGAN", False),
        ("", False),
    ],
)
def test_a_later_process_with_the_same_pid(
    monkeypatch: pytest.MonkeyPatch, text: str, *, is_own: bool
) -> None:
    """A process is known by its pid and start time; older versions told the pid alone."""
    pid, began = procfs.stamp(os.getpid()).split()
    monkeypatch.setenv("RESERVE_GPU_HELD", text.replace("PID", pid).replace("BEGAN", began))
    assert (procfs.reservation_pid() == os.getpid()) == is_own
