"""Code that waits until the lease of a process reaches a state, and code for child processes."""

from __future__ import annotations

from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.features.lease.timer import LeaseTimer
from tests.support.here import feature
from tests.support.processes import wait_for

ENDS = '[limits]\ntime = "24h"\nidle = "2h"\n'  # a rules file
IMPORTS = """
import threading, time
from reserve_gpu.features.lease.lease_notices import Action
from reserve_gpu.reservation.session import session
def timer():
    return session().features["LeaseTimer"]
"""


def timer() -> LeaseTimer:
    """Return this process's lease timer."""
    return feature(LeaseTimer)


def wait_for_action(name: str) -> None:
    """Wait until the timer of this process has taken that action."""
    wait_for(lambda: timer()._action is Action[name])


def wait_for_notice() -> None:
    """Wait until this process's next cell has a notice to show."""
    wait_for(lambda: timer().display._is_notice)
