"""Refusals as JSON, `reserve-gpu why`, and the page of `reserve-gpu skill`."""

from __future__ import annotations

import json
import pickle
import re
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.model.errors import NoFreeDeviceError
from tests.support.agents import parse_events
from tests.support.locked import held

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["99", "/nowhere/events"])
def test_events_that_can_not_be_written_are_refused(typed: CommandLine, place: str) -> None:
    done = typed("run", "--events", place, "--", "true")
    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("--events ")


@pytest.mark.parametrize(
    ("words", "reason", "code"),
    [
        ("run --json -n 5 -- true", "impossible", 2),
        ("run --json -- no-such-command", "command", 127),
        ("release --json nothing.ipynb", "request", 2),
    ],
)
def test_an_error_is_one_object(typed: CommandLine, words: str, reason: str, code: int) -> None:
    done = typed(*words.split())
    (error,) = parse_events(done.stderr)
    assert (error["event"], error["reason"], error["exit_code"]) == ("refused", reason, code)
    assert (done.code, done.stdout) == (code, "")


def test_a_refusal_because_of_the_mutex_says_when_to_retry(here: Here, typed: CommandLine) -> None:
    with LockDirectory() as locks, locks.mutex():
        done = typed("run", "--json", "--wait", "0.1s", "--", "true")
    (error,) = parse_events(done.stderr)
    assert (done.code, error["reason"]) == (75, "mutex_held")
    assert (error["retry_after_s"], error["next"]) == (5, [])


def test_json_after_the_command_is_the_command_s_own_option(here: Here, typed: CommandLine) -> None:
    assert not typed("run", "-n", "5", "--", "true", "--json").stderr.startswith("{")
    with here.rival("0"), here.rival("1"):
        assert not typed("run", "true", "--json").stderr.startswith("{")


def test_a_notebook_gets_the_refusal_as_json_next_to_its_picture(here: Here) -> None:
    """The JSON also comes with `--optional`, and from the exception."""
    with here.rival("0"), here.rival("1"):
        shell = here.shell(is_notebook=True)
        shown = shell.run("%reserve_gpu").values[0]
        values = shown["application/vnd.reserve-gpu+json"]
        (excused,) = shell.run("%reserve_gpu --optional").values
        with pytest.raises(NoFreeDeviceError) as error:
            reserve_gpu.reserve()
    assert excused["application/vnd.reserve-gpu+json"]["reason"] == "no_free_device"
    assert (values["reason"], values["next"]) == ("no_free_device", ["%reserve_gpu --wait"])
    assert "<table" in shown["text/html"]
    copy = pickle.loads(pickle.dumps(error.value)).to_dict()  # noqa: S301 - written here
    for device in (*values["devices"], *copy["devices"]):
        del device["idle_for_s"]
    assert copy["devices"] == values["devices"]


# -- why -------------------------------------------------------------------------------------------


def test_why_reserves_nothing(here: Here, typed: CommandLine) -> None:
    done = typed("why", "-n", "2", "--", "true")
    assert (done.code, done.stdout) == (0, "You would get GPU0 and GPU1.\n")
    assert json.loads(typed("why", "--json").stdout)["devices"][0]["label"] == "GPU0"
    with here.rival("0"), here.rival("1"):
        done = typed("why")
        assert (done.code, done.stderr) == (75, "")
        assert "rival.ipynb" in done.stdout
        refusal = json.loads(typed("why", "--json").stdout)
        assert (refusal["reason"], refusal["place"]) == ("no_free_device", 1)
    assert held(here) == []


# -- agents ----------------------------------------------------------------------------------------


def test_the_page_for_agents_is_short_and_its_commands_exist(typed: CommandLine) -> None:
    page = typed("skill").stdout
    assert 35 <= page.count("\n") <= 60
    for line in re.findall(r"`(reserve-gpu [^`]*)`|^ {4}(reserve-gpu .*)$", page, re.MULTILINE):
        words = next(filter(None, line)).partition(" -- ")[0].split()[1:]
        if words[0] != "release":  # the page forbids it
            assert typed(*words, "--help").code == 0
