"""Kernels that have their GPU before their first line runs."""

from __future__ import annotations

import os

import pytest

from reserve_gpu.system import jupyter_kernel, procfs, settings

# Here, as old ones set an environment variable when jupyter_client first imports them.
pytest.importorskip("ipykernel.kernelspec")


@pytest.mark.parametrize(
    ("began", "is_known"), [(None, True), ("", True), ("own", True), ("1", False)]
)
def test_a_kernel_is_known_by_its_start_time(
    monkeypatch: pytest.MonkeyPatch, began: str | None, *, is_known: bool
) -> None:
    """A process with the pid of an earlier kernel is not that kernel."""
    pid, own = procfs.stamp(os.getpid()).split()
    told = {"id": "ssh-1", "pid": pid}
    if began is not None:
        told["began"] = own if began == "own" else began
    monkeypatch.setenv(settings.STARTED, jupyter_kernel.encode_description(told))
    assert bool(jupyter_kernel.remote_description()) == is_known
