"""The description of a kernel that another machine has started."""

from __future__ import annotations

import os

import pytest

from reserve_gpu.system import jupyter_kernel, procfs, settings


@pytest.mark.parametrize(
    ("start_time", "is_known"), [(None, True), ("", True), ("own", True), ("1", False)]
)
def test_a_kernel_is_identified_by_its_pid_and_start_time(
    monkeypatch: pytest.MonkeyPatch, start_time: str | None, *, is_known: bool
) -> None:
    pid, own = procfs.stamp(os.getpid()).split()
    description = {"id": "ssh-1", "pid": pid}
    if start_time is not None:
        description["began"] = own if start_time == "own" else start_time
    monkeypatch.setenv(settings.STARTED, jupyter_kernel.encode_description(description))
    assert bool(jupyter_kernel.remote_description()) == is_known
