"""Texts of the status of several machines."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.commands.hosts import hosts_view, remote_status
from reserve_gpu.model.errors import RequestError
from tests.support.hosts_cases import hosts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from syrupy.assertion import SnapshotAssertion

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

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


INVALID_HOSTS = [  # the user's configuration file, and the values of --hosts
    *[("", ""), ("", "lab;1"), ("", "gpu[2-1]"), ("", "g[1-257]"), ("", "a[1-200] b[1-200]")],
    *[("hosts = 3", "lab"), ('[hosts]\nlab = "lab1"', "lab")],
]


def test_invalid_hosts(here: Here, snapshot: SnapshotAssertion) -> None:
    file = here.home / ".config" / "reserve_gpu.toml"
    file.parent.mkdir()
    texts = []
    for content, words in INVALID_HOSTS:
        file.write_text(content)
        with pytest.raises(RequestError) as caught:
            remote_status.resolve(words.split())
        texts.append(str(caught.value).replace(str(here.home), "HOME"))
    assert "\n".join(texts) == snapshot


def test_without_ssh(here: Here, typed: CommandLine, snapshot: SnapshotAssertion) -> None:
    os.environ["PATH"] = str(here.folder / "none")
    assert typed("status", "--hosts", "lab1").stderr == snapshot
