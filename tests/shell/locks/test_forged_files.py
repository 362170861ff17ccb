"""Forged files of another user in the lock directory change no decision."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.allocation.attempt import Granted
from tests.support.locked import obstructed
from tests.support.offers import Waiters, attempts

if TYPE_CHECKING:
    from tests.support.here import Here


def test_a_gpu_that_cannot_be_locked_blocks_no_other_gpu(here: Here) -> None:
    """A waiter for two GPUs, of which one has no proper lock file, blocks no free GPU."""
    with ExitStack() as stack, obstructed(here.locks / f"{here.uuid('1')}.lock", "directory"):
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), here.uuid("1"), needs=2)
        outcomes = attempts(here, waiters)
        next(outcomes)  # which finds out that the first one needs several
        assert isinstance(next(outcomes, None), Granted | None)


# -- tickets that their own owner forges -----------------------------------------------------------

WISHES: dict[str, dict[str, Any]] = {
    "more than there are": {"needs": 1000},
    "more memory than there is": {"part_mib": 1e9},
    "more parts than there are devices": {"needs": 3, "part_mib": 1},
    "devices that are not here": {"needs": 2, "wants": ["GPU-none"]},
}


@pytest.mark.parametrize("wish", WISHES)
def test_an_impossible_request_does_not_block(here: Here, wish: str) -> None:
    """An impossible request in the queue does not keep a free GPU from other waiters."""
    about = {"wants": [here.uuid("1")], **WISHES[wish]}
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"), *about.pop("wants"), **about)
        outcomes = attempts(here, waiters)
        next(outcomes)  # which finds out that the first one needs several
        assert isinstance(next(outcomes, None), Granted | None)


def test_renamed_tickets_keep_a_device_free_for_a_limited_time(here: Here) -> None:
    """A user who renames a ticket again and again holds a free GPU back no longer than with one."""
    with ExitStack() as stack:
        waiters = Waiters(here.locks, stack)
        waiters.join(here.uuid("0"))
        path = here.locks / f"queue-{os.geteuid()}-0.lock"
        for number, outcome in enumerate(attempts(here, waiters)):
            if isinstance(outcome, Granted):
                break
            path = path.rename(path.with_name(f"queue-{os.geteuid()}-{100 + number}.lock"))
        assert isinstance(outcome, Granted)
