"""Which of several ends ends a reservation in a job, as tables: no clock runs here."""

from __future__ import annotations

import itertools
from importlib import import_module
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


def in_job(job_s: float, lease: Lease = OWN, now: Instant = NOW) -> Lease:
    """Return a lease in a job that ends so many seconds after now."""
    return lease.within(now.wall + job_s, now)


@pytest.mark.parametrize("own_s", [None, 1.0, HOUR_S, -5.0])
@pytest.mark.parametrize("job_s", [None, -YEAR_9999, -1.0, 0.0, 2.0, 2 * HOUR_S, YEAR_9999])
def test_the_first_end_to_come_counts(own_s: float | None, job_s: float | None) -> None:
    """The first end counts, except for a job's end that has passed, which changes nothing."""
    own = Lease() if own_s is None else NO_LEASE.ending(NOW.later(own_s))
    lease = own.within(None if job_s is None else NOW.wall + job_s, NOW)
    ends = [each for each in (own_s, job_s if job_s and job_s > 0 else None) if each is not None]
    assert lease.until == (NOW.wall + min(ends) if ends else None)
    assert lease.is_jobs == (job_s in ends and min(ends) == job_s)
    assert lease.own == own


@pytest.mark.parametrize("moves", [*itertools.permutations([-60.0, 60.0, 2 * HOUR_S, YEAR_9999])])
def test_an_own_end_outlasts_each_move_of_the_job(moves: tuple[float, ...]) -> None:
    """Wherever the job's end is moved, the own end is kept."""
    lease = OWN
    for job_s in moves:
        lease = in_job(job_s, lease)
        assert lease.own == OWN


@pytest.mark.parametrize("new", [{}, {"idle_s": 60.0}, {"end_kernel": True}])
def test_a_change_in_a_job_keeps_the_own_end(new: dict[str, Any]) -> None:
    """A new idle time or `--end-kernel` keeps the own end behind the job's."""
    changed = in_job(60).changed_by(Lease(**new))
    assert (changed.until, changed.until_boot) == (OWN.until, OWN.until_boot)
    assert not changed.is_jobs


def test_the_job_outlives_its_end() -> None:
    """From the job's end on, the own end counts again."""
    lease = in_job(60)
    assert lease.at(NOW.later(59)).is_jobs
    assert lease.at(NOW.later(60)) == OWN
    assert in_job(60, NO_LEASE).at(NOW.later(60)) == NO_LEASE


def test_the_wall_clock_is_set_in_a_job() -> None:
    """If the wall clock is set, a duration moves with it, and the job's end does not."""
    later = Instant(NOW.wall + 10, NOW.boot)
    lease = in_job(60).at(later)
    assert (lease.until, lease.own.until) == (NOW.wall + 60, (OWN.until or 0) + 10)


def test_a_record_has_both_ends() -> None:
    """A lock file tells both ends, and the first one where older versions look for it."""
    lease = in_job(60)
    fields = Record(terms=ReservationTerms(lease=lease)).to_dict()
    assert (fields["until"], fields["is_jobs"]) == (NOW.wall + 60, True)
    assert Record.from_dict(fields).terms.lease == lease
    older = {name: fields[name] for name in fields if not name.startswith("own_")}
    read = Record.from_dict(older).terms.lease
    assert (read.until, read.is_jobs, read.own.until) == (NOW.wall + 60, True, None)


@pytest.mark.parametrize(
    ("job_s", "after_s", "expected"),
    [
        (60, HOUR_S - 700, "LASTS"),
        (60, HOUR_S, "RELEASE"),
        (2 * HOUR_S, HOUR_S, "RELEASE"),
        (-60, HOUR_S, "RELEASE"),
        (60, 59, "WARN_AGAIN"),
    ],
)
def test_an_own_end_is_due_in_a_job(job_s: float, after_s: float, expected: str) -> None:
    """A reservation is released at its own end, whenever the job should have ended."""
    schedule = import_module("reserve_gpu.features.lease.schedule")
    lease = OWN._replace(idle_s=None).within(NOW.wall + job_s, NOW)
    now = NOW.later(after_s)
    step = schedule.step(lease, NOW.wall, schedule.Circumstances(now.wall, boot=now.boot))
    assert step.action.name == expected


@pytest.mark.parametrize("job_s", [-60.0, 60.0, 2 * HOUR_S])
def test_a_rule_holds_in_a_job(job_s: float) -> None:
    """A rule's time counts from the start, whatever the job's end is and after a prolongation."""
    active_rules = Rules("file", "alice", time=Rule('time = "1h"', "[limits]", "file", HOUR_S))
    lease = in_job(job_s, quota.lease(NO_LEASE, active_rules).begun(NOW))
    end = NOW.wall + HOUR_S
    assert lease.own.until == end
    later = NOW.later(600)
    for wish in (Lease(lasts_s=HOUR_S), Lease(idle_s=60.0)):
        request = Request(terms=ReservationTerms(lease=wish))
        allowed, _ = quota.allowed(request, active_rules, lease, NOW, later)
        assert lease.changed_by(allowed.terms.lease).own.until == end
