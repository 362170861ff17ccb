"""What the status is given out as: coloured text, a page for browsers, metrics for Prometheus."""

from __future__ import annotations

import pytest

from reserve_gpu.commands.export import html_page, prometheus
from reserve_gpu.model.devices import Device, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import ReservationTerms
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.status_view import Status
from reserve_gpu.render.terminal import is_colored
from tests.support.export import Tags, metrics, values
from tests.support.holders import a_holder, changed

# -- colours ---------------------------------------------------------------------------------------

NO, FORCE, DUMB = {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}


@pytest.mark.parametrize(
    ("environ", "on_a_terminal", "elsewhere"),
    [
        ({}, True, False),
        (NO, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"NO_COLOR": "0"}, False, False),
        (FORCE, True, True),
        ({"FORCE_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "0"}, True, True),
        ({**NO, **FORCE}, False, False),
        (DUMB, False, False),
        ({**DUMB, **FORCE}, True, True),
    ],
)
def test_who_decides_about_colours(
    environ: dict[str, str], *, on_a_terminal: bool, elsewhere: bool
) -> None:
    """NO_COLOR, FORCE_COLOR and what the output is decide, in this order."""
    assert is_colored(environ, is_terminal=True) is on_a_terminal
    assert is_colored(environ, is_terminal=False) is elsewhere


# -- for Prometheus --------------------------------------------------------------------------------

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


NOW = 1_000_000.0
GPU = Device(0, "GPU-0", name='a "good"\\GPU', memory_mib=1024)
IDLE = Usage(compute=0, mps=0, used_mib=0)
ALICE, BOB = a_holder(pid=1, user="alice", since=NOW - 500), a_holder(pid=2, user="bob")


def status_of(*rows: DeviceStatus, waiting: tuple[Ticket, ...] = (), host: str = "box") -> Status:
    return Status(rows, waiting, None, NOW, host)


def test_metrics_of_several_who_share() -> None:
    """Processes of one user are counted, and who else shares a GPU has a sample too."""
    row = DeviceStatus(GPU, State.RESERVED, IDLE, holders=(ALICE, changed(ALICE, pid=3), BOB))
    waiting = (Ticket(1, "a", None, ALICE), Ticket(2, "b", None, ALICE), Ticket(3, "c", None, BOB))
    series = metrics(prometheus.text(status_of(row, waiting=waiting)))
    assert values(series, "reserved", "username") == {("alice",): 2, ("bob",): 1}
    assert values(series, "waiting", "username") == {("alice",): 2, ("bob",): 1}


@pytest.mark.parametrize(
    ("is_unused", "holder", "seconds"),
    [
        (True, ALICE, 500),
        (True, ALICE._replace(last_cell=NOW - 60), 60),
        (False, ALICE, 0),
        (None, ALICE, None),
        (True, changed(ALICE, since=None), None),
    ],
)
def test_idle_seconds(*, is_unused: bool | None, holder: Holder, seconds: float | None) -> None:
    """A GPU is idle since its holder's last cell, or since it was reserved, as far as is known."""
    row = DeviceStatus(GPU, State.RESERVED, IDLE, holders=(holder,), is_unused=is_unused)
    series = metrics(prometheus.text(status_of(row)))
    expected = {} if seconds is None else {("alice",): seconds}
    assert values(series, "idle_seconds", "username") == expected


HOSTILE = [
    'a "b" \\',
    "\\n",
    'x"} 1\nreserve_gpu_free{index="0"} 1',
    "{}",
    "\u202e\x1b[31m",
    "ü" * 999,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_metrics_are_escaped(text: str) -> None:
    """Whatever a user, a GPU or a host is called, it is one short label and no line of its own."""
    row = DeviceStatus(
        GPU._replace(name=text), State.RESERVED, IDLE, holders=(a_holder(user=text),)
    )
    series = metrics(prometheus.text(status_of(row, host=text)))
    ((host, name),) = values(series, "info", "hostname", "devicename")
    ((user,),) = values(series, "reserved", "username")
    assert host == name == user == sanitize(text)
    assert len(values(series, "free", "index")) == 1


def test_page_is_escaped() -> None:
    """What others have written becomes no element of the page, and what is long is cut."""
    hostile = "</title></style><script>alert(1)</script>{reload_s}" + "x" * 5000
    row = DeviceStatus(
        GPU,
        State.RESERVED,
        IDLE,
        holders=(a_holder(user=hostile, terms=ReservationTerms(note=hostile)),),
    )
    text = html_page.page(status_of(row, host=hostile), "GPUs")
    assert "script" not in dict(Tags(text).elements)
    assert "{reload_s}" in text
    assert len(text) < 10_000
