"""The end of a reservation in a batch job, which may come before or after its own end."""

from __future__ import annotations

from typing import Any

import pytest

from reserve_gpu.allocation import quota
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.holders import Record
from reserve_gpu.model.requests import NO_LEASE, Lease, Request, ReservationTerms, Rule, Rules

HOUR_S = 3600.0
NOW = Instant(1_000_000.0, 5_000.0)
OWN = Lease(until=NOW.wall + HOUR_S, until_boot=NOW.boot + HOUR_S, idle_s=1800.0)
YEAR_9999 = 253_402_297_199.0


def in_job(job_s: float, lease: Lease = OWN) -> Lease:
    """Return the lease in a job that ends so many seconds after NOW."""
    return lease.within(NOW.wall + job_s, NOW)


@pytest.mark.parametrize("own_s", [None, 1.0, HOUR_S, -5.0])
@pytest.mark.parametrize("job_s", [None, -1.0, 0.0, HOUR_S, YEAR_9999])
def test_earlier_end_applies(own_s: float | None, job_s: float | None) -> None:
    """The earlier end applies, but a job's end in the past is ignored."""
    own = Lease() if own_s is None else NO_LEASE.ending(NOW.later(own_s))
    lease = own.within(None if job_s is None else NOW.wall + job_s, NOW)
    is_jobs = job_s is not None and job_s > 0 and (own_s is None or job_s < own_s)
    expected_s = job_s if is_jobs else own_s
    assert lease.until == (None if expected_s is None else NOW.wall + expected_s)
    assert lease.is_jobs == is_jobs
    assert lease.own == own


@pytest.mark.parametrize("new", [{}, {"idle_s": 60.0}, {"end_kernel": True}])
def test_changed_terms_in_a_job_keep_the_own_end(new: dict[str, Any]) -> None:
    changed = in_job(60).changed_by(Lease(**new))
    assert (changed.until, changed.until_boot) == (OWN.until, OWN.until_boot)
    assert not changed.is_jobs


def test_own_end_applies_after_the_end_of_the_job() -> None:
    lease = in_job(60)
    assert lease.at(NOW.later(59)).is_jobs
    assert lease.at(NOW.later(60)) == OWN
    assert in_job(60, NO_LEASE).at(NOW.later(60)) == NO_LEASE


def test_wall_clock_change_moves_a_duration_but_not_the_end_of_the_job() -> None:
    lease = in_job(60).at(Instant(NOW.wall + 10, NOW.boot))
    assert (lease.until, lease.own.until) == (NOW.wall + 60, (OWN.until or 0) + 10)


def test_record_contains_both_ends() -> None:
    """Earlier versions read the end that comes first."""
    lease = in_job(60)
    fields = Record(terms=ReservationTerms(lease=lease)).to_dict()
    assert (fields["until"], fields["is_jobs"]) == (NOW.wall + 60, True)
    assert Record.from_dict(fields).terms.lease == lease
    older = {name: fields[name] for name in fields if not name.startswith("own_")}
    read = Record.from_dict(older).terms.lease
    assert (read.until, read.is_jobs, read.own.until) == (NOW.wall + 60, True, None)


@pytest.mark.parametrize("job_s", [-60.0, 60.0])
def test_time_of_a_rule_counts_from_the_start_in_a_job(job_s: float) -> None:
    active_rules = Rules("file", "alice", time=Rule('time = "1h"', "[limits]", "file", HOUR_S))
    lease = in_job(job_s, quota.lease(NO_LEASE, active_rules).begun(NOW))
    end = NOW.wall + HOUR_S
    assert lease.own.until == end
    for new in (Lease(lasts_s=HOUR_S), Lease(idle_s=60.0)):
        request = Request(terms=ReservationTerms(lease=new))
        allowed, _ = quota.allowed(request, active_rules, lease, NOW, NOW.later(600))
        assert lease.changed_by(allowed.terms.lease).own.until == end
