"""`reserve-gpu report`: what is read of histories, what it sums up to, and how it is shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections import defaultdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
import wcwidth

from reserve_gpu.commands.export import html_page
from reserve_gpu.commands.report import accounting, totals
from reserve_gpu.commands.report.totals import Hours, Idle, summed
from reserve_gpu.commands.report.usage_view import Report, read_report
from reserve_gpu.log import log_reader as histories_of
from reserve_gpu.log.log_lines import TEXT_LIMIT, Kind, LogLine
from reserve_gpu.log.log_reader import Logged
from reserve_gpu.model import parsing
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.requests import End
from reserve_gpu.model.untrusted import FormatError
from reserve_gpu.render import html, phrases, terminal
from reserve_gpu.render.tables import Column, Sheet, in_columns, rows
from reserve_gpu.system import procfs
from tests.commandline import CommandLine
from tests.histories import (
    DAY_S,
    FIRST_UID,
    HOUR_S,
    Histories,
    Stay,
    month_file,
    write_year,
    year,
)
from tests.hosts import Hosts, needs_ssh
from tests.lab import CHROMIUM, FLAGS
from tests.locked import needs_root
from tests.machine import ROOT
from tests.test_users import DAEMON, NOBODY, as_user, for_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from subprocess import CompletedProcess

    from tests.here import Here
    from tests.machine import Machine

AT = 1761300000 - 1761300000 % HOUR_S  # 2025-10-24, at the beginning of an hour
NOW = AT + 30 * DAY_S


@pytest.fixture
def kept(here: Here, monkeypatch: pytest.MonkeyPatch) -> Histories:
    """Make a directory for the histories of all users, and no history yet."""
    made = Histories(here.folder / "history")
    monkeypatch.setenv("RESERVE_GPU_HISTORY", str(made.folder))
    return made


@pytest.fixture
def typed(here: Here, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def line(**changes: Any) -> LogLine:
    """Return a line of one hour, of which half an hour was used."""
    whole = LogLine(
        Kind.RESERVED, "a1", AT, AT, AT + HOUR_S, 3600.0, 1800.0, 1800.0, gpu="GPU-1",
        label="GPU0", name="train.ipynb",
    )  # fmt: skip
    return whole._replace(**changes)


def sums(by: str = "user", since: float = 0, now: float = NOW) -> totals.Summary:
    return summed(histories_of.since(since, now, set()), by)


def total(since: float = 0) -> Hours:
    return totals.together(sums(since=since).days.values())


def rounded(rows: Mapping[str, Hours]) -> dict[str, list[float]]:
    return {name: [round(value, 6) for value in hours] for name, hours in rows.items()}


# -- what it sums up to ----------------------------------------------------------------------------


def intended(stays: Sequence[Stay], key: Callable[[Stay], str]) -> dict[str, list[float]]:
    """Return the hours of what people meant to do, by straight loops: reserved, used and idle."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for stay in stays:
        for place, share in enumerate((1.0, stay.used, 1 - stay.used - stay.unknown)):
            found[key(stay)][place] += stay.seconds * share * stay.share / 3600
    return {name: [round(value, 6) for value in hours] for name, hours in found.items()}


def notebook_of(stay: Stay) -> str:
    """Return what a notebook is called; root has histories of many users, and sees whose it is."""
    user = "" if os.geteuid() else f"uid {FIRST_UID + stay.person}: "
    return f"{user}{stay.notebook}"


@pytest.mark.full
def test_a_year(kept: Histories) -> None:
    """A year of 20 people sums up to what they meant, by each key, on less than 50 MB."""
    now = time.time()
    stays = year(now)
    assert write_year(kept, stays) > 40_000
    assert kept.size() < 50e6
    keys: dict[str, Callable[[Stay], str]] = {
        "notebook": notebook_of,
        "gpu": lambda stay: stay.uuid,
        "day": lambda stay: datetime.fromtimestamp(stay.start).strftime("%Y-%m-%d"),  # noqa: DTZ006
    }
    if not os.geteuid():
        keys["user"] = lambda stay: f"uid {FIRST_UID + stay.person}"
    for by, key in keys.items():
        summary = sums(by, now - 366 * DAY_S, now)
        found = {name: hours[:3] for name, hours in rounded(summary.rows).items()}
        assert found == intended(stays, key), by
    whole = sum(stay.seconds for stay in stays) / 3600
    reserved = totals.together(summary.days.values())
    assert reserved.reserved == pytest.approx(whole)
    assert reserved.unknown == pytest.approx(whole / 8)


def test_a_short_year(kept: Histories) -> None:
    """A week of three people sums up to what they meant: the same as `test_a_year`, in short."""
    now = time.time()
    stays = year(now, people=3, days=5)
    write_year(kept, stays)
    found = {name: hours[:3] for name, hours in rounded(sums("notebook", now=now).rows).items()}
    assert found == intended(stays, notebook_of)


PART = {"share": 0.25, "used_s": 3600.0, "idle_s": 0.0, "over_s": 900.0}
CASES: list[tuple[str, list[LogLine], str, dict[str, Hours]]] = [
    ("overlapping", [line(), line(id="b2")], "gpu", {"GPU-1": Hours(2, 1, 1)}),
    ("a part", [line(**PART)], "gpu", {"GPU-1": Hours(0.25, 0.25, 0, 0.0625)}),
    (
        "sharers",
        [line(share=0.5), line(id="b2", share=0.5, name="b")],
        "notebook",
        {"train.ipynb": Hours(0.5, 0.25, 0.25), "b": Hours(0.5, 0.25, 0.25)},
    ),
    (
        "MIG instances",
        [line(gpu="MIG-1", share=0.125), line(gpu="MIG-2", share=0.125)],
        "gpu",
        {"MIG-1": Hours(0.125, 0.0625, 0.0625), "MIG-2": Hours(0.125, 0.0625, 0.0625)},
    ),
    (
        "a restart",
        [
            line(seconds=600.0, used_s=600.0, idle_s=0.0, how=End.RESTART),
            line(id="b2", start=AT + 601, seconds=1200.0, used_s=None, idle_s=None),
        ],
        "notebook",
        {"train.ipynb": Hours(0.5, 1 / 6)},
    ),
    (
        "a wait",
        [line(kind=Kind.WAITED, seconds=7200.0, gpu=None, how=End.GRANTED), line()],
        "notebook",
        {"train.ipynb": Hours(1, 0.5, 0.5, waited=2)},
    ),
    (
        "a wait has no GPU",
        [line(kind=Kind.WAITED, seconds=99_999.0, gpu=None, how=End.GAVE_UP)],
        "gpu",
        {},
    ),
    (
        "a clock that was set back",
        [line(start=AT + HOUR_S, end=AT + 600, seconds=600.0, used_s=600.0, idle_s=0.0), line()],
        "gpu",
        {"GPU-1": Hours(7 / 6, 4 / 6, 0.5)},
    ),
    (
        "a machine that slept",
        [line(seconds=900.0, used_s=900.0, idle_s=0.0)],
        "gpu",
        {"GPU-1": Hours(0.25, 0.25)},
    ),
]


@pytest.mark.parametrize(
    ("entries", "by", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_counts(
    kept: Histories, entries: list[LogLine], by: str, expected: dict[str, Hours]
) -> None:
    """Each kind of line adds the hours that passed by the monotonic clock, by its share."""
    kept.write(entries)
    assert rounded(sums(by).rows) == rounded(expected)


@pytest.mark.process
@pytest.mark.parametrize(
    ("first", "day", "hours"),
    [(1761429600, "2025-10-26", 25.0), (1743289200, "2025-03-30", 23.0)],
    ids=["autumn", "spring"],
)
def test_the_change_of_the_clocks(
    kept: Histories, here: Here, first: int, day: str, hours: float
) -> None:
    """A reservation of a whole day in Berlin has 25 hours when clocks go back, 23 when forth."""
    kept.write(Stay(0, 0, first, int(hours) * HOUR_S).lines())
    words = ("report", "--json", "--by", "day", "--since", f"@{first - 3 * DAY_S}")
    done = here.command(
        sys.executable, "-m", "reserve_gpu", *words, TZ="Europe/Berlin",
        RESERVE_GPU_HISTORY=str(kept.folder),
    )  # fmt: skip
    found = {row["name"]: row["reserved_hours"] for row in json.loads(done.stdout)["rows"]}
    assert found == {day: hours}


def test_only_what_began_since_then(kept: Histories) -> None:
    """What began before the moment counts for nothing, and what is still to come neither."""
    kept.write([line(start=AT - 1), line(start=AT), line(start=NOW + 2 * DAY_S)])
    assert total(since=AT).reserved == 1


def test_the_longest_idle(kept: Histories) -> None:
    """The reservations that lay idle for longest are named, over all their hours and devices."""
    for number in range(9):
        kept.write(
            line(id=f"r{number}", start=AT + hour * HOUR_S, used_s=0.0, idle_s=3600.0,
                 gpu=f"GPU-{hour % 2}", label=f"GPU{hour % 2}", name=f"n{number}" if hour else None)
            for hour in range(number)
        )  # fmt: skip
    longest = sums().idle
    assert [(each.name, each.idle_hours) for each in longest[:2]] == [("n8", 8.0), ("n7", 7.0)]
    assert longest[0].gpus == ("GPU0", "GPU1")
    assert len(longest) == totals.MOST_IDLE


@pytest.mark.full
def test_a_million_of_names_are_bounded() -> None:
    """However many names and reservations there are, few are kept, and no hour is lost."""
    count = 3 * totals.MOST_RESERVATIONS
    lines = (Logged("a", line(id=f"i{n}", name=f"n{n}", idle_s=3600.0)) for n in range(count))
    last = (Logged("a", line(id="long", idle_s=3600.0)) for _ in range(9))
    summary = summed((each for those in (last, lines) for each in those), "notebook")
    assert len(summary.rows) == totals.MOST_NAMES + 1
    assert "others" in summary.rows
    assert sum(hours.reserved for hours in summary.rows.values()) == pytest.approx(count + 9)
    assert (summary.idle[0].name, summary.idle[0].idle_hours) == ("train.ipynb", 9.0)


@pytest.mark.parametrize("by", ["user", "notebook", "gpu", "day"])
def test_a_users_words_change_no_other_users_row(by: str) -> None:
    """However many names one user writes, the others' rows are as they would be without them."""
    others = [Logged("b", line()), Logged("c", line(id="c1", gpu="GPU-2", label="GPU1"))]
    many = [
        Logged("a", line(id=f"i{n}", name=f"n{n}", gpu=f"GPU-x{n}", start=AT + n * DAY_S))
        for n in range(totals.MOST_NAMES + 2)
    ]
    expected = summed([*others, Logged("a", line(name="n", gpu="GPU-x", start=0.0))], by)
    found = summed([*many, *others], by)
    own = {name for name in expected.rows if not name.startswith(("a", "GPU-x", "19"))}
    assert own
    if by == "day":
        own = set()  # a day is everybody's
    assert {name: found.rows[name] for name in own} == {n: expected.rows[n] for n in own}
    assert found.labels["b"] == {"GPU-1": "GPU0"}


def test_a_user_gives_no_gpu_another_name(kept: Histories, typed: CommandLine, here: Here) -> None:
    """A GPU that is there is called what the driver calls it, whatever a history says."""
    kept.write([line(start=time.time() - 60, gpu=here.uuid("1"), label="GPU7 (broken)")])
    rows = json.loads(typed("report", "--json", "--by", "gpu").stdout)["rows"]
    assert [row["name"] for row in rows] == ["GPU1"]


# -- what is read ----------------------------------------------------------------------------------


def test_too_many_lines_of_a_user(kept: Histories) -> None:
    """Of a user with more lines than are read the newest count, and that is said."""
    old, new = line(start=AT - 40 * DAY_S, id="old"), [line(id=f"n{n}") for n in range(3)]
    kept.write([old])
    kept.write(new)
    for most, found, cut in ((4, 4, set()), (3, 3, {procfs.user_name(os.geteuid())}), (0, 0, None)):
        said: set[str] = set()
        lines = [each.entry.id for each in histories_of.since(0, NOW, said, most)]
        assert len(lines) == found
        assert cut is None or said == cut
        assert found != 3 or "old" not in lines
    assert "nina: too many history lines; only the newest are counted" in str(
        REPORT._replace(cut=("nina",)).picture()
    )


def test_a_page_that_is_appended_by_now_counts_once(kept: Histories) -> None:
    """A line on its page and in the file of the month counts once, as the file has it."""
    page = kept.page([line(seconds=1800.0), line(start=AT + HOUR_S)])
    kept.write([line()])
    assert total().reserved == 2
    page.remove()
    assert total().reserved == 1


@pytest.mark.parametrize("letter", ["a", "\x01", '"', "\u00e9", "\u8bad", "\U0001f680", "\udc80"])
@pytest.mark.parametrize("is_page", [True, False])
def test_a_line_with_long_texts_is_read(kept: Histories, letter: str, *, is_page: bool) -> None:
    """A line counts however many bytes its texts take, and its identifiers stay whole."""
    fields = ("name", "note", "asks", "agent", "job")
    written = line(**dict.fromkeys(fields, 300 * letter))
    page = kept.page([written]) if is_page else None
    if page is None:
        kept.write([written])
    (logged,) = histories_of.since(0, AT + DAY_S, set())
    assert (logged.entry.id, logged.entry.gpu) == (written.id, written.gpu)
    for field in fields:
        assert 50 <= len(getattr(logged.entry, field)) <= TEXT_LIMIT
        assert {*getattr(logged.entry, field)} == {letter}
    if page:
        page.remove()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe" * 999,
        b"x" * (1 << 20),
        b'{"kind":"reserved","id":"' + b"a" * (1 << 20) + b'"}',
        b"[" * 3000,
        b"{" * 3000,
        line().to_json().encode() + b'{"b":2}',
        b"null",
        b"\xef\xbb\xbf{}",
        line().to_json()[:-9].encode(),
    ],
    ids=lambda garbage: garbage[:8].hex(),
)
def test_garbage_is_skipped(kept: Histories, garbage: bytes) -> None:
    """Binary, endless, nested or cut lines take nothing from the lines around them."""
    good = f"{line().to_json()}\n".encode()
    month_file(kept.of(), AT).write_bytes(good + garbage + b"\n" + good + garbage)
    assert total().reserved == 2


@pytest.mark.parametrize(
    "forged",
    [
        {"seconds": -1}, {"seconds": "NaN"}, {"seconds": float("nan")}, {"seconds": float("inf")},
        {"seconds": 1e8}, {"seconds": True}, {"seconds": None}, {"seconds": 10**400},
        {"seconds": [1]}, {"idle_s": 3601}, {"used_s": -0.5}, {"over_s": True}, {"over_s": 1e308},
        {"share": 1.5},
        {"share": -1}, {"share": None}, {"start": "now"}, {"start": -1}, {"start": 1e300},
        {"id": 7}, {"id": None}, {"kind": "mine"}, {"kind": ["reserved"]}, {"kind": None},
        {"gpu": 3}, {"gpu": {"a": 1}}, {"name": ["x"]}, {"name": True}, {"how": "magic"},
        {"how": []}, {"percent": 101}, {"mib": 1e12},
    ],
    ids=str,
)  # fmt: skip
def test_forged_values_are_no_line(kept: Histories, forged: dict[str, Any]) -> None:
    """A line with a value that can't be counts for nothing."""
    fields = json.loads(line().to_json()) | forged
    month_file(kept.of(), AT).write_text(f"{json.dumps(fields)}\n{line().to_json()}\n")
    assert total().reserved == 1


def as_link(path: Path, data: bytes) -> None:
    path.with_name("elsewhere").write_bytes(data)
    path.symlink_to("elsewhere")


def as_hard_link(path: Path, data: bytes) -> None:
    path.with_name("elsewhere").write_bytes(data)
    path.hardlink_to(path.with_name("elsewhere"))


def as_fifo(path: Path, data: bytes) -> None:
    os.mkfifo(path)
    os.write(os.open(path, os.O_RDWR | os.O_NONBLOCK), data)  # kept open: else the data is gone


def as_directory(path: Path, data: bytes) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [as_link, as_hard_link, as_fifo, as_directory])
@pytest.mark.parametrize("name", ["2025-10.jsonl", f"{'a' * 16}.open"])
def test_what_is_no_plain_file_is_not_read(
    kept: Histories, make: Callable[[Path, bytes], None], name: str
) -> None:
    """A link, a second name, a pipe or a directory in place of a file is skipped, at once."""
    make(kept.of() / name, f"{line().to_json()}\n".encode())
    kept.write([line(start=AT + 30 * DAY_S)])
    assert total().reserved == 1


@needs_root
def test_a_file_of_another_owner_is_not_read(kept: Histories) -> None:
    """A file that another user has put into a folder says nothing of who owns the folder."""
    kept.write([line()], FIRST_UID)
    os.chown(month_file(kept.of(FIRST_UID), AT), FIRST_UID + 1, FIRST_UID)
    kept.write([line(id="b2")], FIRST_UID + 2)
    assert set(sums().rows) == {f"uid {FIRST_UID + 2}"}


@needs_root
def test_a_folder_under_another_name_is_not_read(kept: Histories) -> None:
    """Nobody can write the history of another user: a folder is its owner's alone."""
    kept.write([line()], FIRST_UID)
    (kept.folder / str(FIRST_UID)).rename(kept.folder / str(FIRST_UID + 5))
    assert sums().rows == {}


@pytest.mark.parametrize("kind", ["unreserved", "free"])
def test_kinds_that_are_noted_no_more(kept: Histories, kind: str) -> None:
    """Older lines on free GPUs, and on use without a reservation, are no mistake and count not."""
    kept.write([line()])
    own = kept.of()
    old = line(id="machine").to_json().replace('"reserved"', f'"{kind}"')
    for path in (month_file(own, AT), own / "machine.open"):
        with path.open("a") as file:
            file.write(f'{old[:-1]},"user":"carol"}}\n')
    assert total() == Hours(1, 0.5, 0.5)


WRITE = """
import os, time
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import TEXT_LIMIT, Kind, LogLine
at = time.time() - 7200
folder = places.to_write(None)
page = log_writer.Page.new(os.dup(folder))
lines = [LogLine(Kind.RESERVED, "a1", at, at, at + 3600, 3600.0, 3600.0, 0.0, gpu="GPU-1")]
page.write(lines)
page.turn(lines)
page.write([lines[0]._replace(start=at + 3600, seconds=1800.0, used_s=0.0, idle_s=1800.0)])
"""


@pytest.mark.process
@pytest.mark.xdist_group("users")
def test_users_read_their_own_alone() -> None:
    """Root reads the history of all users, and they can't read each other's."""
    with for_users() as machine:
        made = Histories(machine.folder / "history")
        extra = {"RESERVE_GPU_HISTORY": str(made.folder), "HOME": "/nonexistent"}

        def run(user: str, *words: str) -> str:
            done = machine.command(*as_user(user), sys.executable, *words, **extra)
            assert done.returncode == 0, done.stderr
            return done.stdout

        for user in (NOBODY, DAEMON):
            run(user, "-c", WRITE)
        found = {
            user: json.loads(run(user, "-m", "reserve_gpu", "report", "--json"))
            for user in ("root", NOBODY, DAEMON)
        }
        rows = {
            user: {row["name"]: row["reserved_hours"] for row in each["rows"]}
            for user, each in found.items()
        }
        both = {NOBODY: 1.5, DAEMON: 1.5}
        assert rows == {"root": both, NOBODY: {NOBODY: 1.5}, DAEMON: {DAEMON: 1.5}}
        assert [each["user"] for each in found.values()] == [None, NOBODY, DAEMON]
        folder = next(path for path in made.folder.iterdir() if path.owner() == DAEMON)
        code = f"import os; print(os.access({str(folder)!r}, os.R_OK | os.X_OK))"
        assert run(NOBODY, "-c", code) == "False\n"
        assert "This covers only nobody." in run(NOBODY, "-m", "reserve_gpu", "report")


# -- since when ------------------------------------------------------------------------------------

TUESDAY = time.mktime((2026, 11, 24, 16, 15, 30, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "moment", "lasts_s"),
    [
        ("7d", (2026, 11, 17, 16, 0), 604800),
        ("12h", (2026, 11, 24, 4, 0), 43200),
        ("1h30m", (2026, 11, 24, 14, 0), 5400),
        ("today", (2026, 11, 24, 0, 0), None),
        ("Yesterday", (2026, 11, 23, 0, 0), None),
        ("yesterday 18:00", (2026, 11, 23, 18, 0), None),
        ("Mon", (2026, 11, 23, 0, 0), None),
        ("Tue", (2026, 11, 24, 0, 0), None),
        ("wednesday", (2026, 11, 18, 0, 0), None),
        ("Tue 18:00", (2026, 11, 17, 18, 0), None),
        ("18:00", (2026, 11, 23, 18, 0), None),
        ("9am", (2026, 11, 24, 9, 0), None),
        ("2026-11-01", (2026, 11, 1, 0, 0), None),
        ("2026-11-01 18:30", (2026, 11, 1, 18, 0), None),
    ],
)
def test_since(text: str, moment: tuple[int, ...], lasts_s: float | None) -> None:
    """A time back, a day or a moment means the beginning of that hour, in local time."""
    expected = time.mktime((*moment, 0, 0, 0, -1))  # type: ignore[arg-type] # nine numbers
    assert parsing.parse_since(text, TUESDAY) == (expected, lasts_s)


def test_since_the_epoch() -> None:
    """With an @ it is that very second; no time back reaches before the epoch."""
    assert parsing.parse_since("@1793750455", TUESDAY) == (1793750455, None)
    assert parsing.parse_since("99999d", TUESDAY)[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tomorrow", "in the future. The local time is 2026-11-24 16:15"),
        ("2027-01-01", "in the future"),
        ("2026-11-24 17:00", "in the future"),
        ("@9999999999", "in the future"),
        ("7", "7 has no unit. Use 7s, 7m, 7h or 7d"),
        ("soon", "'soon' is not a valid time. Examples: 7d, 12h, yesterday"),
        ("-7d", "is not a valid time"),
        ("2026-02-30", "is not a valid time"),
        ("t", "is not a valid time"),
        ("", "is not a valid time"),
        ("\x1b[2J", "'\ufffd\\[2J' is not a valid time"),
    ],
)
def test_since_what_makes_no_sense(text: str, said: str) -> None:
    """What is no time, or still to come, is one line that says what to type."""
    with pytest.raises(RequestError, match=said) as caught:
        parsing.parse_since(text, TUESDAY)
    assert "\n" not in str(caught.value)


# -- how it is shown -------------------------------------------------------------------------------

HOSTILE = "\x1b[31m<b>=1\u202e\n" * 20
ROWS = {
    "alice": Hours(31, 9, 22, 0.5, 1.25),
    "bob": Hours(22.5, 20, 0.03),
    "\u540d\u524d" * 20: Hours(12, 2, 6),
    HOSTILE: Hours(0.02, 0.01, 0.01),
    "\u0627\u0644": Hours(),
}
DAYS = {"2026-11-18": Hours(40, 20, 15, 0.5, 1.25), "2026-11-21": Hours(25.52, 11, 13)}
IDLE = (
    Idle("alice", "train.ipynb", ("GPU0", "GPU1", "GPU2"), TUESDAY - DAY_S, 22.0),
    Idle(HOSTILE, HOSTILE, (HOSTILE,), TUESDAY - 9 * DAY_S, 9.0),
)
REPORT = Report("user", ROWS, DAYS, IDLE, TUESDAY - 7 * DAY_S, TUESDAY, 7.0 * DAY_S, "gpu-box")
STYLED = re.compile("\x1b\\[[0-9;]*m")


def shown(report: Report, width: int, *, is_colored: bool = False) -> list[str]:
    return terminal.lines(report.picture().layout, width, is_colored=is_colored)


def titles(report: Report, width: int) -> list[str]:
    """Return the titles of the first table's columns, with a mark for the bars."""
    lines = shown(report, width)
    place = next(n for n, each in enumerate(lines) if each.startswith(("user", "notebook", "GPU")))
    bars = ["bars"] if "\N{FULL BLOCK}" in "".join(lines) else []
    return bars + lines[place].split()


WEEK = {"alice": Hours(31, 9.3, 20.5), "bob": Hours(22, 19.8, 1.3), "dave": Hours(3, 2.9, 0.0)}
FORGOTTEN = Idle("alice", "train.ipynb", ("GPU0",), TUESDAY - DAY_S, 20.5)


def test_the_example_of_the_page() -> None:
    """docs/report.md begins with the report of a week as it is in a terminal of 72 columns."""
    page = (ROOT / "docs" / "report.md").read_text()
    typed, *example = page.split("```")[1].splitlines()[1:]
    start = TUESDAY - 7 * DAY_S
    week = Report("user", WEEK, WEEK, (FORGOTTEN,), start, TUESDAY, 7.0 * DAY_S, "gpu-box")
    assert typed == "$ sudo reserve-gpu report"
    assert example == shown(week, 72)


@pytest.mark.parametrize("width", [20, 30, 40, 60, 61, 80, 100, 120, 121, 160, 200])
def test_it_fits_a_terminal(width: int) -> None:
    """No line is wider than the terminal, whatever people call themselves and their notebooks."""
    for each in shown(REPORT, width):
        assert 0 <= wcwidth.wcswidth(each) <= width, each
    coloured = [STYLED.sub("", each) for each in shown(REPORT, width, is_colored=True)]
    assert coloured == shown(REPORT, width)


def test_what_is_left_out_in_a_narrow_terminal() -> None:
    """Where there is little room bars go first, then names are cut, then columns of less worth."""
    short = REPORT._replace(rows={"alice": ROWS["alice"], "bob": ROWS["bob"]})
    figures = ["reserved", "used", "idle", "over", "waited"]
    assert titles(short, 100) == ["bars", "user", *figures]
    assert titles(short, 45) == ["user", *figures]
    assert titles(short, 38) == ["user", "reserved", "used", "idle", "waited"]
    assert titles(short, 30) == ["user", "reserved", "used", "idle"]
    assert titles(short, 20) == ["user", "reserved"]


def test_figures_stand_to_the_right() -> None:
    """The figures of a column end below each other, wide letters or not."""
    lines = shown(REPORT, 160)
    first = next(n for n, each in enumerate(lines) if each.startswith("user"))
    ends = set()
    for each in lines[first : first + 4]:
        match = re.match(r".*?(reserved|31\.0|22\.5|12\.0)", each)
        assert match
        ends.add(wcwidth.wcswidth(match[0]))
    assert len(ends) == 1


def test_the_text_in_a_pipe(kept: Histories, typed: CommandLine) -> None:
    """The whole of a report, as it is in a pipe."""
    now = time.time()
    hour = now - now % HOUR_S - HOUR_S
    for name, used_s in (("train.ipynb", 900.0), ("eval.ipynb", 3600.0)):
        kept.write(
            [line(start=hour, since=hour, id=name, used_s=used_s, idle_s=3600 - used_s, name=name)]
        )
    kept.write([line(start=hour - HOUR_S, since=hour, used_s=0.0, idle_s=3600.0, id="train.ipynb")])
    done = typed("report", "--by", "notebook", "--since", "1d")
    assert (done.code, done.stderr) == (0, "")
    head, about, *table = done.stdout.splitlines()
    assert head == "3.0 GPU-hours reserved in the last day, 1.8 of them idle."
    assert re.fullmatch(r"\S+(, \S+)?, since \w{3} \d{4}-\d\d-\d\d \d\d:00", about)
    full, medium = "\N{FULL BLOCK}", "\N{MEDIUM SHADE}"
    assert table[:5] == [
        f"notebook     {' ' * 24}  reserved  used  idle",
        f"train.ipynb  {full * 3}{medium * 21}       2.0   0.2   1.8",
        f"eval.ipynb   {full * 12}{' ' * 12}       1.0   1.0   0.0",
        f"total        {' ' * 24}       3.0   1.2   1.8",
        f"{full * 2} used  {medium * 2} idle",
    ]
    assert table[6].startswith("longest idle reservations")


@pytest.mark.parametrize(
    ("shares", "length", "columns"),
    [
        ((1.0, 0.0, 0.0), 10, [10, 0, 0]),
        ((0.25, 0.25, 0.5), 8, [2, 2, 4]),
        ((0.5, 0.0, 0.001), 10, [5, 0, 0]),
        ((0.001, 0.0, 0.0), 10, [0, 0, 1]),
        ((0.0, 0.0, 0.0), 10, [0, 0, 0]),
        ((0.6, 0.6, 0.6), 10, [6, 4, 0]),
    ],
)
def test_a_bar_is_as_long_as_its_pieces(
    shares: tuple[float, ...], length: int, columns: list[int]
) -> None:
    """A bar is never longer than it may be, and what is there at all has a column."""
    found = in_columns(shares, length)
    assert sum(found) <= length
    assert sum(found) == sum(columns)
    assert min(found) >= 0
    if sum(columns) > 1:
        assert found == columns


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (0.0, "0.0"),
        (0.001, "<0.1"),
        (0.049, "<0.1"),
        (0.05, "0.1"),
        (31.04, "31.0"),
        (12345.6, "12345.6"),
    ],
)
def test_figures(hours: float, text: str) -> None:
    """Hours have one digit behind the point, and a little is not nothing."""
    assert phrases.hours(hours) == text


TOTAL = Hours(31, 9, 22)
NOTHING = "No GPU was reserved in the last 7 days."


@pytest.mark.parametrize(
    ("total", "lasts_s", "sentence"),
    [
        (TOTAL, 7 * DAY_S, "31.0 GPU-hours reserved in the last 7 days, 22.0 of them idle."),
        (TOTAL, DAY_S, "31.0 GPU-hours reserved in the last day, 22.0 of them idle."),
        (TOTAL, 12 * HOUR_S, "31.0 GPU-hours reserved in the last 12 hours, 22.0 of them idle."),
        (TOTAL, 5400, "31.0 GPU-hours reserved in the last 1 h 30 min, 22.0 of them idle."),
        (TOTAL, None, "31.0 GPU-hours reserved since 2026-11-17 16:15, 22.0 of them idle."),
        (Hours(1, 1), 7 * DAY_S, "1.0 GPU-hours reserved in the last 7 days, none of them idle."),
        (Hours(1), 7 * DAY_S, "1.0 GPU-hours reserved in the last 7 days."),
        (Hours(0.03), 7 * DAY_S, "Less than 0.1 GPU-hours were reserved in the last 7 days."),
        (Hours(), 7 * DAY_S, NOTHING),
    ],
)
def test_the_first_line(total: Hours, lasts_s: float | None, sentence: str) -> None:
    """The first line says how much was reserved, since when, and how much of it lay idle."""
    report = REPORT._replace(days={"2026-11-18": total}, lasts_s=lasts_s)
    assert str(report.picture()).splitlines()[0] == sentence


def test_no_machine_that_answers() -> None:
    """A report of which no machine has answered doesn't say that nothing was reserved."""
    report = REPORT._replace(days={}, has_answers=False)
    assert str(report.picture()).startswith("No machine answered.\n")


def test_what_could_not_be_read_is_said() -> None:
    """A line says for how long the use could not be read, if that is more than 5 %."""
    assert "for 0.2 of 4.0" not in str(with_unknown(0.2).picture())
    text = str(with_unknown(0.4).picture())
    assert "The usage could not be read for 0.4 of 4.0 GPU-hours." in text


def with_unknown(hours: float) -> Report:
    return REPORT._replace(days={"2026-11-18": Hours(4, 2, 2 - hours)})


def test_long_lists_are_folded() -> None:
    """Of very many rows the smaller ones are one, and the sum is that of all."""
    rows = {f"n{number:03}": Hours(number, number) for number in range(200)}
    lines = str(REPORT._replace(rows=rows, by="notebook").picture()).splitlines()
    assert any(each.startswith("161 more") for each in lines)
    assert sum(each.startswith("n1") for each in lines) == 39


def test_devices_and_days_keep_their_order() -> None:
    """GPU2 stands before GPU10, and days follow each other, whoever has reserved more."""
    rows = {"GPU10": Hours(9), "GPU2": Hours(1)}
    assert [row["name"] for row in REPORT._replace(by="gpu", rows=rows).to_dict()["rows"]] == [
        "GPU2",
        "GPU10",
    ]
    days = REPORT._replace(by="day", rows=dict(reversed(DAYS.items())))
    assert [row["name"] for row in days.to_dict()["rows"]] == [*DAYS]


def test_two_gpus_of_one_name(kept: Histories, typed: CommandLine) -> None:
    """Two GPUs that were called GPU0 one after the other are two rows."""
    now = time.time()
    for uuid in ("GPU-11111111-x", "GPU-22222222-x"):
        kept.write([line(start=now - 60, gpu=uuid, id=uuid)])
    rows = json.loads(typed("report", "--json", "--by", "gpu").stdout)["rows"]
    assert [row["name"] for row in rows] == ["GPU0 GPU-11111111", "GPU0 GPU-22222222"]


# -- formats ---------------------------------------------------------------------------------------


def test_a_report_survives_its_json() -> None:
    """What is read from the JSON of a report has the same JSON."""
    plain = {name: hours for name, hours in ROWS.items() if name != HOSTILE}
    said = json.loads(json.dumps(REPORT._replace(rows=plain, longest_idle=IDLE[:1]).to_dict()))
    assert read_report(said).to_dict() == said


NESTED: Any = []
for _ in range(50):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": [{}, 3, None, NESTED, {"name": 7, "reserved_hours": "x"}]},
        {"rows": [{"name": HOSTILE * 99, "reserved_hours": 1e308, "idle_hours": -1}]},
        {"rows": [{"name": "a", "reserved_hours": float("nan"), "used_hours": True}]},
        {"rows": [{"name": f"n{n}", "reserved_hours": 10**400} for n in range(20_000)]},
        {"rows": [], "days": [{"name": "2026-99-99", "reserved_hours": 3}, {"name": "9" * 9999}]},
        {"rows": [], "days": [{"name": "0001-01-01", "used_hours": 1}, {"name": "9999-12-31"}]},
        {"rows": [], "days": [{"name": "2026-11-24", "used_hours": 9e10}] * 3},
        {"rows": [], "longest_idle": [{"gpus": NESTED, "since": "x"}, {"gpus": [HOSTILE] * 9999}]},
        {"rows": [], "longest_idle": [{"since": 9e10, "idle_hours": 5}], "problems": 3, "by": []},
    ],
)
def test_a_foreign_answer_is_bounded(fields: dict[str, Any]) -> None:
    """Whatever a host answers is shown in bounded length, without control letters."""
    read = read_report({"version": 1, "host": HOSTILE, **fields})
    merged = accounting.merged({"lab1": read}, "user")
    for text in (str(merged.picture()), str(read.picture())):
        assert len(text) < 60_000
        assert not {letter for letter in text if not letter.isprintable()} - {"\n"}
    page = html_page.page(merged, "")
    assert "<b>=" not in page
    assert len(page) < 500_000
    assert len(merged.rows) <= 12_000
    json.dumps(merged.to_dict())


@pytest.mark.parametrize("answer", [None, [], {}, {"version": 1}, {"version": 2, "rows": []}])
def test_what_is_no_report_is_refused(answer: object) -> None:
    """JSON that is none of ours is no report without rows."""
    with pytest.raises(FormatError):
        read_report(answer)


def test_several_hosts_are_one_report() -> None:
    """Users and days are summed over the hosts; a GPU is called by its host."""
    one = REPORT._replace(rows={"alice": Hours(1, 1), "bob": Hours(2)}, user=None)
    two = one._replace(rows={"alice": Hours(3, 0, 3)}, longest_idle=IDLE[:1] * 5)
    whole = accounting.merged({"lab1": one, "lab2": two}, "user")
    assert whole.rows == {"alice": Hours(4, 1, 3), "bob": Hours(2)}
    assert whole.total.reserved == pytest.approx(2 * REPORT.total.reserved)
    assert whole.longest_idle[0].gpus == ("lab1:GPU0", "lab1:GPU1", "lab1:GPU2")
    assert len(whole.longest_idle) == totals.MOST_IDLE
    by_gpu = one._replace(by="gpu", rows={"GPU0": Hours(1)})
    both = accounting.merged({"lab1": by_gpu, "lab2": by_gpu}, "gpu")
    assert set(both.rows) == {"lab1:GPU0", "lab2:GPU0"}


# -- the page --------------------------------------------------------------------------------------


def page_of(report: Report) -> str:
    return html_page.page(report, "GPU-hours")


def test_the_page() -> None:
    """The page has both tables, and nothing that somebody else wrote is markup."""
    page = page_of(REPORT._replace(host=HOSTILE, problems={"lab3": HOSTILE}))
    assert page.count("<table") == 2
    assert "<b>=" not in page
    assert "&lt;b&gt;=" in page
    assert not re.search("(?:src|href)=|<script|http", page)


def luminance(colour: str) -> float:
    """Return the relative luminance, as https://www.w3.org/TR/WCAG21 defines it."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("background", ["#ffffff", "#0d1117"])
def test_bars_can_be_told_from_the_page(background: str) -> None:
    """Each colour of a bar has a contrast of 3:1 or more with the light and the dark page."""
    for colour in html.PIECES:
        low, high = sorted((luminance(colour), luminance(background)))
        assert (high + 0.05) / (low + 0.05) >= 3


@pytest.mark.full
@pytest.mark.needs("browser")
@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(tmp_path: Path, scheme: str) -> None:
    """A real browser shows the page without scrolling sideways, in the colours of its scheme."""
    from playwright.sync_api import sync_playwright

    path = tmp_path / "report.html"
    path.write_text(page_of(REPORT), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        for width in (340, 1000):
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": 600}
            )
            page = context.new_page()
            failed: list[object] = []
            page.on("pageerror", lambda error, seen=failed: seen.append(error))
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            text = page.evaluate("getComputedStyle(document.body).color")
            assert text == ("rgb(31, 35, 40)" if scheme == "light" else "rgb(230, 237, 243)")
            assert failed == []
        browser.close()


# -- the command line ------------------------------------------------------------------------------


def test_without_a_history(kept: Histories, typed: CommandLine, here: Here) -> None:
    """Where nothing is logged a plain sentence says what switches it on, in all formats."""
    shutil.rmtree(os.environ["RESERVE_GPU_HISTORY"])
    done = typed("report")
    assert (done.code, done.stderr) == (0, "")
    assert "No history is kept here." in typed("report", "--format", "html").stdout
    assert done.stdout.startswith("No history is kept here.\n")
    assert f"history = true in {here.home}/.config/reserve_gpu.toml" in done.stdout
    assert json.loads(typed("report", "--json").stdout)["is_kept"] is False
    assert here.calls() == []


def test_a_history_that_has_just_begun(kept: Histories, typed: CommandLine) -> None:
    """Where a history is switched on, and nothing is logged yet, nobody is told to switch it on."""
    assert typed("report").stdout.startswith("No GPU was reserved in the last 7 days.\n")


@pytest.mark.parametrize("form", ["text", "html"])
def test_the_first_report(kept: Histories, typed: CommandLine, form: str) -> None:
    """On the first minutes of a history nothing is summed up, and that is said; later it is."""
    now = time.time()
    new = line(since=now, start=now, end=now + 9, seconds=9.0, used_s=None, idle_s=None)
    kept.write([new])
    begun = "The history started recently, so there is little to report yet."
    text = typed("report", "--format", form).stdout
    assert begun in text
    assert not re.search(r"none of them|<0\.1|&lt;0\.1|>0\.0", text)
    for more in (line(start=now - 60, id="b1"), line(start=now - 40 * DAY_S, id="c1")):
        kept.write([new, more])
        text = typed("report", "--format", form).stdout
        assert begun not in text
        assert "GPU-hours" in text
        assert "none of them" not in text


def test_nothing_in_that_time(kept: Histories, typed: CommandLine) -> None:
    """A history without a line since then says that nothing was reserved."""
    kept.write([line()])
    text = typed("report", "--since", "1h").stdout
    assert text.startswith("No GPU was reserved in the last hour.\n")
    assert "switch" not in text.lower()


@pytest.mark.parametrize("by", ["user", "notebook", "gpu", "day"])
def test_by(kept: Histories, typed: CommandLine, by: str) -> None:
    """Rows are by user, notebook, GPU or day."""
    now = time.time()
    kept.write([line(start=now - 90)])
    done = typed("report", "--by", by)
    title = next(each for each in done.stdout.splitlines() if "reserved  used" in each)
    assert title.split()[0] == by.replace("gpu", "GPU")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--since soon", "'soon' is not a valid time"),
        ("--since tomorrow", "in the future"),
        ("--by gpus", "Invalid value 'gpus' for --by. Did you mean gpu?"),
        ("--format xml", "Invalid value 'xml' for --format. Choose from: text, json"),
        ("--sinse 7d", "Did you mean --since?"),
    ],
)
def test_mistakes(typed: CommandLine, words: str, said: str) -> None:
    """A mistake is one text on stderr and exit code 2."""
    done = typed("report", *words.split())
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(("has_total", "strong"), [(True, ["total", "3"]), (False, [])])
def test_the_total_stands_out(strong: list[str], *, has_total: bool) -> None:
    """The row that sums up the others is in strong letters, and no other is."""
    columns = Column("user", ("alice", "total")), Column("hours", ("1", "3"), is_figure=True)
    lines = rows(Sheet(columns, has_total=has_total), 40)
    styled = [part for line in lines for part in line if isinstance(part, tuple)]
    assert [text for text, style in styled if style == phrases.STRONG] == strong


@pytest.mark.process
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_terminal(kept: Histories, here: Here, columns: int) -> None:
    """On a terminal of that width it has colours, and no line is broken."""
    pexpect = pytest.importorskip("pexpect")
    now = time.time()
    for number in range(3):
        name = f"{'long/' * number}train.ipynb"
        kept.write([line(start=now - 60, id=name, name=name)])
    text, code = pexpect.run(
        f"{sys.executable} -m reserve_gpu report --by notebook", withexitstatus=True,
        env=here.environ(TERM="xterm", NO_COLOR="", RESERVE_GPU_HISTORY=str(kept.folder)),
        dimensions=(24, columns), encoding="utf-8",
    )  # fmt: skip
    assert code == 0, text
    assert "\x1b[1m3.0 GPU-hours reserved" in text
    assert "\x1b[32m\N{FULL BLOCK}" in text
    assert all(wcwidth.wcswidth(STYLED.sub("", each)) <= columns for each in text.split("\r\n"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Make two hosts with histories, an older one, and one that hangs."""
    folder = tmp_path_factory.mktemp("hosts")
    old = folder / "old"
    old.mkdir()
    (old / "reserve-gpu").write_text("#!/bin/sh\necho 'There is no command report.' >&2; exit 2\n")
    (old / "reserve-gpu").chmod(0o755)
    with Hosts(folder, "lab1", "lab2", "lab3", "lab4", paths={"lab3": f"{old}:/usr/bin"}) as lab:
        for number, name in enumerate(("lab1", "lab2"), 1):
            note_there(lab.machines[name], number)
        lab.freeze("lab4")
        yield lab


NOTE = """
import os, time
from reserve_gpu.log import log_writer, places
from reserve_gpu.log.log_lines import TEXT_LIMIT, Kind, LogLine
at = time.time() - 7200
log_writer.append(places.to_write(None), [
    LogLine(Kind.RESERVED, f"a{n}", at, at, at + 3600, 3600.0, 0.0, 3600.0, gpu="GPU-1",
            label="GPU0", name=f"lab{HOURS}.ipynb") for n in range(HOURS)])
"""


def note_there(machine: Machine, hours: int) -> None:
    """Let so many GPU-hours be logged on a host, in the home of who asks."""
    own = machine.home / ".config"
    own.mkdir(exist_ok=True)
    (own / "reserve_gpu.toml").write_text("history = true\n")
    name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', machine.folder.name]
    prefix = name if not os.geteuid() else []
    code = NOTE.replace("HOURS", str(hours))
    done = machine.command(*prefix, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@needs_ssh
@pytest.mark.xdist_group("hosts")
class TestOverSsh:
    """Real servers, each with a history of its own."""

    def ask(self, lab: Hosts, *words: str) -> CompletedProcess[str]:
        return lab.asking.command(sys.executable, "-m", "reserve_gpu", "report", *words)

    def test_hosts_are_one_report(self, lab: Hosts) -> None:
        """Hosts are summed up; each that does not answer is a line with a way out."""
        done = self.ask(lab, "--hosts", "lab[1-4]", "--by", "notebook")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("3.0 GPU-hours reserved in the last 7 days, 3.0 of them idle")
        assert "lab3: There is no command report" in done.stdout
        assert "lab4: no answer within 5 s. Try: ssh lab4" in done.stdout
        assert "lab1.ipynb" in done.stdout

    def test_gpus_have_the_name_of_their_host(self, lab: Hosts) -> None:
        """Each GPU is a row with the host's name, in JSON too, where problems are a list."""
        said = json.loads(
            self.ask(lab, "--json", "--by", "gpu", "--hosts", "lab1,lab2,lab3").stdout
        )
        rows = {row["name"]: row["reserved_hours"] for row in said["rows"]}
        assert rows == {"lab1:GPU0": 1, "lab2:GPU0": 2}
        assert [each["host"] for each in said["problems"]] == ["lab3"]
        assert said["longest_idle"][0]["gpus"] in (["lab1:GPU0"], ["lab2:GPU0"])

    def test_nobody_answers(self, lab: Hosts) -> None:
        """If no host answers, the exit code says so."""
        assert self.ask(lab, "--hosts", "lab3").returncode == 69
