"""Forged or impossible tickets in the lock directory do not block a GPU."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.allocation.attempt import Granted
from tests.support.locked import FORGED_VALUES, RECORD_FIELDS, have, obstructed
from tests.support.offers import Waiters, attempts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here


@pytest.mark.parametrize("field", RECORD_FIELDS)
def test_a_forged_ticket_does_not_pass_earlier_waiters(tmp_path: Path, field: str) -> None:
    """A waiter cannot pass earlier waiters with any field of its own ticket."""
    with ExitStack() as stack:
        waiters = Waiters(tmp_path / "locks", stack)
        first = waiters.join()
        path = tmp_path / "locks" / f"queue-{os.geteuid()}-1.lock"
        for value in FORGED_VALUES:
            with have(path, json.dumps({field: value}).encode()):
                os.utime(path, ns=(1, 1))
                with waiters.directory.mutex():
                    assert first.ahead() == []


@pytest.mark.parametrize(
    "request_fields",
    [
        pytest.param({"needs": 1000}, id="more GPUs than exist"),
        pytest.param({"part_mib": 1e9}, id="more memory than exists"),
        pytest.param({"needs": 3, "part_mib": 1}, id="more parts than GPUs exist"),
        pytest.param({"needs": 2, "wants": ["GPU-none"]}, id="GPUs that do not exist"),
    ],
)
def test_an_impossible_request_does_not_block_a_gpu(
    here: Here, request_fields: dict[str, Any]
) -> None:
    """An impossible request in the queue does not keep a free GPU from other waiters."""
    fields = {"wants": [here.uuid("1")], **request_fields}
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), *fields.pop("wants"), **fields)
        outcomes = attempts(here, waiters)
        next(outcomes)  # reads that the first waiter needs several GPUs
        assert isinstance(next(outcomes, None), Granted | None)


def test_a_gpu_without_a_valid_lock_file_does_not_block_another_gpu(here: Here) -> None:
    """A waiter for two GPUs, one of which can't be locked, does not block the other GPU."""
    with ExitStack() as stack, obstructed(here.locks / f"{here.uuid('1')}.lock", "directory"):
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), here.uuid("1"), needs=2)
        outcomes = attempts(here, waiters)
        next(outcomes)  # reads that the first waiter needs several GPUs
        assert isinstance(next(outcomes, None), Granted | None)


def test_a_renamed_ticket_blocks_a_gpu_for_a_limited_time(here: Here) -> None:
    """A user who keeps renaming a ticket blocks a free GPU no longer than with one name."""
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"))
        path = here.locks / f"queue-{os.geteuid()}-0.lock"
        for number, outcome in enumerate(attempts(here, waiters)):
            if isinstance(outcome, Granted):
                break
            path = path.rename(path.with_name(f"queue-{os.geteuid()}-{100 + number}.lock"))
        assert isinstance(outcome, Granted)
