"""Reading usage histories, including damaged and forged ones."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.commands.report.totals import Hours
from reserve_gpu.log import log_reader
from reserve_gpu.log.log_lines import TEXT_LIMIT
from reserve_gpu.system import procfs
from tests.support.histories import DAY_S, HOUR_S, Histories, month_file
from tests.support.report import AT, NOW, log_line, recorded_hours

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_only_the_newest_lines_of_a_user_are_read(kept: Histories) -> None:
    """A user with more lines than the limit is reported, and the oldest lines are left out."""
    kept.write([log_line(start=AT - 40 * DAY_S, id="old")])
    kept.write([log_line(id=f"n{n}") for n in range(3)])
    user = procfs.user_name(os.geteuid())
    for limit, count, expected in ((4, 4, set()), (3, 3, {user}), (0, 0, None)):
        cut: set[str] = set()
        ids = [logged.entry.id for logged in log_reader.since(0, NOW, cut, limit)]
        assert len(ids) == count
        assert ("old" in ids) == (count == 4)
        assert expected is None or cut == expected


def test_line_on_a_page_and_in_the_month_file_counts_once(kept: Histories) -> None:
    page = kept.page([log_line(seconds=1800.0), log_line(start=AT + HOUR_S)])
    kept.write([log_line()])
    assert recorded_hours().reserved == 2
    page.remove()
    assert recorded_hours().reserved == 1


@pytest.mark.parametrize("letter", ["a", "\x01", "\udc80"])
@pytest.mark.parametrize("is_page", [True, False])
def test_line_with_long_texts_is_read(kept: Histories, letter: str, *, is_page: bool) -> None:
    """Long texts are cut, whatever their number of bytes, and identifiers stay whole."""
    fields = ("name", "note", "asks", "agent", "job")
    written = log_line(**dict.fromkeys(fields, 300 * letter))
    page = kept.page([written]) if is_page else None
    if not page:
        kept.write([written])
    (logged,) = log_reader.since(0, AT + DAY_S, set())
    assert (logged.entry.id, logged.entry.gpu) == (written.id, written.gpu)
    for field in fields:
        assert 50 <= len(getattr(logged.entry, field)) <= TEXT_LIMIT
        assert {*getattr(logged.entry, field)} == {letter}
    if page:
        page.remove()


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\x00\xff\xfe" * 999, id="binary"),
        pytest.param(b'{"kind":"reserved","id":"' + b"a" * (1 << 20) + b'"}', id="too long"),
        pytest.param(b"null", id="not an object"),
        pytest.param(log_line().to_json()[:-9].encode(), id="truncated"),
    ],
)
def test_damaged_line_is_skipped(kept: Histories, garbage: bytes) -> None:
    """The lines before and after a damaged line count."""
    good = f"{log_line().to_json()}\n".encode()
    month_file(kept.of(), AT).write_bytes(good + garbage + b"\n" + good + garbage)
    assert recorded_hours().reserved == 2


@pytest.mark.parametrize(
    "forged",
    [
        {"seconds": -1}, {"seconds": float("nan")}, {"seconds": 1e8}, {"seconds": True},
        {"seconds": None}, {"idle_s": 3601}, {"share": 1.5}, {"start": "now"}, {"id": 7},
        {"kind": ["reserved"]}, {"gpu": {"a": 1}}, {"how": "magic"}, {"percent": 101},
    ],
    ids=str,
)  # fmt: skip
def test_line_with_an_invalid_value_is_skipped(kept: Histories, forged: dict[str, Any]) -> None:
    fields = json.loads(log_line().to_json()) | forged
    text = f"{json.dumps(fields)}\n"
    month_file(kept.of(), AT).write_text(f"{text}{log_line().to_json()}\n")
    (kept.of() / "machine.open").write_text(text)
    assert recorded_hours() == Hours(1, 0.5, 0.5)


def make_link(path: Path, data: bytes) -> None:
    """Create a symbolic link to a file with the data."""
    path.with_name("elsewhere").write_bytes(data)
    path.symlink_to("elsewhere")


def make_hard_link(path: Path, data: bytes) -> None:
    """Create a second name of a file with the data."""
    path.with_name("elsewhere").write_bytes(data)
    path.hardlink_to(path.with_name("elsewhere"))


def make_fifo(path: Path, data: bytes) -> None:
    """Create a pipe with the data, which stays open because closing it discards the data."""
    os.mkfifo(path)
    os.write(os.open(path, os.O_RDWR | os.O_NONBLOCK), data)


@pytest.mark.parametrize("make", [make_link, make_hard_link, make_fifo])
@pytest.mark.parametrize("name", ["2025-10.jsonl", f"{'a' * 16}.open"])
def test_only_regular_files_are_read(
    kept: Histories, make: Callable[[Path, bytes], None], name: str
) -> None:
    """A link, a second name, a pipe or a directory in place of a history file is skipped."""
    make(kept.of() / name, f"{log_line().to_json()}\n".encode())
    kept.write([log_line(start=AT + 30 * DAY_S)])
    assert recorded_hours().reserved == 1
