"""Events and refusals of `reserve-gpu run --json`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.agents import names_of, parse_events
from tests.support.locked import held
from tests.support.processes import US, wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

SHOW = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"


def test_a_reservation_and_its_release_are_events(here: Here) -> None:
    """Stderr has nothing else, and stdout only the output of the command."""
    done = here.command(*US, "run", "--json", "-n", "2", "--", sys.executable, "-c", SHOW)
    assert (done.returncode, done.stdout) == (0, "0,1\n")
    reserved, released = parse_events(done.stderr)
    assert (reserved["event"], released["event"]) == ("reserved", "released")
    labels = [device["label"] for device in reserved["devices"]]
    assert labels == released["devices"] == ["GPU0", "GPU1"]
    assert reserved["environ"]["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_events_of_a_wait_have_its_place_and_the_holders(here: Here) -> None:
    with here.rival("0"), here.rival("1"):
        done = here.command(*US, "run", "--json", "--wait", "3s", "--", "true")
    assert (done.returncode, done.stdout) == (75, "")
    waiting, refused = parse_events(done.stderr)
    assert (waiting["event"], waiting["place"], waiting["limit_s"]) == ("waiting", 1, 3.0)
    assert (refused["event"], refused["reason"]) == ("refused", "wait_timeout")
    assert refused["exit_code"] == 75
    assert [each["holders"][0]["notebook"] for each in refused["devices"]] == ["rival.ipynb"] * 2
    assert refused["next"] == ["reserve-gpu run --wait 5m -- true"]


def test_an_event_warns_a_minute_before_the_end_of_a_lease(here: Here) -> None:
    done = here.command(*US, "run", "--json", "--for", "62s", "--", "sleep", "5")
    reserved, ending, released = parse_events(done.stderr)
    assert (ending["event"], ending["at"]) == ("ending", reserved["until"])
    assert 0 < ending["left_s"] <= 60
    assert released["event"] == "released"


@pytest.mark.parametrize("place", ["3", "events.jsonl"])
def test_the_command_does_not_get_the_events_descriptor(here: Here, place: str) -> None:
    path = here.folder / "events.jsonl"
    command = "true" if place == path.name else "sh -c 'echo >&3' 3>>events.jsonl"
    done = here.command("sh", "-c", f"{' '.join(US)} run --events {place} -- {command}")
    wait_for(lambda: path.read_text().count("\n") == 2)
    assert names_of(path.read_text()) == ["reserved", "released"]
    assert "Reserving" not in done.stderr
    assert bool(done.returncode) == (place == "3")  # the shell can't write to a closed descriptor


def test_the_release_follows_the_end_of_the_command_s_processes(here: Here) -> None:
    process = subprocess.Popen(
        [*US, "run", "--json", "--", "sh", "-c", "sleep 2 & exit"],
        env=here.environ(), cwd=here.folder, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.wait()
    assert held(here) == [0]
    _, err = process.communicate()
    assert names_of(err) == ["reserved", "released"]
    assert held(here) == []


def test_a_program_gets_no_hint_that_affects_other_processes(here: Here) -> None:
    """No hint releases, ends or overrides a reservation; a program can't release it, either."""
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
