"""Messages in a kernel about requests to release its devices, and about waiters for them."""

from __future__ import annotations

import errno
import os
import re
import time
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.features.remote_requests.handler import released_by, unreachable
from reserve_gpu.features.waiters.notifier import waiter_message
from reserve_gpu.model.errors import LockError
from reserve_gpu.model.queue import Ticket
from reserve_gpu.system import procfs
from tests.support.frontends import GPU0, GPU1
from tests.support.holders import a_holder
from tests.support.processes import own_name

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion


@pytest.mark.parametrize(
    "user", [procfs.user_name(os.geteuid()), "bob\x1b"], ids=["same user", "another user"]
)
def test_released_on_request(snapshot: SnapshotAssertion, user: str) -> None:
    at = time.mktime((2026, 11, 20, 18, 0, 0, 0, 0, -1))
    assert released_by((GPU0, GPU1), user, at) == snapshot


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), id="full disk"),
        pytest.param(LockError("The lock directory is\x1b missing."), id="lock directory"),
    ],
)
def test_kernel_is_unreachable(
    snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("RESERVE_GPU_LOCK_DIR", "/locks")
    assert unreachable([GPU1], error) == snapshot


@pytest.mark.parametrize("is_late", [False, True], ids=["CUDA not started", "CUDA started"])
@pytest.mark.parametrize(
    ("user", "note"),
    [
        pytest.param("bob\x1b", None, id="another user"),
        pytest.param(own_name(), "thesis\x1b", id="own notebook"),
        pytest.param(None, None, id="unknown user"),
    ],
)
def test_waiter_for_idle_devices(
    snapshot: SnapshotAssertion, user: str | None, note: str | None, *, is_late: bool
) -> None:
    holder = a_holder(os.getpid(), user, "b.ipynb", seen=True, since=time.time(), note=note)
    ticket = Ticket(procfs.boot_clock_ns(), "queue-1-0.lock", None, holder)
    message = waiter_message(ticket, [GPU0, GPU1] if is_late else [GPU0], is_late=is_late)
    assert re.sub(r"\d+ s ", "0 s ", message) == snapshot
