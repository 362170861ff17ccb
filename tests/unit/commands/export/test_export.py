"""Colours, metrics and pages that are made from values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.export import html_page, prometheus
from reserve_gpu.model.devices import Device, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.status_view import Status
from reserve_gpu.render.terminal import is_colored
from tests.support.export import metrics, values
from tests.support.holders import a_holder, changed

if TYPE_CHECKING:
    from reserve_gpu.model.queue import Ticket

NO, FORCE, DUMB = {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}


@pytest.mark.parametrize(
    ("environ", "in_a_terminal", "elsewhere"),
    [
        ({}, True, False),
        (NO, False, False),
        ({"NO_COLOR": ""}, True, False),
        (FORCE, True, True),
        ({**NO, **FORCE}, False, False),
        (DUMB, False, False),
        ({**DUMB, **FORCE}, True, True),
    ],
)
def test_variables_decide_about_colours_first(
    environ: dict[str, str], *, in_a_terminal: bool, elsewhere: bool
) -> None:
    assert is_colored(environ, is_terminal=True) is in_a_terminal
    assert is_colored(environ, is_terminal=False) is elsewhere


# -- metrics ---------------------------------------------------------------------------------------

NOW = 1_000_000.0
GPU = Device(0, "GPU-0", name='a "good"\\GPU', memory_mib=1024)
IDLE = Usage(compute=0, mps=0, used_mib=0)
ALICE, BOB = a_holder(pid=1, user="alice", since=NOW - 500), a_holder(pid=2, user="bob")


def reserved_by(*holders: Holder) -> DeviceStatus:
    """Return a GPU with these holders."""
    return DeviceStatus(GPU, State.RESERVED, IDLE, holders=holders)


def status_of(*rows: DeviceStatus, waiting: tuple[Ticket, ...] = (), host: str = "box") -> Status:
    """Return the status of a machine."""
    return Status(rows, waiting, None, NOW, host)


@pytest.mark.parametrize(
    ("is_unused", "holder", "seconds"),
    [
        (True, ALICE, 500),
        (True, ALICE._replace(last_cell=NOW - 60), 60),
        (False, ALICE, 0),
        (None, ALICE, None),
        (True, changed(ALICE, since=None), None),
    ],
    ids=["reserved", "last cell", "used", "unknown use", "unknown start"],
)
def test_a_gpu_is_idle_since_its_last_cell_or_its_reservation(
    *, is_unused: bool | None, holder: Holder, seconds: float | None
) -> None:
    row = reserved_by(holder)._replace(is_unused=is_unused)
    series = metrics(prometheus.text(status_of(row)))
    expected = {} if seconds is None else {("alice",): seconds}
    assert values(series, "idle_seconds", "username") == expected


def test_a_user_with_an_unknown_size_or_use_has_no_sum() -> None:
    row = reserved_by(
        a_holder(1, "alice", terms=ReservationTerms(Size(9.0))),
        a_holder(2, "alice", used_mib=7.0),
        a_holder(3, "bob"),
        a_holder(4),
        a_holder(5, "carol", terms=ReservationTerms(Size(2.0)), used_mib=1.0),
    )
    series = metrics(prometheus.text(status_of(row)))
    for name, mib in (("user_memory_promised_bytes", 2), ("user_memory_used_bytes", 1)):
        assert values(series, name, "username") == {("carol",): mib << 20}
    assert values(series, "memory_promisable_bytes", "index") == {}


@pytest.mark.parametrize(
    "text",
    [
        'a "b" \\',
        'x"} 1\nreserve_gpu_free{index="0"} 1',
        "ü" * 999,
    ],
    ids=["quotes", "another sample", "long"],
)
def test_untrusted_text_is_one_short_label(text: str) -> None:
    row = reserved_by(a_holder(user=text))._replace(device=GPU._replace(name=text))
    series = metrics(prometheus.text(status_of(row, host=text)))
    ((host, name),) = values(series, "info", "hostname", "devicename")
    ((user,),) = values(series, "reserved", "username")
    assert host == name == user == sanitize(text)
    assert len(values(series, "free", "index")) == 1


# -- the page --------------------------------------------------------------------------------------


def test_untrusted_text_becomes_no_element_of_the_page() -> None:
    hostile = "</title></style><script>alert(1)</script>{reload_s}" + "x" * 5000
    row = reserved_by(a_holder(user=hostile, terms=ReservationTerms(note=hostile)))
    page = html_page.page(status_of(row, host=hostile), "GPUs")
    assert "<script" not in page
    assert page.count("</title>") == page.count("</style>") == 1
    assert "{reload_s}" in page
    assert len(page) < 10_000
