"""Helpers of tests: waiters_cases."""

from __future__ import annotations

ONE = "gpu\n  uuid GPU-00000000-0000-4000-8000-000000000000\n"
