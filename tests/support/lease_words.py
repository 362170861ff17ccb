"""Helpers of tests: lease_words."""

from __future__ import annotations

import time

from reserve_gpu.model.requests import Lease

HOUR_S, DAY_S = 3600.0, 86400.0
# A Friday, at noon where the tests run.
NOW = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))


def until(at: float | None = None, idle_s: float | None = None, **more: bool) -> Lease:
    """Return a lease with an end. at: in hours from now."""
    return Lease(until=None if at is None else NOW + at * HOUR_S, idle_s=idle_s, **more)
