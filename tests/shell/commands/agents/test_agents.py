"""`run --json`, `why`, `skill`, and JSON where something can't be had."""

from __future__ import annotations

import json
import pickle
import re
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.errors import NoFreeDeviceError
from reserve_gpu.model.holders import Record
from tests.support.commandline import CommandLine
from tests.support.locked import held
from tests.support.machine import ROOT

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.agents import events


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `reserve-gpu` on the machine of this process."""
    return CommandLine(capsys)


PAGE = (ROOT / "docs" / "formats.md").read_text()


def test_a_place_that_is_none(typed: CommandLine) -> None:
    """What events can't be written to is said in one line, and nothing is reserved."""
    for word in ("99", "/nowhere/events", "9" * 40):
        ended = typed("run", "--events", word, "--", "true")
        assert (ended.code, ended.stderr.count("\n")) == (2, 1)
        assert ended.stderr.startswith("--events ")


# -- what can't be had -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason", "code"),
    [
        (("run", "--json", "-n", "5", "--", "true"), "impossible", 2),
        (("run", "--json", "--nonsense", "--", "true"), "request", 2),
        (("run", "--json", "--", "no-such-command"), "command", 127),
        (("release", "--json", "nothing.ipynb"), "request", 2),
        (("list", "--json", "--nonsense"), "request", 2),
        (("why", "--json", "--nonsense"), "request", 2),
    ],
)
def test_an_error_is_an_object(
    typed: CommandLine, words: tuple[str, ...], reason: str, code: int
) -> None:
    """With --json an error is one line of JSON on stderr, with a fixed word and the exit code."""
    ended = typed(*words)
    (error,) = events(ended.stderr)
    assert (error["event"], error["reason"], error["exit_code"]) == ("refused", reason, code)
    assert (ended.code, ended.stdout) == (code, "")


def test_a_machine_that_nobody_can_look_at(here: Here, typed: CommandLine) -> None:
    """Whoever can't reserve as others do so for too long is told when to ask again."""
    with LockDirectory() as locks, locks.mutex():
        ended = typed("run", "--json", "--wait", "0.1s", "--", "true")
    (error,) = events(ended.stderr)
    assert (ended.code, error["reason"]) == (75, "mutex_held")
    assert (error["retry_after_s"], error["next"]) == (5, [])


def test_the_option_of_a_command_is_its_own(here: Here, typed: CommandLine) -> None:
    """What follows the command is no word of ours: the error is in plain words."""
    assert typed("run", "-n", "5", "--", "true", "--json").stderr.startswith(
        "There are 2 GPUs here"
    )
    with here.rival("0"), here.rival("1"):  # without the sign, too
        assert typed("run", "true", "--json").stderr.startswith("No free GPU")


def test_a_notebook_has_it_beside_the_picture(here: Here) -> None:
    """The refusal that a notebook shows has the same values for programs, and the error, too.

    So has one that --optional goes on after.
    """
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
    told = pickle.loads(pickle.dumps(error.value)).to_dict()  # noqa: S301 - our own
    for each in (*values["devices"], *told["devices"]):
        del each["idle_for_s"]
    assert told["devices"] == values["devices"]


# -- why -------------------------------------------------------------------------------------------


def test_why(here: Here, typed: CommandLine) -> None:
    """It says what would be had, or why not, with the exit code of `run`; nothing is reserved."""
    assert typed("why", "-n", "2", "--", "true").stdout == "You would get GPU0 and GPU1.\n"
    assert json.loads(typed("why", "--json").stdout)["devices"][0]["label"] == "GPU0"
    with here.rival("0"), here.rival("1"):
        ended = typed("why")
        assert (ended.code, ended.stderr) == (75, "")
        assert ended.stdout.startswith("No free GPU: 2 reserved.")
        refusal = json.loads(typed("why", "--json").stdout)
        assert (refusal["reason"], refusal["place"]) == ("no_free_device", 1)
    assert held(here) == []


def test_help_of_why(typed: CommandLine) -> None:
    """The help lists only options that change the answer; others of `run` are accepted."""
    listed = set(re.findall(r"--[a-z-]+", typed("why", "--help").stdout.partition("options:")[2]))
    assert listed == {
        *("--help", "--count", "--min-memory", "--name", "--memory", "--for", "--until", "--json")
    }
    assert typed("why", "--wait", "1h", "--note=x", "--optional", "-q").code == 0


def test_why_comes_after_who_waits(here: Here, typed: CommandLine) -> None:
    """Who only asks is told that those who wait come first."""
    record = Record.from_dict({"user": "alice", "asks": "2 GPUs", "needs": 2})
    wants = [here.uuid("0"), here.uuid("1")]
    with LockDirectory(str(here.locks)) as directory, QueueEntry(directory, wants, record) as place:
        with directory.mutex():
            place.join()
        ended = typed("why", "--json")
    refusal = json.loads(ended.stdout)
    assert (ended.code, refusal["place"]) == (75, 2)
    assert [each["state"] for each in refusal["devices"]] == ["awaited", "awaited"]


# -- the page --------------------------------------------------------------------------------------


def test_the_page(typed: CommandLine) -> None:
    """The page is short, and each word of ours in it exists."""
    page = typed("skill").stdout
    assert 35 <= page.count("\n") <= 60
    for line in re.findall(r"`(reserve-gpu [^`]*)`|^ {4}(reserve-gpu .*)$", page, re.MULTILINE):
        words = next(filter(None, line)).split()[1:]
        if words[0] != "release":  # which it says not to type
            assert (
                typed(*words[: words.index("--")] if "--" in words else words, "--help").code == 0
            )


def test_an_agent_has_a_name(here: Here, typed: CommandLine) -> None:
    """What asks for a user by a name is shown with it, in words and in JSON."""
    with here.rival("0", agent="claude"):
        assert " (claude), rival.ipynb" in typed("status").stdout
        status = json.loads(typed("status", "--json").stdout)
    assert status["devices"][0]["holders"][0]["agent"] == "claude"
