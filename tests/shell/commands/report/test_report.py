"""`reserve-gpu report`: what is read of histories, what it sums up to, and how it is shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.commands.report import totals
from reserve_gpu.commands.report.totals import Hours, Idle
from reserve_gpu.commands.report.usage_view import Report
from reserve_gpu.log import log_reader as histories_of
from reserve_gpu.log.log_lines import TEXT_LIMIT, Kind, LogLine
from reserve_gpu.model.requests import End
from reserve_gpu.system import procfs
from tests.support.histories import (
    DAY_S,
    HOUR_S,
    Histories,
    month_file,
    write_year,
    year,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

from tests.support.report import ROWS, intended, line, notebook_of, rounded, sums, total

AT = 1761300000 - 1761300000 % HOUR_S  # 2025-10-24, at the beginning of an hour
NOW = AT + 30 * DAY_S


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


# -- since when ------------------------------------------------------------------------------------

TUESDAY = time.mktime((2026, 11, 24, 16, 15, 30, 0, 0, -1))


# -- how it is shown -------------------------------------------------------------------------------

HOSTILE = "\x1b[31m<b>=1\u202e\n" * 20
DAYS = {"2026-11-18": Hours(40, 20, 15, 0.5, 1.25), "2026-11-21": Hours(25.52, 11, 13)}
IDLE = (
    Idle("alice", "train.ipynb", ("GPU0", "GPU1", "GPU2"), TUESDAY - DAY_S, 22.0),
    Idle(HOSTILE, HOSTILE, (HOSTILE,), TUESDAY - 9 * DAY_S, 9.0),
)
REPORT = Report("user", ROWS, DAYS, IDLE, TUESDAY - 7 * DAY_S, TUESDAY, 7.0 * DAY_S, "gpu-box")


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


def test_two_gpus_of_one_name(kept: Histories, typed: CommandLine) -> None:
    """Two GPUs that were called GPU0 one after the other are two rows."""
    now = time.time()
    for uuid in ("GPU-11111111-x", "GPU-22222222-x"):
        kept.write([line(start=now - 60, gpu=uuid, id=uuid)])
    rows = json.loads(typed("report", "--json", "--by", "gpu").stdout)["rows"]
    assert [row["name"] for row in rows] == ["GPU0 GPU-11111111", "GPU0 GPU-22222222"]


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
