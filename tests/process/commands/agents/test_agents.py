"""`run --json`, `why`, `skill`, and JSON where something can't be had."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.locked import held
from tests.support.machine import ROOT
from tests.support.processes import US, wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.agents import events

SHOW = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


PAGE = (ROOT / "docs" / "formats.md").read_text()


# -- events ----------------------------------------------------------------------------------------


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


def test_an_end_is_told_before(here: Here) -> None:
    """A minute before the end of --for a line says so."""
    done = here.command(*US, "run", "--json", "--for", "62s", "--", "sleep", "5")
    reserved, ending, released = events(done.stderr)
    assert (ending["event"], ending["at"]) == ("ending", reserved["until"])
    assert 0 < ending["left_s"] <= 60
    assert released["event"] == "released"


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
