"""The session of this process as all faces ask for it, so that its lease is shown to people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.calls import Late
from reserve_gpu.core import session as work

if TYPE_CHECKING:
    from reserve_gpu.report import lease_line
else:
    lease_line = Late("report.lease_line")  # which only a lease that ends needs


def session() -> work.Session:
    """Return the session of this very process."""
    return work.session(lambda: lease_line.LeaseLine())  # noqa: PLW0108 - which loads it
