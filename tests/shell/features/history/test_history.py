"""What is logged in a user's history: by notebooks, scripts and commands, however they end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.history import recorder
from reserve_gpu.features.history.journal import History
from reserve_gpu.features.history.recorder import Recorder
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import Kind, LogLine, parsed
from reserve_gpu.log.log_writer import Page
from reserve_gpu.model.requests import End, Rules
from reserve_gpu.reservation.session import session
from tests.support.here import feature
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

from tests.support.history import folder_of, lines, switch_on

MOMENTS = int(os.environ.get("MOMENTS", "50"))
NOW = 1_795_000_000.0


# -- whether anything is kept ----------------------------------------------------------------------


FOR_ALL, IN_HOME = "history/{uid}", "home/.local/state/reserve_gpu/{host}"


@pytest.mark.parametrize(
    ("own", "ruled", "there", "expected"),
    [
        (None, None, (), None),
        (None, None, (FOR_ALL,), FOR_ALL),
        (None, None, (IN_HOME,), IN_HOME),
        (None, "true", (), IN_HOME),
        (None, "true", (FOR_ALL, IN_HOME), FOR_ALL),
        (None, "false", (FOR_ALL, IN_HOME), None),
        ("true", "false", (FOR_ALL,), FOR_ALL),
        ("true", None, (), IN_HOME),
        ("false", "true", (FOR_ALL, IN_HOME), None),
    ],
)
def test_where_a_history_is_kept(
    here: Here, own: str | None, ruled: str | None, there: tuple[str, ...], expected: str | None
) -> None:
    """The user's word counts first, then the administrator's, then whether a directory is there."""
    if own:
        switch_on(here, own)
    if FOR_ALL in there:
        (here.folder / "history").mkdir()
        (here.folder / "history").chmod(0o1733)
    if IN_HOME in there:
        folder_of(here).parent.mkdir(parents=True)
    folder = places.to_write(Rules("", "", history=None if ruled is None else ruled == "true"))
    found = None if folder is None else Path(os.readlink(f"/proc/self/fd/{folder}"))
    if folder is not None:
        os.close(folder)
    place = expected and expected.format(uid=os.geteuid(), host=os.uname().nodename)
    assert found == (here.folder / place if place else None)
    assert not found or found.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_directory_that_protects_nobody_is_none(here: Here, mode: int) -> None:
    """A directory in which others could remove a user's folder is not used."""
    (here.folder / "history").mkdir()
    (here.folder / "history").chmod(mode)
    assert places.to_write(None) is None


def test_a_rule_says_so(here: Here) -> None:
    """The administrator's file switches the history on for all."""
    here.rules.write_text("history = true\n")
    reserve_gpu.reserve(note="thesis")
    assert [line["note"] for line in lines(here, "*.open")] == ["thesis"]


def test_a_bad_word_is_one_line(here: Here) -> None:
    """A word that is neither true nor false is said in one line, which names the file."""
    switch_on(here, '"yes"')
    with pytest.raises(reserve_gpu.RequestError, match="history must be true or false") as caught:
        places.to_write(None)
    assert str(here.home) in str(caught.value)


# -- what a reservation leaves ---------------------------------------------------------------------


def test_a_reservation_has_a_page_while_it_lasts(here: Here) -> None:
    """What is held has a page with its devices, size and note, which only its user reads."""
    switch_on(here)
    reserve_gpu.reserve(count=2, memory="1GiB", note="thesis")
    one, other = lines(here, "*.open")
    assert (one["label"], other["label"]) == ("GPU0", "GPU1")
    assert (one["note"], one["part_mib"]) == ("thesis", 1024.0)
    assert one["share"] == pytest.approx(1024 / 4038, abs=0.05)
    (page,) = folder_of(here).glob("*.open")
    assert page.stat().st_mode & 0o777 == 0o600
    assert not lines(here)


def test_a_new_note_is_logged(here: Here) -> None:
    """The page says what the reservation says now: a later note takes the place of the first."""
    switch_on(here)
    reserve_gpu.reserve(note="thesis")
    reserve_gpu.reserve(note="paper")
    session().run(session()._step)
    session().run(feature(History)._recorder._log_use)  # type: ignore[union-attr]
    assert [line["note"] for line in lines(here, "*.open")] == ["paper"]


def wait_a_second(here: Here) -> None:
    """Wait until a reservation is old enough to be logged."""
    (line,) = lines(here, "*.open")
    wait_for(lambda: time.time() > line["since"] + recorder.LEAST_S)


def test_a_release_is_logged(here: Here) -> None:
    """A release ends the page; its line stands in the file of the month."""
    switch_on(here)
    reserve_gpu.reserve()
    wait_a_second(here)
    reserve_gpu.release()
    (line,) = lines(here)
    assert line["how"] == "released"
    assert line["seconds"] == pytest.approx(line["end"] - line["start"], abs=0.1)
    (file,) = folder_of(here).iterdir()
    assert file.name == time.strftime("%Y-%m.jsonl", time.localtime(line["start"]))


def test_another_reservation_takes_its_place(here: Here) -> None:
    """Another reservation of the same process ends the line of the first, and begins its own."""
    switch_on(here)
    reserve_gpu.reserve(0)
    wait_a_second(here)
    reserve_gpu.reserve(1)
    assert [(each["label"], each["how"]) for each in lines(here)] == [
        ("GPU0", "another reservation took its place")
    ]
    assert [each["label"] for each in lines(here, "*.open")] == ["GPU1"]


def test_what_was_held_for_a_moment_is_not_noted(here: Here) -> None:
    """A reservation of less than a second leaves no line, and no page."""
    switch_on(here)
    reserve_gpu.reserve().release()
    assert not lines(here)
    assert list(folder_of(here).iterdir()) == []


LOOKS = """
import json, os, sys, time
import reserve_gpu
from reserve_gpu.log import places
from reserve_gpu.log.log_writer import Page
from reserve_gpu.features.history.recorder import Recorder
from reserve_gpu.reservation.session import session
reserve_gpu.reserve()
held = session().held
reserve_gpu.release()
began = time.time()
logged = Recorder(Page.new(places.to_write(None)), held, began, every_s=0)
print(began, logged.page.id, flush=True)
while True:
    logged.step({os.getpid()})
"""


@pytest.mark.full
@pytest.mark.process
def test_kill_9_at_any_moment_loses_nothing_but_the_last_look(here: Here) -> None:
    """Killed at whatever moment, a process leaves lines that can be read, up to its last look."""
    switch_on(here)
    moments = random.Random(27)  # noqa: S311 - no secret
    for _ in range(MOMENTS):
        killed_after_s = moments.uniform(0, 0.05)
        argv = [sys.executable, "-c", LOOKS]
        with here.running(*argv, environ=here.environ(), stdout=subprocess.PIPE) as process:
            moment, own_id = process.stdout.readline().decode().split()  # type: ignore[union-attr]
            began = float(moment)
            until = time.time() + killed_after_s
            while time.time() < until:
                pass
            process.kill()
            process.communicate()
        killed = time.time()
        folder = places.to_write(None)
        assert folder is not None
        log_writer.close_lost(folder)
        os.close(folder)
        (line,) = (line for line in lines(here) if line["id"] == own_id)
        assert line["how"] == "its process was killed"
        assert line["seconds"] <= killed - began + 0.1
        assert line["end"] == pytest.approx(killed, abs=20)
    assert not lines(here, "*.open")


def test_a_page_that_was_appended_already_is_only_removed(here: Here) -> None:
    """A process that was killed between its last line and the end of its page counts once."""
    switch_on(here)
    folder = places.to_write(None)
    assert folder is not None
    page = Page.new(os.dup(folder))
    line = LogLine(Kind.RESERVED, page.id, NOW, NOW, NOW + 60, 60.0, gpu="GPU-8f2a")
    page.write([line])
    log_writer.append(folder, [line._replace(how=End.RELEASED)])
    page.close()
    log_writer.close_lost(folder)
    os.close(folder)
    assert [each["how"] for each in lines(here)] == ["released"]
    assert not lines(here, "*.open")


# -- what is used ----------------------------------------------------------------------------------


def recorded(now: float) -> Recorder:
    """Return what notes what this process holds, and looks at each step."""
    folder, holding = places.to_write(None), session().held
    assert folder is not None
    assert holding
    return Recorder(Page.new(folder), holding, now, every_s=0)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ("compute {pid} 900\nutilisation 95", (True, 95, 900)),
        ("compute {pid} 900\nutilisation 0", (False, 0, 900)),
        ("", (False, 0, 0)),
        ("compute {pid} 900\nutilisation 95\nsamples boot", (True, 95, 900)),
        ("compute {pid} 900\nutilisation 95\nsamples strange", (None, None, 900)),
        ("compute {pid} 900\nutilisation 95\nsamples rubbish", (None, None, 900)),
        ("compute 1 900\nutilisation 95", (False, 0, 0)),
        (
            "compute {pid} 900\nutilisation 95\nfail nvmlDeviceGetComputeMode 1 15",
            (None, None, None),
        ),
    ],
    ids=[
        "at work",
        "only there",
        "nobody",
        "boot",
        "strange",
        "rubbish",
        "a stranger",
        "unreadable",
    ],
)
def test_what_is_used_is_logged(here: Here, processes: str, expected: tuple[Any, ...]) -> None:
    """The use of a GPU by its holder's own processes is logged; what can't be read is left out."""
    switch_on(here)
    reserve_gpu.reserve(1)
    here.add(processes.format(pid=os.getpid()))
    logged = recorded(time.time())
    logged.step({os.getpid()})
    logged.step({os.getpid()})
    line = logged.entries[0]
    is_used, percent, mib = expected
    assert (line.used_s is not None, line.idle_s is not None) == (is_used is not None,) * 2
    if is_used is not None:
        assert bool(line.used_s) is is_used
        assert bool(line.idle_s) is not is_used
    assert (line.percent, line.mib) == (percent, mib)
    logged.page.remove()


def test_more_than_the_part_is_logged(here: Here) -> None:
    """The time in which more than the part was used is logged."""
    switch_on(here)
    reserve_gpu.reserve(1, memory="1GiB")
    logged = recorded(time.time())
    here.add(f"compute {os.getpid()} 2000")
    logged.step({os.getpid()})
    logged.step({os.getpid()})
    assert (logged.entries[0].over_s or 0) > 0
    logged.page.remove()


def test_an_instance_counts_by_its_memory(here: Here) -> None:
    """A MIG instance counts as the share of its GPU's memory that it has; a part of it, as less."""
    here.use("mig")
    switch_on(here)
    reserve_gpu.reserve("1:0")
    logged = recorded(time.time())
    logged.step({os.getpid()})
    whole = logged.entries[0].share
    logged.page.remove()
    assert whole == pytest.approx(4864 / 40_960, abs=0.01)
    half = f"{session().devices[0].memory_mib // 2}MiB"  # type: ignore[operator]
    reserve_gpu.release()
    reserve_gpu.reserve("1:0", memory=half)
    logged = recorded(time.time())
    logged.step({os.getpid()})
    assert logged.entries[0].share == pytest.approx(whole / 2, abs=0.01)
    logged.page.remove()


def test_each_hour_has_a_line(here: Here) -> None:
    """Once another hour has begun, the line of the last one stands, and a new one begins."""
    switch_on(here)
    reserve_gpu.reserve()
    before = len(lines(here, "*.open"))
    logged = recorded(time.time() - 3600)
    logged.step({os.getpid()})
    (line,) = lines(here)
    assert "how" not in line
    assert line["id"] == logged.page.id
    assert logged.entries[0].start == pytest.approx(line["end"], abs=0.001)
    assert logged.entries[0].since == pytest.approx(line["since"], abs=0.001)
    assert len(lines(here, "*.open")) == before + 1
    logged.page.remove()


def test_a_process_that_was_stopped_for_hours(here: Here) -> None:
    """The hours in which a process was stopped count as reserved, and as neither used nor idle."""
    switch_on(here)
    reserve_gpu.reserve()
    holding, folder = session().held, places.to_write(None)
    assert folder is not None
    assert holding
    logged = Recorder(Page.new(folder), holding, time.time(), time.monotonic() - 10_000, every_s=0)
    logged.step({os.getpid()})
    line = parsed(logged.entries[0].to_json().encode())
    assert line
    assert line.seconds >= 10_000
    assert line.idle_s == recorder.LONGEST_KNOWN_S
    logged.page.remove()


@pytest.mark.parametrize(
    ("process", "expected"), [("", (None, True)), ("compute {pid} 900", (None, None))]
)
def test_an_instance_without_a_process_is_idle(
    here: Here, process: str, expected: tuple[bool | None, ...]
) -> None:
    """A MIG instance is idle without a process of its holder's; with one, nobody can tell."""
    here.use("mig")
    text = here.scenario.read_text().replace("    gi 7", f"    gi 7\n    {process}")
    here.write(text.format(pid=os.getpid()))
    switch_on(here)
    reserve_gpu.reserve("1:0")
    logged = recorded(time.time())
    logged.step({os.getpid()})
    logged.step({os.getpid()})
    line = logged.entries[0]
    assert (bool(line.used_s) or None, bool(line.idle_s) or None) == expected
    logged.page.remove()


def test_a_cut_line_spoils_no_other(here: Here) -> None:
    """A line that a full disk has cut does not take the next one with it."""
    switch_on(here)
    folder = places.to_write(None)
    assert folder is not None
    line = LogLine(Kind.RESERVED, "a", NOW, NOW, NOW + 60, 60.0)
    name = folder_of(here) / f"{time.strftime('%Y-%m', time.localtime(NOW))}.jsonl"
    name.touch(0o600)
    name.write_text('{"kind":"reser')
    log_writer.append(folder, [line])
    os.close(folder)
    assert name.read_text().splitlines() == ['{"kind":"reser', line.to_json()]


def test_a_year_is_kept(here: Here) -> None:
    """The files of thirteen months stay, older ones are removed, and nothing else is."""
    switch_on(here)
    folder = places.to_write(None)
    assert folder is not None
    names = ["2025-10.jsonl", "2025-11.jsonl", "2025-12.jsonl", "2024-01.json", "notes.txt"]
    for name in names:
        (folder_of(here) / name).touch(0o600)
    moment = time.mktime((2026, 11, 24, 12, 0, 0, 0, 0, -1))
    log_writer.append(folder, [LogLine(Kind.RESERVED, "a", moment, moment, moment + 60, 60.0)])
    os.close(folder)
    left = {file.name for file in folder_of(here).iterdir()}
    assert left == {*names[1:], "2026-11.jsonl"}
