"""Helpers of tests: admin_rules."""

from __future__ import annotations

ENDS = '[limits]\ntime = "24h"\nidle = "2h"\n'
