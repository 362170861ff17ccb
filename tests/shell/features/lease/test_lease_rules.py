"""Limits of the administrator's file on how long a reservation lasts."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu import RequestError
from reserve_gpu.allocation import admin_rules, quota
from reserve_gpu.allocation.request import parse
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.requests import NO_LEASE, Lease
from tests.support.lease import ENDS

if TYPE_CHECKING:
    from tests.support.here import Here


def current_lease() -> Lease:
    """Return the lease of the current reservation."""
    reservation = reserve_gpu.current()
    assert reservation
    return reservation.lease


@pytest.mark.parametrize(
    ("wishes", "lasts_s", "idle_s"),
    [
        ({}, 86400, 7200),
        ({"for_": "1h"}, 3600, 7200),
        ({"idle": "1h"}, 86400, 3600),
    ],
)
def test_request_without_an_end_gets_the_rules_end(
    here: Here, wishes: dict[str, Any], lasts_s: float, idle_s: float
) -> None:
    here.rules.write_text(ENDS)
    reserve_gpu.reserve(**wishes)
    assert current_lease().until == pytest.approx(time.time() + lasts_s, abs=30)
    assert current_lease().idle_s == idle_s
    assert not current_lease().end_kernel


@pytest.mark.parametrize(
    ("wishes", "rule"),
    [
        ({"for_": "25h"}, 'time = "24h"'),
        ({"until": time.strftime("%Y-%m-%d", time.localtime(time.time() + 3 * 86400))}, "time ="),
        ({"idle": "3h"}, 'idle = "2h"'),
        ({"idle": "1h", "if_wanted": True}, 'time = "24h"'),
    ],
    ids=["for", "until", "idle", "if_wanted"],
)
def test_request_beyond_the_rule_is_refused(here: Here, wishes: dict[str, Any], rule: str) -> None:
    """The error names the rule and its file, and nothing is reserved."""
    here.rules.write_text(ENDS)
    with pytest.raises(RequestError) as caught:
        reserve_gpu.reserve(**wishes)
    assert rule in str(caught.value)
    assert str(here.rules) in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("wishes", [{}, {"for_": "1h"}, {"idle": "1h"}])
def test_rule_ends_the_kernel_after_cuda(here: Here, wishes: dict[str, Any]) -> None:
    """`after_cuda = "end"` ends a running cell only at the time that the rule itself set."""
    here.rules.write_text(f'{ENDS}after_cuda = "end"')
    reserve_gpu.reserve(**wishes)
    assert current_lease().end_kernel
    assert current_lease().is_strict is ("for_" not in wishes)


def test_rule_about_cuda_does_not_limit_the_time(here: Here) -> None:
    here.rules.write_text('[limits]\nafter_cuda = "end"')
    reserve_gpu.reserve()
    assert not current_lease().has_end
    assert not current_lease().end_kernel


def test_time_of_the_rule_does_not_restart(here: Here) -> None:
    """A change of the size or the number of GPUs keeps the end that the rule set."""
    here.rules.write_text('[limits]\ntime = "2h"\n')
    until = reserve_gpu.reserve("0").lease.until
    assert until is not None
    assert reserve_gpu.reserve("0", memory="1GiB").lease.until == until
    assert reserve_gpu.reserve("0").lease.until == until
    time.sleep(0.05)  # a new start would be this much later
    assert reserve_gpu.reserve(count=2).lease.until == pytest.approx(until, abs=0.02)


def test_extension_ends_at_the_rules_time_since_the_start(here: Here) -> None:
    here.rules.write_text(ENDS)
    found = admin_rules.read(str(here.rules))
    now = Instant(1_800_000_000.0, 500_000.0)
    request = parse(None, for_="20h")
    for since, last in ((now, 72000), (now.later(-36000), 50400)):
        allowed, texts = quota.allowed(request, found, NO_LEASE, since, now)
        assert allowed.terms.lease == Lease(
            until=now.wall + last, until_boot=now.boot + last, idle_s=7200
        )
        assert bool(texts) is (since < now)
    with pytest.raises(RequestError, match="can't be extended"):
        quota.allowed(request, found, NO_LEASE, now.later(-90000), now)
    idle, texts = quota.allowed(parse(None, idle="1h"), found, NO_LEASE, now.later(-36000), now)
    lease = idle.terms.lease
    assert (lease.until, lease.idle_s, texts) == (now.wall + 50400, 3600, [])
    bare = parse(None)
    assert quota.allowed(bare, found, NO_LEASE, now.later(-90000), now) == (bare, [])


def test_idle_limit_keeps_an_end_before_the_rules(here: Here) -> None:
    here.rules.write_text('[limits]\ntime = "10h"\nafter_cuda = "end"\n')
    first = reserve_gpu.reserve(for_="1h")
    until = first.lease.until
    reserve_gpu.reserve(idle="30m")
    assert first.lease.until == until
    assert first.lease.idle_s == 1800
    assert not first.lease.is_strict
