"""The metrics for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.commands.export import prometheus
from reserve_gpu.model.requests import Lease
from reserve_gpu.render.status_view import Status
from tests.support.holders import changed
from tests.support.pictures import NOW, PART_HOLDER, held

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

LEASE = Lease(until=NOW + 3600)
HOLDER = changed(PART_HOLDER, lease=LEASE, since=NOW - 60, kept_until=NOW + 60, used_mib=500.0)
ROW = held(0, "alice")._replace(holders=(HOLDER,), is_unused=True, is_unreserved_use=False)


def test_help_of_metrics(snapshot: SnapshotAssertion) -> None:
    row = ROW._replace(promisable_mib=1024.0, power_limit_w=400.0)
    lines = prometheus.text(Status((row,), time=NOW, host="lab1")).splitlines()
    assert [line for line in lines if line.startswith("# HELP")] == snapshot
