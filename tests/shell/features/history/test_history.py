"""The history that the test process logs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import reserve_gpu
from reserve_gpu.features.history import recorder
from reserve_gpu.features.history.journal import History
from reserve_gpu.features.history.recorder import Recorder
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import Kind, LogLine
from reserve_gpu.log.log_writer import Page
from reserve_gpu.model.requests import End, Rules
from reserve_gpu.reservation.session import session
from tests.support.here import feature
from tests.support.history import history_folder, logged_lines, open_lines
from tests.support.processes import wait_for

if TYPE_CHECKING:
    from tests.support.here import Here

NOW = 1_795_000_000.0


# -- the folder ------------------------------------------------------------------------------------


FOR_ALL, IN_HOME = "history/{uid}", "home/.local/state/reserve_gpu/{host}"


def make_shared_folder(here: Here, mode: int) -> None:
    """Create the folder for the histories of all users."""
    (here.folder / "history").mkdir()
    (here.folder / "history").chmod(mode)


def set_own(here: Here, value: str) -> None:
    """Set `history` in the user's configuration."""
    (here.home / ".config").mkdir()
    (here.home / ".config/reserve_gpu.toml").write_text(f"history = {value}\n")


@pytest.mark.parametrize(
    ("own", "rule", "existing", "expected"),
    [
        (None, None, (), None),
        (None, None, (FOR_ALL,), FOR_ALL),
        (None, None, (IN_HOME,), IN_HOME),
        (None, True, (), IN_HOME),
        (None, True, (FOR_ALL, IN_HOME), FOR_ALL),
        (None, False, (FOR_ALL, IN_HOME), None),
        ("true", False, (FOR_ALL,), FOR_ALL),
        ("false", True, (FOR_ALL, IN_HOME), None),
    ],
)
def test_folder_of_the_history(
    here: Here,
    own: str | None,
    existing: tuple[str, ...],
    expected: str | None,
    *,
    rule: bool | None,
) -> None:
    """The user's setting precedes the administrator's, which precedes existing folders."""
    if own:
        set_own(here, own)
    if FOR_ALL in existing:
        make_shared_folder(here, 0o1733)
    if IN_HOME in existing:
        history_folder(here).parent.mkdir(parents=True)
    folder = places.to_write(Rules("", "", history=rule))
    if folder is None:
        assert expected is None
        return
    found = Path(os.readlink(f"/proc/self/fd/{folder}"))
    os.close(folder)
    assert expected
    assert found == here.folder / expected.format(uid=os.geteuid(), host=os.uname().nodename)
    assert found.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_folder_in_which_others_can_remove_files_is_not_used(here: Here, mode: int) -> None:
    make_shared_folder(here, mode)
    assert places.to_write(None) is None


def test_rule_enables_the_history(here: Here) -> None:
    here.rules.write_text("history = true\n")
    reserve_gpu.reserve(note="thesis")
    assert [line["note"] for line in open_lines(here)] == ["thesis"]


def test_invalid_setting_is_refused(here: Here) -> None:
    set_own(here, '"yes"')
    with pytest.raises(reserve_gpu.RequestError) as caught:
        places.to_write(None)
    assert str(here.home) in str(caught.value)


# -- lines -----------------------------------------------------------------------------------------


def test_current_reservation_has_a_page(logged: Here) -> None:
    """The page of a reservation describes it, and only its user can read the page."""
    reserve_gpu.reserve(count=2, memory="1GiB", note="thesis")
    one, other = open_lines(logged)
    assert (one["label"], other["label"]) == ("GPU0", "GPU1")
    assert (one["note"], one["part_mib"]) == ("thesis", 1024.0)
    assert one["share"] == pytest.approx(1024 / 4038, abs=0.05)
    (page,) = history_folder(logged).glob("*.open")
    assert page.stat().st_mode & 0o777 == 0o600
    assert not logged_lines(logged)


def test_new_note_is_logged(logged: Here) -> None:
    reserve_gpu.reserve(note="thesis")
    reserve_gpu.reserve(note="paper")
    session().run(session()._step)
    session().run(feature(History)._recorder._log_use)  # type: ignore[union-attr]
    assert [line["note"] for line in open_lines(logged)] == ["paper"]


def test_end_of_a_reservation_is_logged(logged: Here) -> None:
    """A release, or another reservation, moves the line from the page to the month's file."""
    for number in (0, 1):
        reserve_gpu.reserve(number)
        (page,) = open_lines(logged)
        assert page["label"] == f"GPU{number}"
        wait_for(lambda began=page["since"]: time.time() > began + recorder.LEAST_S)  # type: ignore[misc]
    reserve_gpu.release()
    first, second = logged_lines(logged)
    assert [first["how"], second["how"]] == [End.CHANGED.value, End.RELEASED.value]
    assert second["seconds"] == pytest.approx(second["end"] - second["start"], abs=0.1)
    (file,) = history_folder(logged).iterdir()
    assert file.name == time.strftime("%Y-%m.jsonl", time.localtime(first["start"]))


def test_reservation_of_less_than_a_second_is_not_logged(logged: Here) -> None:
    reserve_gpu.reserve().release()
    assert not logged_lines(logged)
    assert list(history_folder(logged).iterdir()) == []


def open_folder() -> int:
    """Open the folder of the user's history."""
    folder = places.to_write(None)
    assert folder is not None
    return folder


def test_page_whose_lines_are_in_the_log_is_only_removed(logged: Here) -> None:
    """A process that is killed before it removes its page is logged once."""
    folder = open_folder()
    page = Page.new(os.dup(folder))
    line = LogLine(Kind.RESERVED, page.id, NOW, NOW, NOW + 60, 60.0, gpu="GPU-8f2a")
    page.write([line])
    log_writer.append(folder, [line._replace(how=End.RELEASED)])
    page.close()
    log_writer.close_lost(folder)
    os.close(folder)
    assert [each["how"] for each in logged_lines(logged)] == [End.RELEASED.value]
    assert not open_lines(logged)


def test_truncated_line_does_not_spoil_the_next(logged: Here) -> None:
    """A line that a full disk has truncated is followed by a complete one."""
    folder = open_folder()
    line = LogLine(Kind.RESERVED, "a", NOW, NOW, NOW + 60, 60.0)
    file = history_folder(logged) / f"{time.strftime('%Y-%m', time.localtime(NOW))}.jsonl"
    file.touch(0o600)
    file.write_text('{"kind":"reser')
    log_writer.append(folder, [line])
    os.close(folder)
    assert file.read_text().splitlines() == ['{"kind":"reser', line.to_json()]


def test_files_of_thirteen_months_are_kept(logged: Here) -> None:
    folder = open_folder()
    names = ["2025-10.jsonl", "2025-11.jsonl", "2025-12.jsonl", "2024-01.json", "notes.txt"]
    for name in names:
        (history_folder(logged) / name).touch(0o600)
    moment = time.mktime((2026, 11, 24, 12, 0, 0, 0, 0, -1))
    log_writer.append(folder, [LogLine(Kind.RESERVED, "a", moment, moment, moment + 60, 60.0)])
    os.close(folder)
    left = {file.name for file in history_folder(logged).iterdir()}
    assert left == {*names[1:], "2026-11.jsonl"}


# -- use -------------------------------------------------------------------------------------------


def check_use(now: float | None = None, at: float | None = None) -> LogLine:
    """Log the use of the current reservation twice, and return the first line.

    Args:
        now: The reservation's start time.
        at: The `time.monotonic()` value at which logging starts.
    """
    held = session().holding
    logged = Recorder(Page.new(open_folder()), held, now or time.time(), at, every_s=0)
    logged.step({os.getpid()})
    logged.step({os.getpid()})
    logged.page.remove()
    return logged.entries[0]


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ("compute {pid} 900\nutilisation 95", (True, 95, 900)),
        ("compute {pid} 900\nutilisation 0", (False, 0, 900)),
        ("", (False, 0, 0)),
        ("compute {pid} 900\nutilisation 95\nsamples strange", (None, None, 900)),
        ("compute 1 900\nutilisation 95", (False, 0, 0)),
        (
            "compute {pid} 900\nutilisation 95\nfail nvmlDeviceGetComputeMode 1 15",
            (None, None, None),
        ),
    ],
    ids=["works", "idle", "none", "unknown samples", "another user's", "unreadable"],
)
def test_use_by_own_processes_is_logged(
    logged: Here, processes: str, expected: tuple[Any, ...]
) -> None:
    """Use that can't be read is neither used nor idle time."""
    reserve_gpu.reserve(1)
    logged.add(processes.format(pid=os.getpid()))
    line = check_use()
    is_used, percent, mib = expected
    assert (line.used_s is not None, line.idle_s is not None) == (is_used is not None,) * 2
    if is_used is not None:
        assert (bool(line.used_s), bool(line.idle_s)) == (is_used, not is_used)
    assert (line.percent, line.mib) == (percent, mib)


@pytest.mark.parametrize(("used_mib", "is_over"), [(2000, True), (1024, False)])
def test_use_beyond_the_part_is_logged(logged: Here, used_mib: int, *, is_over: bool) -> None:
    reserve_gpu.reserve(1, memory="1GiB")
    logged.add(f"compute {os.getpid()} {used_mib}")
    assert bool(check_use().over_s) is is_over


def test_share_of_an_instance_is_that_of_its_memory(logged: Here) -> None:
    """A MIG instance, or a part of it, is logged as a share of its GPU's memory."""
    logged.use("mig")
    reserve_gpu.reserve("1:0")
    whole = check_use().share
    assert whole == pytest.approx(4864 / 40_960, abs=0.01)
    half = f"{session().devices[0].memory_mib // 2}MiB"  # type: ignore[operator]
    reserve_gpu.release()
    reserve_gpu.reserve("1:0", memory=half)
    assert check_use().share == pytest.approx(whole / 2, abs=0.01)


def test_each_hour_has_a_line(logged: Here) -> None:
    """A line ends at the first check of the next hour, and counts at most two minutes of use."""
    reserve_gpu.reserve()
    next_line = check_use(time.time() - 10_000, time.monotonic() - 10_000)
    (line,) = logged_lines(logged)
    assert "how" not in line
    assert line["id"] == next_line.id
    assert line["seconds"] >= 10_000
    assert line["idle_s"] == recorder.LONGEST_KNOWN_S
    assert next_line.start == pytest.approx(line["end"], abs=0.001)
    assert next_line.since == pytest.approx(line["since"], abs=0.001)
    assert next_line.seconds < 60
