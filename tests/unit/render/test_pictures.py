"""The layout of a table of GPUs: widths, columns, colors, and texts of other users."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from wcwidth import wcswidth

from reserve_gpu.model.devices import Device, Fault, Process, State
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request, ReservationTerms
from reserve_gpu.render import html, pictures, terminal
from reserve_gpu.render.frontends import SHELL
from tests.support.holders import a_holder, changed
from tests.support.pictures import (
    ALICE,
    EIGHT,
    IN_PARTS,
    LEFT_ALONE,
    NOW,
    PICTURES,
    device,
    free,
    held,
    idle,
    lines_at,
    refused,
    status,
    usage,
    with_part,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.render.pictures import Picture

BARS = re.compile("[\u2588\u2592\u2591]+")
COLORS = re.compile(r"\x1b\[[0-9;]*m")
EACH_PICTURE = pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)

# -- widths ----------------------------------------------------------------------------------------


def test_commands_are_never_broken() -> None:
    note = "until Friday evening, if no other user has to have it before"
    request = Request(count=2, terms=ReservationTerms(note=note))
    picture = refused(LEFT_ALONE, request=request, frontend=SHELL)
    lines = terminal.lines(picture.layout, 24, is_colored=False, breaks_commands=False)
    assert f"reserve-gpu run -n 2 --note '{note}' --wait -- COMMAND ..." in lines


@EACH_PICTURE
def test_no_line_is_empty_or_wider_than_the_terminal(picture: Picture) -> None:
    for width in (24, 60, 81, 120, 200):
        lines = lines_at(picture, width)
        assert max(map(wcswidth, lines)) <= width
        assert all(lines)


def columns(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that are shown, most important first."""
    titles = next(line for line in lines if line.startswith("GPU ")).split()
    shown = {*titles, *(["bars"] if BARS.search("".join(lines)) else [])}
    return tuple(each for each in ("memory", "util", "bars", "temp") if each in shown)


def test_columns_are_left_out_in_order() -> None:
    """Narrow terminals lose the temperature first and the memory last, but never the state."""
    every = ("memory", "util", "bars", "temp")
    widths = (200, 120, 118, *range(110, 19, -3))
    shown = {width: columns(lines_at(status(*EIGHT), width)) for width in widths}
    assert list(dict.fromkeys(shown.values())) == [every[:count] for count in (4, 3, 2, 1, 0)]
    assert (shown[120], shown[118]) == (every, every[:3])
    for width in (20, 60):
        lines = lines_at(status(*EIGHT), width)
        assert sum(" reserved " in f"{line} " for line in lines) == 6


def test_similar_free_gpus_share_a_line_on_large_machines() -> None:
    rows = [free(index)._replace(utilisation=0) for index in range(64)]
    rows[5] = held(5, "alice")

    def numbers(*rows: DeviceStatus, is_all: bool = False) -> list[str]:
        lines = str(status(*rows, is_all=is_all)).splitlines()[2:-1]
        return [line.split()[0] for line in lines]

    assert numbers(*rows) == ["0-4", "5", "6-63"]
    assert len(numbers(*rows[:16])) == 16
    assert numbers(*rows[:17]) == ["0-4", "5", "6-16"]
    assert len(numbers(*rows, is_all=True)) == 64
    rows[8] = rows[8]._replace(state=State.BROKEN)  # only two GPUs are free between two others
    assert numbers(*rows) == ["0-4", "5", "6", "7", "8", "9-63"]


def test_bars_shrink_to_let_holders_fit() -> None:
    """Bars get shorter, and then disappear, if holders then fit next to their GPU."""
    picture = status(held(1, "alice")._replace(temperature_c=None, power_w=None))
    who = "  alice, train.ipynb (pid 4001) for 1 h"
    full = len(str(picture).splitlines()[2])
    for width in range(full - 20, full + 5):
        line = lines_at(picture, width)[2]
        has_bar = width >= full - len("###") or width < full - len("######  ")
        assert bool(BARS.search(line)) is has_bar
        assert line.endswith(who) is (width >= full - len("######  "))
    # A holder that never fits does not change this.
    other = held(2, "bob", note="a long story " * 6)._replace(device=device(2, "another"))
    other = other._replace(temperature_c=None, power_w=None)
    first = held(1, "alice")._replace(temperature_c=None, power_w=None)
    assert lines_at(status(first, other), full - 1)[2] == lines_at(status(first), full - 1)[2]


@pytest.mark.parametrize(
    "name",
    ["\N{CJK UNIFIED IDEOGRAPH-6771}" * 8, "e\N{COMBINING ACUTE ACCENT}" * 8],
    ids=["wide", "combining"],
)
@pytest.mark.parametrize("width", [24, 120])
def test_wide_and_combining_letters_keep_columns_straight(name: str, width: int) -> None:
    lines = lines_at(status(free(0), free(1, name), free(2)), width)
    table = [line for line in lines if line.startswith(("GPU ", "0 ", "1 ", "2 "))]
    assert len(table) == 4
    if width > 24:
        assert len({wcswidth(line[: line.index("GiB")]) for line in table[1:]}) == 1
        assert name in table[2]
    assert max(map(wcswidth, table)) <= width


# -- colors ----------------------------------------------------------------------------------------


@EACH_PICTURE
def test_colors_change_no_letter_and_end_with_the_line(picture: Picture) -> None:
    assert "\x1b" not in str(picture)
    for width in (80, 4000):
        colored = terminal.lines(picture.layout, width, is_colored=True)
        assert [COLORS.sub("", line) for line in colored] == lines_at(picture, width)
        assert "\x1b[" in colored[0]
        for line in colored:
            marks = COLORS.findall(line)
            assert all(mark == "\x1b[0m" for mark in marks[1::2])
            assert "\x1b[0m" not in marks[::2]
            assert len(marks) % 2 == 0


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used_mib", "promisable_mib", "expected"),
    [
        (40960, 13653.0, "###==."),
        (40960, 40960.0, "###..."),
        (0, 0.0, "======"),
        (40960, 1e9, "###..."),  # more than the GPU has
    ],
)
def test_bar_of_a_shared_gpu(used_mib: float, promisable_mib: float, expected: str) -> None:
    """A bar shows the memory in use, the rest of what is reserved, and what is left."""
    row = IN_PARTS._replace(usage=usage(used_mib), promisable_mib=promisable_mib)
    (bar,) = BARS.findall(str(status(row)))
    assert bar.translate(str.maketrans("\u2588\u2592\u2591", "#=.")) == expected


# -- holders ---------------------------------------------------------------------------------------


def test_own_row_stands_out() -> None:
    own, other = held(0, "alice")._replace(is_mine=True), held(1, "alice")
    picture = status(own, other)
    assert [line.count("this kernel: ") for line in str(picture).splitlines()[3:]] == [1, 0]
    first, second = re.findall("<tr style.*?</tr>", picture._repr_html_())[1:]
    assert html.OWN_ROW in first
    assert html.OWN_ROW not in second
    first, second = terminal.lines(picture.layout, 120, is_colored=True)[3:]
    assert first.startswith("\x1b[1m0\x1b[0m")
    assert second.startswith("1 ")


@pytest.mark.parametrize(
    ("seconds", "others", "own"),
    [(59, "idle", None), (60, "idle for 1 min", None), (599, "idle for 9 min", None),
     (600, "idle for 10 min", "idle for 10 min")],
)  # fmt: skip
def test_own_gpu_is_called_idle_after_ten_minutes(
    seconds: float, others: str, own: str | None
) -> None:
    row = held(1, "alice")._replace(is_unused=True)
    row = row._replace(holders=(row.holders[0]._replace(last_cell=NOW - seconds),))
    assert f"(pid 4001) for 1 h, {others}\n" in str(status(row))
    end = f", {own}" if own else ""
    assert str(status(row._replace(is_mine=True))).endswith(f"(pid 4001) for 1 h{end}")


@pytest.mark.parametrize(("seconds", "is_used"), [(59, False), (60, True)])
def test_first_cell_that_ends_within_a_minute_does_not_count_as_use(
    seconds: float, *, is_used: bool
) -> None:
    row = held(1, "alice")._replace(is_unused=True)
    (holder,) = row.holders
    row = row._replace(holders=(holder._replace(last_cell=(holder.since or 0.0) + seconds),))
    assert ("never used" in str(status(row))) is not is_used


@pytest.mark.parametrize(
    ("since", "last_cell", "expected"),
    [
        (NOW - 60, None, "idle"),  # a script might have used the GPU earlier
        (None, NOW - 3600, "idle for 1 h"),
        (None, None, "idle"),
    ],
)
def test_idle_time_is_known_from_the_last_cell(
    since: float | None, last_cell: float | None, expected: str
) -> None:
    row = idle(device(0), ALICE, since=since, cell=last_cell)
    assert f", {expected}\n" in str(status(row))
    shared = row._replace(holders=row.holders * 2)
    assert str(status(shared)).count(", idle\n") == 2  # which of both used it is unknown


# -- texts of other users --------------------------------------------------------------------------

HOSTILE = (
    "<script>alert(1)</script>&amp;\x1b[31m\r\n0    free\u202e\u2066\x9b1m\N{HEBREW LETTER ALEF}"
)
FOREIGN = HOSTILE + "x" * 5000
HOLDER = changed(
    a_holder(1, FOREIGN, FOREIGN, since=NOW, label=FOREIGN, command=FOREIGN, cwd=FOREIGN),
    note=FOREIGN,
)
PROCESS = Process(5, 300, FOREIGN, FOREIGN, has_reserved=False)
GPU = Device(0, "GPU-0", FOREIGN, FOREIGN, 81920, FOREIGN)
ROWS = (
    *(
        DeviceStatus(
            GPU, state, usage(300), None, (PROCESS,) * 2, (HOLDER,) * 2, reason, awaited_by=HOLDER
        )
        for state in State
        for reason in (None, FOREIGN)
    ),
    DeviceStatus(GPU, State.FREE, usage(0), awaited_by=HOLDER),
    DeviceStatus(GPU, State.UNKNOWN, background=(PROCESS._replace(memory_mib=9000),)),
    DeviceStatus(Fault(1, FOREIGN), State.BROKEN, holders=(HOLDER,), reason=FOREIGN),
    DeviceStatus(
        GPU, State.FULL, usage(300), holders=(with_part(HOLDER, 1e9, 1e9 + 1), HOLDER) * 9,
        promisable_mib=0.5,
    ),
)  # fmt: skip
NOTE = Request(model=FOREIGN, terms=ReservationTerms(note=HOSTILE))
HOSTILE_PICTURES = {
    "status": status(
        *ROWS, waiting=(Ticket(1, FOREIGN, None, HOLDER, FOREIGN),),
        problem=FOREIGN, host=FOREIGN, limit=FOREIGN,
    ),
    "refusal": refused(*ROWS, request=NOTE, limit=FOREIGN),
    "wait": pictures.wait(Waiting(NOTE, 1, 0.0, ROWS)),
}  # fmt: skip


@pytest.mark.parametrize("picture", HOSTILE_PICTURES.values(), ids=HOSTILE_PICTURES)
def test_texts_of_others_stay_text(picture: Picture) -> None:
    """Texts of other users are bounded, and contain no markup, line break or escape sequence."""
    page, plain = picture._repr_html_(), str(picture)
    colored = "\n".join(terminal.lines(picture.layout, 120, is_colored=True))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<script>" in plain
    for text in (page, plain, picture.brief, COLORS.sub("", colored)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        assert "x" * 301 not in text
        assert not re.search(r"^0    free$", text, re.MULTILINE)
    assert all(len(line) < 800 for line in plain.splitlines())
    assert "\n" not in picture.brief
    assert all(wcswidth(COLORS.sub("", line)) <= 120 for line in colored.splitlines())
    for letters in re.findall("[^<>]*\N{HEBREW LETTER ALEF}[^<>]*", page):
        assert f"<bdi>{letters}</bdi>" in page
