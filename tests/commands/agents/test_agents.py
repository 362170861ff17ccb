"""`run --json`, `why`, `skill`, and JSON where something can't be had."""

from __future__ import annotations

import json
import pickle
import pkgutil
import re
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.locks.directory import LockDirectory
from reserve_gpu.locks.queue import QueueEntry
from reserve_gpu.model.errors import MutexHeldError, NoFreeDeviceError, ReserveGPUError
from reserve_gpu.model.holders import Record
from tests.commandline import CommandLine
from tests.locked import held
from tests.machine import ROOT
from tests.processes import US, wait_for

if TYPE_CHECKING:
    from tests.here import Here

SHOW = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Run `reserve-gpu` on the machine of this process."""
    return CommandLine(capsys)


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of some lines, each of which is one that the page describes."""
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        assert each["version"] == 1
        assert each["time"] > 0
        known = documented("A refusal").keys() if each["event"] == "refused" else set()
        known |= documented("Events")[each["event"]] | {"version", "event", "time", "lost"}
        assert each.keys() <= known
    return found


PAGE = (ROOT / "docs" / "formats.md").read_text()


def documented(title: str) -> dict[str, set[str]]:
    """Return what stands in the tables of a chapter: the words of each first cell, and of all."""
    chapter = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ", 1) for line in chapter.splitlines() if line.startswith("| `")]
    return {
        name: {*re.findall(r"`([a-z_]+)`", about)}
        for names, about in rows
        for name in re.findall(r"`([a-z_]+)`", names)
    }


def all_errors(kind: type[ReserveGPUError] = ReserveGPUError) -> list[type[ReserveGPUError]]:
    """Return the kinds of errors, with the one of the command line."""
    return [each for sub in kind.__subclasses__() for each in (sub, *all_errors(sub))]


def test_each_reason_is_documented() -> None:
    """Each error has a reason of its own, which the page has with its exit code."""
    for found in pkgutil.walk_packages(reserve_gpu.__path__, "reserve_gpu."):
        with suppress(ImportError):  # of an extra that is not there
            import_module(found.name)
    for kind in (each for each in all_errors() if each.__module__.startswith("reserve_gpu.")):
        error = kind("nothing")
        values = error.to_dict()
        rows = [line.split("|") for line in PAGE.splitlines() if line.count("|") == 4]
        (code,) = (codes for _, names, codes, *_ in rows if f"`{values['reason']}`" in names)
        assert str(values["exit_code"]) in code
        assert (values["retry_after_s"] is None, values["next"]) == (kind is not MutexHeldError, [])


# -- events ----------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_life_of_a_command(here: Here) -> None:
    """With --json stderr has nothing but events, and stdout nothing but what the command says."""
    done = here.command(*US, "run", "--json", "-n", "2", "--", sys.executable, "-c", SHOW)
    assert (done.returncode, done.stdout) == (0, "0,1\n")
    reserved, released = events(done.stderr)
    assert (reserved["event"], released["event"]) == ("reserved", "released")
    assert (
        [each["label"] for each in reserved["devices"]] == released["devices"] == ["GPU0", "GPU1"]
    )
    assert reserved["environ"]["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.process
def test_a_wait_is_told(here: Here) -> None:
    """A waiter is told its place and who has what; the refusal has the same words as in Python."""
    with here.rival("0"), here.rival("1"):
        done = here.command(*US, "run", "--json", "--wait", "3s", "--", "true")
    assert (done.returncode, done.stdout) == (75, "")
    waiting, refused = events(done.stderr)
    assert (waiting["event"], waiting["place"], waiting["limit_s"]) == ("waiting", 1, 3.0)
    assert (refused["event"], refused["reason"], refused["exit_code"]) == (
        "refused",
        "wait_timeout",
        75,
    )
    assert [each["holders"][0]["notebook"] for each in refused["devices"]] == ["rival.ipynb"] * 2
    assert refused["next"] == ["reserve-gpu run --wait 5m -- true"]


@pytest.mark.process
def test_an_end_is_told_before(here: Here) -> None:
    """A minute before the end of --for a line says so."""
    done = here.command(*US, "run", "--json", "--for", "62s", "--", "sleep", "5")
    reserved, ending, released = events(done.stderr)
    assert (ending["event"], ending["at"]) == ("ending", reserved["until"])
    assert 0 < ending["left_s"] <= 60
    assert released["event"] == "released"


@pytest.mark.process
@pytest.mark.parametrize("place", ["3", "events.jsonl"])
def test_another_place(here: Here, place: str) -> None:
    """Events go to a descriptor or a file of their own, which the command does not have."""
    path = here.folder / "events.jsonl"
    line = f"{' '.join(US)} run --events {place} -- sh -c 'echo >&3' 3>>events.jsonl"
    if place != "3":
        line = f"{' '.join(US)} run --events {place} -- true"
    done = here.command("sh", "-c", line)
    wait_for(lambda: path.read_text().count("\n") == 2)
    assert [each["event"] for each in events(path.read_text())] == ["reserved", "released"]
    assert "Reserving" not in done.stderr
    assert bool(done.returncode) == (place == "3")  # the descriptor is closed there


@pytest.mark.process
def test_what_is_left_running(here: Here) -> None:
    """The release is told when what the command has left running has ended, not before."""
    process = subprocess.Popen(
        [*US, "run", "--json", "--", "sh", "-c", "sleep 2 & exit"],
        env=here.environ(), cwd=here.folder, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.wait()
    assert held(here) == [0]
    _, said = process.communicate()
    assert [each["event"] for each in events(said)] == ["reserved", "released"]
    assert held(here) == []


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


@pytest.mark.process
def test_a_program_is_told_nothing_that_ends_others(here: Here) -> None:
    """Where nobody sits at a terminal no hint releases, ends or overrides what others have."""
    with here.child() as child:
        child.reserve("count=2")
        for words in (("run", "--", "true"), ("why",), ("status",)):
            done = here.command(*US, *words)
            text = done.stdout + done.stderr
            assert "reserve-gpu run --wait 5m" in text
            assert not re.search("release|--end|anyway", text)
        done = here.command(*US, "release", str(child.pid), "--json")
        (answer,) = json.loads(done.stdout)["answers"]
        assert (done.returncode, answer["answer"]) == (75, "program")
        assert answer["message"].endswith("Leave that to the user who started it.")


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
