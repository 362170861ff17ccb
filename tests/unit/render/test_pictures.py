"""The one picture: how it looks in a terminal, as plain text and in a notebook."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from wcwidth import wcswidth

from reserve_gpu.model.devices import Device, Fault, Process, State
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request, ReservationTerms, Size
from reserve_gpu.render import html, pictures, terminal
from reserve_gpu.render.frontends import MAGIC, SHELL
from reserve_gpu.render.notices import Refused
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder, changed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.render.pictures import Picture

from tests.support.pictures import NOW, device, free, held, usage

BARS = re.compile("[\u2588\u2592\u2591]+")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def status(*rows: DeviceStatus, waiting: tuple[Ticket, ...] = (), **about: object) -> Picture:
    fields = {"time": NOW, "host": "dgx", "frontend": MAGIC, **about}
    return Status(rows, waiting, **fields).picture()  # type: ignore[arg-type]


def at(picture: Picture, width: int) -> list[str]:
    return terminal.lines(picture.layout, width, is_colored=False)


def part(holder: Holder, memory_limit_mib: float | None, used_mib: float | None) -> Holder:
    """Return the same holder as one who shares the device."""
    size = None if memory_limit_mib is None else Size(memory_limit_mib)
    return changed(holder, terms=holder.record.terms._replace(size=size), used_mib=used_mib)


# Six of eight GPUs are reserved, one is used without a reservation.
EIGHT = (
    held(0, "alice", "python train.py"),
    held(1, "bob")._replace(is_unused=True),
    held(2, "carol", "sweep.ipynb", "until Friday"),
    *(held(index, "dave", "python train.py") for index in (3, 4, 5)),
    free(6),
    DeviceStatus(
        device(7),
        State.BUSY,
        usage(70000),
        99,
        (Process(77, 70000, "mallory", "python", has_reserved=False),),
        is_unreserved_use=True,
    ),
)
# What takes more room: instances, what is lost, a queue, long notes, two who share.
PART = Device(8, "MIG-1", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", memory_mib=9728, instance=3)
ODD = (
    held(0, "alice", note="a very long story, told in so many words that no line has room for it"),
    held(1, "bob")._replace(holders=(*held(1, "bob").holders, *held(2, "carol").holders)),
    DeviceStatus(PART, State.FREE, usage(0)),
    DeviceStatus(Fault(9, "x"), State.DENIED, reason="the driver does not let this user use it"),
    DeviceStatus(Fault(10, "x"), State.EMPTY, reason="MIG is on, but the GPU has no MIG instances"),
    free(11, "NVIDIA Quadro RTX 8000 with Max-Q Design"),
)
TICKET = Ticket(
    1, "queue-1-0.lock", None, a_holder(99, "erin", since=NOW - 720), "2 GPUs of 16 GiB"
)
# One who uses more than was promised, one whose use can't be seen; and one GPU that is full.
SHARERS = (
    part(held(1, "alice", note="until Friday").holders[0], 10240.0, 12390.4),
    part(held(2, "bob").holders[0], 30720.0, None),
)
IN_PARTS = held(1, "alice")._replace(holders=SHARERS, promisable_mib=38000.0)
FULL = DeviceStatus(
    device(1), State.FULL, usage(12390)._replace(compute=1), holders=SHARERS, promisable_mib=6000.0
)
LEFT_ALONE = DeviceStatus(
    device(0), State.RESERVED, usage(0), holders=held(0, "alice").holders, is_unused=True
)
TEN_GB = Request(terms=ReservationTerms(Size(1e10 / 2**20, "GB")))
PICTURES = {
    "eight": status(*EIGHT),
    "parts": status(held(0, "carol"), IN_PARTS),
    "full": pictures.refusal(Refused(TEN_GB, [FULL, FULL._replace(device=device(2))]), MAGIC),
    "wait for a part": pictures.wait(Waiting(TEN_GB, 2, 61.0, (FULL,))),
    "odd": status(*ODD, waiting=(TICKET,), problem="the lock directory can't be read by you"),
    "refusal": pictures.refusal(
        Refused(
            Request(count=2, terms=ReservationTerms(note="a b")),
            [
                LEFT_ALONE,
                DeviceStatus(
                    device(1), State.AWAITED, usage(0), awaited_by=held(1, "bob").holders[0]
                ),
                DeviceStatus(device(2), State.FREE, usage(0), would_be_taken=True),
            ],
        ),
        SHELL,
    ),
    "wait": pictures.wait(Waiting(Request(), 3, 61.0, (LEFT_ALONE,), 600.0)),
}

# -- widths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [24, 40, 80])
def test_a_command_is_never_broken(width: int) -> None:
    """What can be typed stands in one piece, whatever has no room beside it."""
    note = "until Friday evening, if nobody else has to have it before"
    request = Request(count=2, terms=ReservationTerms(note=note))
    picture = pictures.refusal(Refused(request, [LEFT_ALONE]), SHELL)
    shown = terminal.lines(picture.layout, width, is_colored=False, breaks_commands=False)
    assert f"reserve-gpu run -n 2 --note '{note}' --wait -- COMMAND ..." in shown


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES.keys())
def test_no_line_is_wider_than_the_terminal(picture: Picture) -> None:
    """At every width each line has room, and none is empty."""
    for width in [24, 40, 60, 80, 81, 100, 120, 160, 200]:
        lines = at(picture, width)
        assert max(map(wcswidth, lines)) <= width
        assert all(lines)


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES.keys())
def test_no_word_is_broken(picture: Picture) -> None:
    """From 80 columns on what is said is said in the same whole words as in plain text."""
    for width in [80, 81, 100, 120, 160, 200]:
        words = iter(str(picture).split())
        for word in BARS.sub("", " ".join(at(picture, width))).split():
            assert word in words


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES.keys())
def test_what_is_said_of_people_is_never_left_out(picture: Picture) -> None:
    """Whatever the width, only columns are left out: no word of the head, of people, of advice."""
    for width in range(70, 201, 5):
        text = iter(" ".join(at(picture, width)).split())
        entries = [line for entry in picture.layout.entries for line in (entry.who, *entry.more)]
        for line in (*picture.layout.head, *entries, *picture.layout.queue, *picture.layout.foot):
            for word in "".join(
                part if isinstance(part, str) else part[0] for part in line
            ).split():
                assert word in text


def columns(lines: Sequence[str]) -> list[str]:
    """Return the columns that have room, those that are worth most first."""
    titles = next(line for line in lines if line.startswith("GPU ")).split()
    there = {*titles, *(["bars"] if BARS.search("".join(lines)) else [])}
    return [column for column in ("memory", "util", "bars", "temp") if column in there]


def test_which_columns_are_left_out_first() -> None:
    """The temperature goes first, then the bars, then util, then the memory; the state never."""
    found = [columns(at(status(*EIGHT), width)) for width in range(200, 19, -1)]
    assert list(dict.fromkeys(map(tuple, found))) == [
        ("memory", "util", "bars", "temp"),
        ("memory", "util", "bars"),
        ("memory", "util"),
        ("memory",),
        (),
    ]
    for width in range(20, 201, 20):
        assert sum(" reserved " in f"{line} " for line in at(status(*EIGHT), width)) == 6


def test_temperatures_are_for_wide_terminals() -> None:
    """Temperature and power stand in terminals of 120 columns, where people leave room for them."""
    assert "31 \N{DEGREE SIGN}C   55 W" in "".join(at(status(free(1)), 120))
    assert "31 \N{DEGREE SIGN}C" not in "".join(at(status(free(1)), 118))
    assert "temp" in columns(at(status(*EIGHT), 200))
    assert "temp" in columns(at(status(*EIGHT), 120))
    assert "temp" not in columns(at(status(*EIGHT), 118))


def test_bars_use_the_width() -> None:
    """Where the line has room, there is a bar for the load, too, and both grow with the width."""
    row = free(1)._replace(utilisation=70, temperature_c=None, power_w=None)
    lengths = {w: [*map(len, BARS.findall(at(status(row), w)[2]))] for w in range(40, 121)}
    assert [*dict.fromkeys(map(len, lengths.values()))] == [0, 1, 2]
    assert lengths[120] == [20, 20]
    load = BARS.findall(at(status(row), 120)[2])[1]
    assert load == "\N{FULL BLOCK}" * 14 + "\N{LIGHT SHADE}" * 6
    assert [*map(len, BARS.findall(str(status(row))))] == [6]  # a file has no width


@pytest.mark.parametrize(("percent", "colour"), [(0, "32"), (49, "32"), (50, "33"), (90, "31")])
def test_bars_have_the_colour_of_the_load(percent: int, colour: str) -> None:
    """What is in use is green, from a half on yellow, from nine tenths on red."""
    row = DeviceStatus(device(0), State.BUSY, usage(81920 * percent / 100), percent)
    (line,) = terminal.lines(status(row).layout, 140, is_colored=True)[2:3]
    codes = re.findall("\x1b\\[(3\\d)m\N{FULL BLOCK}", line)
    assert codes == ([colour] * 2 if percent else [])


def test_a_name_that_all_share_is_in_the_head() -> None:
    """The model stands once where all GPUs are of one, and beside each where they differ."""
    alike: tuple[DeviceStatus, ...] = (free(0), free(1))
    lost = DeviceStatus(Fault(2, "GPU is lost"), State.BROKEN)
    for rows, rest in ((alike, ""), ((*alike, lost), " and 1 that can't be read")):
        first, titles, *lines = str(status(*rows)).splitlines()
        assert first.endswith(f", 2 x A100-SXM4-80GB{rest}")
        assert "name" not in titles
        assert not any("A100" in line for line in lines)
    assert "<th" in status(*alike)._repr_html_()
    assert ">name</th>" not in status(*alike)._repr_html_()
    others = (free(1, "T4"), DeviceStatus(PART, State.FREE))
    for rows in ((free(0),), *((free(0), other) for other in others)):
        first, titles, *_ = str(status(*rows)).splitlines()
        assert " x " not in first
        assert "name" in titles


def test_many_that_are_free_have_one_line() -> None:
    """On a machine of many GPUs those in a row that are free and alike are one line."""
    rows = [free(index)._replace(utilisation=0) for index in range(64)]
    rows[5] = held(5, "alice")
    lines = str(status(*rows)).splitlines()
    assert [line.split()[:2] for line in lines[2:-1]] == [
        ["0-4", "free"], ["5", "reserved"], ["6-63", "free"],
    ]  # fmt: skip
    for few in (status(*rows[:16]), status(*rows, is_all=True)):
        assert [line.split()[0] for line in str(few).splitlines()[2:8]] == [*"012345"]
    rows[7] = rows[7]._replace(state=State.BROKEN)  # so that only one is free between two others
    assert [line.split()[0] for line in str(status(*rows)).splitlines()[3:6]] == ["5", "6", "7"]


def test_bars_make_room_for_people() -> None:
    """Bars get shorter, and then disappear, if holders then fit next to their GPU."""
    picture = status(held(1, "alice")._replace(temperature_c=None, power_w=None))
    who = "  alice, train.ipynb (pid 4001) for 1 h"
    full = len(str(picture).splitlines()[2])
    for width in range(full - 20, full + 5):
        line = at(picture, width)[2]
        has_bar = width >= full - len("###") or width < full - len("######  ")
        assert bool(BARS.search(line)) is has_bar
        assert line.endswith(who) is (width >= full - len("######  "))


def test_one_long_story_does_not_move_the_others() -> None:
    """Bars get shorter for holders that then fit, even if another holder never fits."""
    first, second = held(1, "alice"), held(2, "bob", note="a long story " * 6)
    first = first._replace(temperature_c=None, power_w=None)
    second = second._replace(device=device(2, "another"), temperature_c=None, power_w=None)
    full = len(str(status(first)).splitlines()[2])
    line = at(status(first), full - 1)[2]
    assert re.findall(BARS, line) == ["\u2588\u2588\u2588\u2591\u2591"]
    assert at(status(first, second), full - 1)[2] == line


@pytest.mark.parametrize("width", range(60, 200, 7))
def test_people_stand_below_only_where_they_must(width: int) -> None:
    """Who has a GPU stands on its line unless that would be too long; then below it, indented."""
    lines = at(status(*EIGHT), width)
    for line, below in pairwise(lines):
        if re.match(r"\d", line) and below.startswith("     "):
            table = max(len(row) for row in lines[1:] if re.match(r"[0-9] .* %$", row))
            assert table + 2 + len(below.strip()) > width


def test_eight_gpus_take_at_most_twelve_rows() -> None:
    """At 120 columns a machine of eight GPUs, six of them reserved, fits in twelve rows."""
    for first in (EIGHT[0], EIGHT[0]._replace(is_mine=True)):
        lines = at(status(first, *EIGHT[1:]), 120)
        assert len(lines) <= 12
        assert max(map(len, lines)) <= 120
        assert all(line[0] != " " for line in lines)


def test_a_word_without_room_is_broken_not_lost() -> None:
    """A word that is wider than the terminal goes on in the next line, all of it."""
    note = "z" * 70
    text = "".join(line.strip() for line in at(status(held(1, "alice", note=note)), 50))
    assert text.count("z") == 70


@pytest.mark.parametrize(
    "name",
    ["\N{CJK UNIFIED IDEOGRAPH-6771}" * 8, "e\N{COMBINING ACUTE ACCENT}" * 8, "\u0e01\u0e31" * 8],
    ids=["wide", "combining", "Thai"],
)
@pytest.mark.parametrize("width", [24, 80, 120, 4000])
def test_columns_stay_straight(name: str, width: int) -> None:
    """Letters of two columns, and those of none, move no column."""
    lines = at(status(free(0), free(1, name), free(2)), width)
    table = [line for line in lines if line.startswith(("GPU ", "0 ", "1 ", "2 "))]
    assert len(table) == 4
    if width > 24:
        ends = {wcswidth(line[: line.index("GiB")]) for line in table[1:]}
        assert len(ends) == 1
        assert name in table[2]
    assert max(map(wcswidth, table)) <= width


def test_what_is_lost_has_no_empty_columns() -> None:
    """Where nothing is known but the state, there are no columns for the rest."""
    lost = DeviceStatus(Fault(0, "GPU is lost"), State.BROKEN, reason="GPU is lost")
    assert at(status(lost), 80)[1:3] == ["GPU  state   who", "0    broken  GPU is lost"]


# -- colours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES.keys())
def test_colours_are_only_where_they_are_asked_for(picture: Picture) -> None:
    """Plain text has no escape sequences; colours change no letter, and none runs over a line."""
    assert "\x1b" not in str(picture)
    for width in (80, 120, 4000):
        coloured = terminal.lines(picture.layout, width, is_colored=True)
        assert [COLOURS.sub("", line) for line in coloured] == at(picture, width)
        assert "\x1b[" in coloured[0]
        for line in coloured:
            marks = COLOURS.findall(line)
            assert all(mark == "\x1b[0m" for mark in marks[1::2])
            assert "\x1b[0m" not in marks[::2]
            assert len(marks) % 2 == 0


SHOWN_STATES = [state for state in State if state is not State.IDLE]


@pytest.mark.parametrize("state", SHOWN_STATES, ids=str)
def test_each_state_has_its_word(state: State) -> None:
    """A state is a word in every rendering, so its colour is never the only sign."""
    picture = status(DeviceStatus(device(0), state, usage(0)))
    for text in (str(picture), "\n".join(at(picture, 80))):
        assert re.search(rf"^0 +{state.value}( |$)", text, re.MULTILINE)
    assert f">{state.value}</b>" in picture._repr_html_()
    coloured = terminal.lines(picture.layout, 80, is_colored=True)[2]
    assert re.search(rf"\x1b\[1;3\dm{state.value}\x1b\[0m", coloured)


def test_free_reserved_and_busy_differ() -> None:
    """The states that decide have colours of their own, in a terminal and in a notebook."""
    states = (State.FREE, State.RESERVED, State.BUSY, State.UNKNOWN)
    rows = [status(DeviceStatus(device(0), state, usage(0))) for state in states]
    codes = [
        re.findall(r"\x1b\[1;3\dm", terminal.lines(row.layout, 80, is_colored=True)[2])[0]
        for row in rows
    ]
    badges = [re.findall("background-color:(#[0-9a-f]{6})", row._repr_html_())[0] for row in rows]
    assert len(set(codes)) == len(set(badges)) == 4


def luminance(colour: Sequence[float]) -> float:
    """Return the relative luminance of a colour in sRGB, 0 to 255.

    https://www.w3.org/TR/WCAG21/#dfn-relative-luminance
    """
    red, green, blue = (
        part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4
        for part in colour
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the contrast, as in https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


WHITE, BLACK = (255, 255, 255), (17, 17, 17)  # of JupyterLab's light and dark theme


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


@pytest.mark.parametrize("colour", sorted({*html.BACKGROUNDS.values(), html.OTHER_BACKGROUND}))
def test_states_can_be_read(colour: str) -> None:
    """White on a state's colour has a contrast of 4.5:1; the colour is seen on white and black.

    https://www.w3.org/TR/WCAG21/#contrast-minimum and #non-text-contrast
    """
    assert contrast(rgb(colour), WHITE) >= 4.5
    assert contrast(rgb(colour), BLACK) >= 3


def test_the_own_row_can_be_read() -> None:
    """What is one's own has a background on which the text of both themes keeps its contrast."""
    found = re.search(r"rgba\((\d+),(\d+),(\d+),([0-9.]+)\)", html.OWN_ROW)
    assert found
    *colour, share = map(float, found.groups())
    for page, letters in ((WHITE, (33, 33, 33)), (BLACK, (224, 224, 224))):
        row = [share * part + (1 - share) * under for part, under in zip(colour, page, strict=True)]
        assert contrast(row, letters) >= 7
        assert contrast(row, page) > 1.1  # it is seen


# -- parts -----------------------------------------------------------------------------------------


def test_a_gpu_in_parts() -> None:
    """Each sharer's promise stands there with its use, and below them what is left to promise."""
    lines = at(status(held(0, "carol"), IN_PARTS), 200)
    assert lines[3].endswith(
        'alice, train.ipynb (pid 4001) 12.1 of 10.0 GiB: over, for 1 h: "until Friday"'
    )
    assert lines[4:6] == [
        "     bob, train.ipynb (pid 4002) up to 30.0 GiB for 2 h",
        "     37.1 GiB still available",
    ]
    assert "GiB can still" not in lines[2]


def test_who_is_over_stands_out() -> None:
    """That somebody uses more than was promised is marked as what people argue about."""
    picture = PICTURES["parts"]
    (over,) = re.findall(r'style="([^"]*)">over<', picture._repr_html_())
    assert over == html.STYLES["mark"]
    assert "\x1b[1;36mover\x1b[0m" in "".join(terminal.lines(picture.layout, 120, is_colored=True))
    good = part(SHARERS[0], 10240.0, 10240.0)
    assert "over" not in str(status(IN_PARTS._replace(holders=(good,))))


@pytest.mark.parametrize(
    ("used_mib", "promisable_mib", "expected"),
    [
        (0, 81920.0, "......"),
        (0, 68266.0, "=....."),
        (40960, 13653.0, "###==."),
        (40960, 40960.0, "###..."),
        (100, 40960.0, "#==..."),
        (81920, 0.0, "######"),
        (0, 0.0, "======"),
        (40960, 1e9, "###..."),  # what makes no sense
    ],
)
def test_bars_show_what_is_promised(used_mib: float, promisable_mib: float, expected: str) -> None:
    """A bar has a letter each for what is used, what is promised besides, and what is left."""
    row = IN_PARTS._replace(usage=usage(used_mib), promisable_mib=promisable_mib)
    (bar,) = BARS.findall(str(status(row)))
    assert bar.translate(str.maketrans("\u2588\u2592\u2591", "#=.")) == expected


def test_bars_without_what_the_driver_keeps() -> None:
    """The driver's own reserve is neither promised nor in use, so no bar has it."""
    mine = device(1)._replace(reserve_mib=20480)
    (bar,) = BARS.findall(
        str(status(IN_PARTS._replace(device=mine, usage=usage(0), promisable_mib=61440)))
    )
    assert bar == "\N{LIGHT SHADE}" * 6


def test_bars_of_whole_gpus_show_what_is_used() -> None:
    """Where nobody has a part nothing is said to be promised, in no rendering."""
    rows = held(0, "alice")._replace(promisable_mib=0.0), free(1)._replace(promisable_mib=81920.0)
    picture = status(*rows)
    assert "\N{MEDIUM SHADE}" not in str(picture)
    assert "promise" not in str(picture) + picture._repr_html_()


def test_bars_in_a_notebook() -> None:
    """A GPU in parts has a second bar that counts what is promised, and says so."""
    page = status(IN_PARTS)._repr_html_()
    values = map(float, re.findall('<meter [^>]* value="([0-9.]+)"', page))
    assert list(values) == pytest.approx([41000 / 81920, 1 - 38000 / 81920], abs=0.001)
    assert re.search("</meter> <[^>]*>promised<", page)


def test_what_is_full_says_who_has_what() -> None:
    """A refusal tells who has how much, each in their own unit, what is left, and what to type."""
    lines = at(PICTURES["full"], 200)
    assert lines[0].startswith("No GPU has room for 9.3 GiB: the most is 5.8 GiB on GPU1.  ")
    assert lines[1:3] == [
        "Wait in the queue: %reserve_gpu --memory 10GB --wait",
        "5.8 GiB is available now: %reserve_gpu --memory 5.8GiB",
    ]
    assert re.search("^1 +full .* alice, .* 12.1 of 10.0 GiB: over, for", lines[5])
    assert " up to 30.0 GiB for" in lines[6]
    assert lines[7] == "     5.8 GiB still available"


# -- what stands out -------------------------------------------------------------------------------


def test_the_own_row_stands_out() -> None:
    """This process' own GPU is set off in every rendering, in plain text by words."""
    own, other = held(0, "alice")._replace(is_mine=True), held(1, "alice")
    picture = status(own, other)
    assert [line.count("this kernel: ") for line in str(picture).splitlines()[3:]] == [1, 0]
    first, second = re.findall("<tr style.*?</tr>", picture._repr_html_())[1:]
    assert html.OWN_ROW in first
    assert html.OWN_ROW not in second
    first, second = terminal.lines(picture.layout, 120, is_colored=True)[3:]
    assert first.startswith("\x1b[1m0\x1b[0m")
    assert second.startswith("1 ")


@pytest.mark.parametrize(("minutes", "is_said_to_me"), [(1, False), (9, False), (10, True)])
def test_idle_is_said_of_others_at_once(minutes: int, *, is_said_to_me: bool) -> None:
    """That nothing runs on a GPU is said of others at once, to oneself after ten minutes."""
    row = held(1, "alice")._replace(is_unused=True)
    row = row._replace(holders=(row.holders[0]._replace(last_cell=NOW - 60 * minutes),))
    idle = f", idle for {minutes} min"
    assert f"(pid 4001) for 1 h{idle}\n" in str(status(row))
    expected = idle if is_said_to_me else ""
    assert str(status(row._replace(is_mine=True))).endswith(f"(pid 4001) for 1 h{expected}")


def test_a_holder_is_said_once() -> None:
    """What a holder runs on the GPU is the holder's: neither is said twice."""
    own = Process(4001, 41000, "alice", "python", has_reserved=True)
    text = str(status(held(1, "alice")._replace(processes=(own,))))
    assert text.count("4001") == text.count("alice") == 1


def test_names_are_short() -> None:
    """The maker's name is left out, and of an instance what stands above it."""
    text = str(status(free(0), DeviceStatus(PART, State.FREE, usage(0))))
    assert "NVIDIA" not in text
    assert re.search(r"^8 +A100-SXM4-80GB +split by MIG$", text, re.MULTILINE)
    assert re.search(r"^  8:3 +free +1g\.10gb ", text, re.MULTILINE)


def test_the_order_of_the_ways_out() -> None:
    """First whom to ask, the longest idle first; then the queue; then the smaller request."""
    ask, wait, less = str(PICTURES["refusal"]).splitlines()[1:4]
    assert re.fullmatch(r"Ask alice \(train\.ipynb\) for GPU0, idle for .*\.", ask)
    typed = "reserve-gpu run -n 2 --note 'a b' --wait -- COMMAND ..."
    assert wait == f"Or wait in the queue: {typed}"
    assert less == "1 is available now: reserve-gpu run -n 1 --note 'a b' -- COMMAND ..."


# -- what others wrote -----------------------------------------------------------------------------

HOSTILE = (
    "<script>alert(1)</script>&amp;\x1b[31m\r\n0    free\u202e\u2066\x9b1m\N{HEBREW LETTER ALEF}"
)
FOREIGN = HOSTILE + "x" * 5000


def hostile_picture() -> dict[str, Picture]:
    """Make pictures in which all that somebody else can write is hostile."""
    holder = a_holder(1, FOREIGN, FOREIGN, since=NOW, label=FOREIGN, command=FOREIGN, cwd=FOREIGN)
    holder = changed(holder, note=FOREIGN)
    sharer = part(holder, 1e9, 1e9 + 1)
    process = Process(5, 300, FOREIGN, FOREIGN, has_reserved=False)
    gpu = Device(0, "GPU-0", FOREIGN, FOREIGN, 81920, FOREIGN)
    rows = (
        DeviceStatus(
            gpu, State.RESERVED, usage(300), holders=(holder, holder), processes=(process,) * 2
        ),
        DeviceStatus(gpu, State.BUSY, usage(300), processes=(process,), is_unreserved_use=True),
        DeviceStatus(
            gpu, State.UNKNOWN, reason=FOREIGN, background=(process._replace(memory_mib=9000),)
        ),
        DeviceStatus(Fault(1, FOREIGN), State.BROKEN, holders=(holder,), reason=FOREIGN),
        DeviceStatus(gpu, State.FREE, usage(0), awaited_by=holder),
        DeviceStatus(gpu, State.AWAITED, usage(300), holders=(holder,), awaited_by=holder),
        DeviceStatus(gpu, State.RESERVED, usage(300), holders=(sharer, holder), promisable_mib=0.0),
        DeviceStatus(gpu, State.FULL, usage(300), holders=(sharer, holder) * 9, promisable_mib=0.5),
    )
    ticket = Ticket(1, FOREIGN, None, holder, FOREIGN)
    request = Request(terms=ReservationTerms(note=HOSTILE))
    return {
        "status": status(*rows, waiting=(ticket,), problem=FOREIGN, host=FOREIGN, limit=FOREIGN),
        "refusal": pictures.refusal(Refused(request, rows, limit=FOREIGN), MAGIC),
        "wait": pictures.wait(Waiting(Request(model=FOREIGN), 1, 0.0, rows)),
    }


@pytest.mark.parametrize("name", ["status", "refusal", "wait"])
def test_what_others_wrote_stays_text(name: str) -> None:
    """Whatever others write is bounded text in all renderings: no markup, no line, no sequence."""
    picture = hostile_picture()[name]
    page, plain = picture._repr_html_(), str(picture)
    coloured = "\n".join(terminal.lines(picture.layout, 120, is_colored=True))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<script>" in plain
    for text in (page, plain, picture.brief, COLOURS.sub("", coloured)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        assert "x" * 301 not in text
        assert not re.search(r"^0    free$", text, re.MULTILINE)
    assert "\n" not in picture.brief
    assert all(wcswidth(COLOURS.sub("", line)) <= 120 for line in coloured.splitlines())
    for letters in re.findall("[^<>]*\N{HEBREW LETTER ALEF}[^<>]*", page):
        assert f"<bdi>{letters}</bdi>" in page
