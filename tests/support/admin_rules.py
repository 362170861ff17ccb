"""Administrator's files for tests of leases."""

from __future__ import annotations

ENDS = '[limits]\ntime = "24h"\nidle = "2h"\n'
