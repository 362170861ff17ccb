"""For how long the administrator's file lets a reservation last."""

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
from tests.support.admin_rules import ENDS
from tests.support.reserving import got

if TYPE_CHECKING:
    from tests.support.here import Here


def held() -> reserve_gpu.Reservation:
    reservation = reserve_gpu.current()
    assert reservation
    return reservation


@pytest.mark.parametrize(
    ("wishes", "lasts_s", "idle_s"),
    [
        ({}, 86400, 7200),
        ({"for_": "1h"}, 3600, 7200),
        ({"idle": "1h"}, 86400, 3600),
        ({"for_": "24h", "idle": "2h"}, 86400, 7200),
    ],
)
def test_who_says_nothing_gets_the_rules_time(
    here: Here, wishes: dict[str, Any], lasts_s: float, idle_s: float
) -> None:
    """A new reservation has the rule's time and idle time, where none was asked for."""
    here.rules.write_text(ENDS)
    before = time.time()
    reserve_gpu.reserve(**wishes)
    terms = held().lease
    assert terms.until
    assert before + lasts_s <= terms.until <= time.time() + lasts_s
    assert terms.idle_s == idle_s
    assert not terms.end_kernel


@pytest.mark.parametrize(
    ("wishes", "rule"),
    [
        ({"for_": "25h"}, 'time = "24h"'),
        ({"until": time.strftime("%Y-%m-%d", time.localtime(time.time() + 3 * 86400))}, "time ="),
        ({"idle": "3h"}, 'idle = "2h"'),
        ({"idle": "1h", "if_wanted": True}, 'time = "24h"'),
    ],
)
def test_longer_than_the_rule_is_refused(here: Here, wishes: dict[str, Any], rule: str) -> None:
    """Who asks for more is told the rule and the file, in one line, and nothing changes."""
    here.rules.write_text(ENDS)
    with pytest.raises(RequestError) as caught:
        reserve_gpu.reserve(**wishes)
    assert rule in str(caught.value)
    assert f"([limits] in {here.rules})" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("wishes", [{}, {"for_": "1h"}, {"idle": "1h"}])
def test_the_kernel_ends_where_the_rule_says_so(here: Here, wishes: dict[str, Any]) -> None:
    """`after_cuda = "end"` ends what has an end; within a cell only by the rule's own time."""
    here.rules.write_text(f'{ENDS}after_cuda = "end"')
    reserve_gpu.reserve(**wishes)
    assert held().lease.end_kernel
    assert held().lease.is_strict is ("for_" not in wishes)
    reserve_gpu.release()
    here.rules.write_text('[limits]\nafter_cuda = "end"')
    reserve_gpu.reserve()
    assert not held().lease.has_end
    assert not held().lease.end_kernel


def test_a_part_for_the_whole_begins_no_new_time(here: Here) -> None:
    """From a whole GPU to a part and back the rule's time counts from the first of them."""
    here.rules.write_text('[limits]\ntime = "2h"\n')
    until = reserve_gpu.reserve("0").lease.until
    assert until is not None
    assert reserve_gpu.reserve("0", memory="1GiB").lease.until == until
    assert reserve_gpu.reserve("0").lease.until == until


def test_prolonging_ends_where_the_rule_counts_from_the_start(here: Here) -> None:
    """Who asks again later gets no more than the rule's time from when it was reserved."""
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
    since = now.later(-36000)
    allowed, texts = quota.allowed(parse(None, idle="1h"), found, NO_LEASE, since, now)
    assert (allowed.terms.lease.until, allowed.terms.lease.idle_s, texts) == (
        now.wall + 50400,
        3600,
        [],
    )
    bare = parse(None)
    assert quota.allowed(bare, found, NO_LEASE, now.later(-90000), now) == (bare, [])


def test_prolonging_where_no_rule_ends_it(here: Here) -> None:
    """Under rules that say nothing of time one gets the time that one asks for."""
    assert got("0", for_="1h") == "0"
    here.rules.write_text("[limits]\ngpus = 2\n")
    at = time.time()
    reserve_gpu.reserve("0", for_="20h")
    until = reserve_gpu.status().rows[0].holders[0].lease.until
    assert until == pytest.approx(at + 72000, abs=60)


def test_one_gpu_more_is_no_more_time_for_the_first(here: Here) -> None:
    """Who takes one more has both until the rule ends the one that was reserved first."""
    here.rules.write_text('[limits]\ntime = "2h"\n')
    until = reserve_gpu.reserve().lease.until
    assert until
    time.sleep(0.05)
    assert reserve_gpu.reserve(count=2).lease.until == pytest.approx(until, abs=0.02)


def test_an_idle_time_prolongs_nothing(here: Here) -> None:
    """Who adds `idle` to what is held keeps the end that they had named, shorter than the rule."""
    here.rules.write_text('[limits]\ntime = "10h"\nafter_cuda = "end"\n')
    first = reserve_gpu.reserve(for_="1h")
    until = first.lease.until
    reserve_gpu.reserve(idle="30m")
    assert first.lease.until == until
    assert first.lease.idle_s == 1800
    assert not first.lease.is_strict
