"""Texts of the status of several machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.commands.hosts import hosts_view
from tests.support.hosts_cases import hosts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from syrupy.assertion import SnapshotAssertion

HOSTS: dict[str, dict[str, tuple[str, ...]]] = {
    "a GPU of the second machine is free": {"lab1": ("busy",), "lab2": ("free", "busy")},
    "no GPU is free": {"lab1": ("reserved", "busy")},
    "no machine has a GPU": {"lab1": ()},
    "no machine": {},
}


@pytest.mark.parametrize("name", HOSTS)
def test_hosts(name: str, snapshot: SnapshotAssertion) -> None:
    text = str(hosts_of(**HOSTS[name]).picture())
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", text) == snapshot


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        pytest.param(hosts_view.failed, (255, "", "x: Permission denied."), id="ssh is denied"),
        pytest.param(hosts_view.failed, (255, "", "ssh: no route\n"), id="ssh can't connect"),
        pytest.param(hosts_view.failed, (126, "", "denied"), id="not executable"),
        pytest.param(hosts_view.failed, (69, "out", "no driver.\n\n"), id="failure"),
        pytest.param(hosts_view.failed, (1, "", ""), id="failure without a reason"),
        pytest.param(hosts_view.another_format, (2, "{}"), id="newer format"),
        pytest.param(hosts_view.another_format, (None, "a\nb\n"), id="another reply"),
    ],
)
def test_reason_for_a_missing_status(
    message: Callable[..., str], arguments: tuple[Any, ...], snapshot: SnapshotAssertion
) -> None:
    assert message("lab1", *arguments, "status") == snapshot
