"""Groups of hosts in configuration files, and statuses that are read from their JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.commands.hosts import hosts_view, remote_status, status_from_json
from reserve_gpu.model.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.here import Here

GROUPS = '[hosts]\nlab = ["lab1", "gpu[08-10]"]\nbig = ["dgx"]\n'


@pytest.fixture
def user_file(here: Here) -> Path:
    """Return the path of the user's configuration file, which does not exist."""
    path = here.home / ".config" / "reserve_gpu.toml"
    path.parent.mkdir(exist_ok=True)
    return path


def test_a_group_of_the_user_replaces_the_administrator_s(here: Here, user_file: Path) -> None:
    """A group in the administrator's file does not limit a user."""
    here.rules.write_text(GROUPS)
    assert remote_status.resolve(["lab"]) == ["lab1", "gpu08", "gpu09", "gpu10"]
    user_file.write_text('[hosts]\nlab = ["mine"]\n')
    assert remote_status.resolve(["lab", "big,other"]) == ["mine", "dgx", "other"]
    assert remote_status.resolve([]) == ["mine", "dgx"]
    assert not reserve_gpu.status().to_dict()["rules"]["problems"]


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ('[hosts]\nlab = "lab1"\n', "lab "),
        ("[hosts]\nlab = []\n", "lab "),
        ("hosts = 3\n", "table"),
    ],
)
def test_an_invalid_group_is_named(user_file: Path, content: str, key: str) -> None:
    user_file.write_text(content)
    with pytest.raises(RequestError, match=key):
        remote_status.resolve(["lab"])


@pytest.mark.parametrize("scenario", ["mig", "trouble", "container", "desktop"])
def test_a_status_that_is_read_from_its_json_is_the_same(here: Here, scenario: str) -> None:
    """Only the mark of this process's own devices is lost."""
    here.use(scenario)
    status = reserve_gpu.status()
    fields = json.loads(json.dumps(status.to_dict()))
    read = status_from_json.status(fields)
    assert read.to_dict() == fields
    assert hosts_view.Hosts({"lab1": read}).picture().layout.sections[0].entries == [
        entry._replace(is_mine=False) for entry in status.picture().layout.entries
    ]


def test_a_holder_and_a_waiter_that_are_read_from_json_are_the_same(here: Here) -> None:
    here.use("mixed")
    with here.child() as child:
        assert not child.reserve("memory='1GB', note='mine', for_='2h', idle='1h'").error
        child.send("reserve_gpu.reserve(count=5, wait='1h')")
        fields = json.loads(json.dumps(reserve_gpu.status().to_dict()))
        assert status_from_json.status(fields).to_dict() == fields


def test_without_hosts_the_error_names_the_file_and_its_table(user_file: Path) -> None:
    with pytest.raises(RequestError, match=r"\[hosts\]\nlab = ") as caught:
        remote_status.resolve([])
    assert str(user_file) in str(caught.value)
