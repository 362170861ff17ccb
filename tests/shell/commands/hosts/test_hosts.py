"""Several machines in one picture: which are meant, what each answers, and how it is shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.commands.hosts import hosts_view, status_from_json
from reserve_gpu.commands.hosts import remote_status as hosts
from reserve_gpu.commands.hosts.hosts_view import Hosts as Seen
from reserve_gpu.model.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.here import Here

from tests.support.hosts_cases import seen

GROUPS = '[hosts]\nlab = ["lab1", "gpu[08-10]"]\nbig = ["dgx"]\n'


def test_groups_stand_in_two_files(here: Here) -> None:
    """A group is in the administrator's file or in the user's own, which counts more."""
    here.rules.write_text(GROUPS)
    assert hosts.resolve(["lab"]) == ["lab1", "gpu08", "gpu09", "gpu10"]
    own = here.home / ".config" / "reserve_gpu.toml"
    own.parent.mkdir(exist_ok=True)
    own.write_text('[hosts]\nlab = ["mine"]\n')
    assert hosts.resolve(["lab", "big,other"]) == ["mine", "dgx", "other"]
    assert hosts.resolve([]) == ["mine", "dgx"]


def test_a_group_binds_nobody(here: Here) -> None:
    """A table of hosts in the administrator's file is no mistake there, and limits nothing."""
    here.rules.write_text(GROUPS)
    assert not reserve_gpu.status().to_dict()["rules"]["problems"]


def test_the_own_file_may_be_a_link(here: Here) -> None:
    """The user's own file may be a link to where they keep such files."""
    own = here.home / ".config" / "reserve_gpu.toml"
    own.parent.mkdir(exist_ok=True)
    (here.home / "dotfile").write_text(GROUPS)
    own.symlink_to(here.home / "dotfile")
    assert hosts.resolve(["big"]) == ["dgx"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[hosts]\nlab = "lab1"\n', r'lab must be a list, such as \["lab1", "lab2"\]'),
        ("[hosts]\nlab = [1]\n", "lab must be a list"),
        ("hosts = 3\n", r"\[hosts\] must be a table"),
        ('[hosts]\nlab = ["-x"]\n', "'-x' is not a valid host name"),
        ("[hosts\n", "line 1"),
        ("[hosts]\nlab = []\n", "lab must be a list"),
        ('[host]\nlab = ["lab1"]\n', "unknown key 'host'. This file may contain only"),
    ],
)
def test_a_mistake_in_a_group(here: Here, content: str, said: str) -> None:
    """A table that makes no sense is said in a line that names the mistake."""
    own = here.home / ".config" / "reserve_gpu.toml"
    own.parent.mkdir(exist_ok=True)
    own.write_text(content)
    with pytest.raises(RequestError, match=said):
        hosts.resolve(["lab"])


def test_no_host_is_known(here: Here) -> None:
    """Without a name and without a group the error shows what to write, and where."""
    with pytest.raises(RequestError, match=r"\[hosts\]\nlab = ") as caught:
        hosts.resolve([])
    assert str(here.home / ".config" / "reserve_gpu.toml") in str(caught.value)


# -- what they say -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario", ["busy", "mig", "trouble", "container", "desktop", "renderer", "eight"]
)
def test_a_status_survives_its_json(here: Here, scenario: str) -> None:
    """What is read from the JSON of a status has the same JSON, and the same picture's rows."""
    here.use(scenario)
    status = reserve_gpu.status()
    said = json.loads(json.dumps(status.to_dict()))
    read = status_from_json.status(said)
    assert read.to_dict() == said
    assert Seen({"lab1": read}).picture().layout.sections[0].entries == [
        entry._replace(is_mine=False) for entry in status.picture().layout.entries
    ]


def test_a_reservation_survives_its_json(here: Here) -> None:
    """A holder with its note, part and end is read as it was written; also one who waits."""
    here.use("mixed")
    with here.child() as child:
        assert not child.reserve("memory='1GB', note='mine', for_='2h', idle='1h'").error
        child.send("reserve_gpu.reserve(count=5, wait='1h')")
        said = json.loads(json.dumps(reserve_gpu.status().to_dict()))
        assert status_from_json.status(said).to_dict() == said


@pytest.mark.parametrize(
    ("line", "show"),
    [
        ("reserve-gpu kernel install --hosts lab", lambda: str(seen(lab1=("free",)).picture())),
        ("ssh -t lab1 reserve-gpu run -- COMMAND ...", lambda: str(seen(lab1=("free",)).picture())),
        ("ssh lab2", lambda: hosts_view.silent("lab2", 5)),
    ],
)
def test_a_line_for_a_shell_is_typed_behind_a_sign_in_a_cell(
    here: Here, line: str, show: Callable[[], str]
) -> None:
    """What a notebook says to type in a shell stands behind `!` there, and bare in a shell."""
    assert line in show()
    assert f"!{line}" not in show()
    here.shell()
    assert f"!{line}" in show()


OLDER = """#!/bin/sh
echo 'Welcome to {lab5}!'
echo '{"version": 0, "devices": []}'
"""
