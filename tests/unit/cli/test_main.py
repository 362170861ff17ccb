"""The exit codes of `reserve-gpu`."""

from __future__ import annotations

import pytest

from reserve_gpu.model import errors


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
    """An error has the exit code 75 if a retry may succeed."""
    assert kind("text").exit_code == code
