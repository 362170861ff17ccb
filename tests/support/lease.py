"""Helpers of tests: lease."""

from __future__ import annotations

from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.features.lease.timer import LeaseTimer
from tests.support.here import feature
from tests.support.processes import wait_for

IMPORTS = """
import threading, time
from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.reservation.session import session
def timer():
    return session().features["LeaseTimer"]
"""
# Wait until at most so many threads are about to end the process.
WAIT_FOR_ENDS = """
while sum(thread.name == "reserve_gpu end" for thread in threading.enumerate()) > {}:
    time.sleep(0.01)
session().run(int)
"""


def timer() -> LeaseTimer:
    """Return what follows the lease of this process."""
    return feature(LeaseTimer)


def wait_for_action(name: str) -> None:
    """Wait until the timer of this process's lease has done that."""
    wait_for(lambda: timer()._action is Action[name])
