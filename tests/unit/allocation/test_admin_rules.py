"""The administrator's file: what it says to whom, what is wrong in it, and what becomes of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.allocation import admin_rules
from tests.support.machine import ROOT

if TYPE_CHECKING:
    from reserve_gpu.model.requests import Rules
FILE = "/etc/reserve_gpu.toml"
PAGE = ROOT / "docs" / "rules.md"


def said(text: str, *groups: str, called: str = "alice") -> Rules:
    """Return what a file of that text says to a user of these groups."""
    return admin_rules.for_user(admin_rules.parse(text.encode(), FILE), called, {called}, groups)


# -- what it says to whom --------------------------------------------------------------------------

THREE = """
[limits]
gpus = 2
idle = "2h"
after_cuda = "end"
[groups.students]
gpus = 1
[groups.phd]
gpus = 3
after_cuda = "end"
[groups.staff]
after_cuda = "warn"
[users.alice]
gpus = 0
"""


@pytest.mark.parametrize(
    ("user", "groups", "gpus", "after_cuda"),
    [
        ("bob", (), "gpus = 2 of [limits]", 'after_cuda = "end" of [limits]'),
        ("bob", ("students",), "gpus = 1 of [groups.students]", 'after_cuda = "end" of [limits]'),
        ("bob", ("students", "phd"), "gpus = 3 of [groups.phd]", 'after_cuda = "end" of [groups'),
        ("bob", ("phd", "staff"), "gpus = 3 of [groups.phd]", 'after_cuda = "warn" of [groups.st'),
        ("alice", ("phd",), "gpus = 0 of [users.alice]", 'after_cuda = "end" of [groups.phd]'),
    ],
)
def test_the_narrowest_table_stands(
    user: str, groups: tuple[str, ...], gpus: str, after_cuda: str
) -> None:
    """Each limit is the user's own, else the most generous of the groups', else that of all."""
    found = said(THREE, *groups, called=user)
    assert found.problems == ()
    assert found.gpus
    assert f"{found.gpus.text} of {found.gpus.table}" == gpus
    assert found.after_cuda
    assert f"{found.after_cuda.text} of {found.after_cuda.table}".startswith(after_cuda)
    assert found.idle
    assert found.idle.value == 7200
    assert found.time is None


# -- what is wrong in it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[limits]\ngpus = true", "[limits]: gpus = true: give a number of GPUs, 0 or more."),
        ("[limits]\ngpus = -1", "[limits]: gpus = -1: give a number"),
        ("[limits]\ngpus = nan", "[limits]: gpus = NaN: give a number"),
        ("[limits]\ngpus = 1.0", "[limits]: gpus = 1.0: give a number"),
        ("[limits]\ngpus = 9999999999", "[limits]: gpus = 9999999999: give a number"),
        ('[limits]\ngpus = "2"', '[limits]: gpus = "2": give a number'),
        (
            "[limits]\ntime = true",
            '[limits]: time = true: give a duration such as "30m", "4h" or "2d".',
        ),
        ("[limits]\ntime = inf", "[limits]: time = Infinity: give a duration"),
        ('[limits]\ntime = "0h"', '[limits]: time = "0h": give a duration'),
        ('[limits]\ntime = "24"', '[limits]: time = "24": give a duration'),
        ('[limits]\nidle = "-1h"', "[limits]: idle = \"-1h\": '-1h' is not a valid duration"),
        ("[limits]\ntime = 07:30:00", '[limits]: time = "07:30:00": give a duration'),
        ('[limits]\nafter_cuda = "kill"', 'after_cuda = "kill": give "warn" or "end".'),
        ("[limits]\nafter_cuda = []", 'after_cuda = []: give "warn" or "end".'),
        (
            "[limits]\ngpu = 1",
            "[limits]: unknown key 'gpu' (known keys: gpus, time, idle, after_cuda).",
        ),
        (
            '[limits]\nmemory = "40GiB"',
            "[limits]: unknown key 'memory' (known keys: gpus, time",
        ),
        (
            "[limit]\ngpus = 1",
            "unknown key 'limit' (known keys: message, history, limits, groups, users, a",
        ),
        ('[limits]\n"g\\u001b[31m" = 1', "[limits]: unknown key 'g\N{REPLACEMENT CHARACTER}[31m'"),
        ("limits = 3", "[limits] must be a table, not 3."),
        ("[users]\nalice = 3", "[users.alice] must be a table, not 3."),
        ("[agents]\ngpu = 1", "[agents]: unknown key 'gpu'"),
        ("[groups.x]\ngpus = []", "[groups.x]: gpus = []: give a number"),
        ("message = 3", "message must be a string, not 3."),
        ('[devices]\ndrain = "GPU-1"', '[devices]: drain = "GPU-1": give a list'),
        ("[devices]\ndrain = [true]", "[devices]: drain: true is not a GPU"),
        ('[devices]\ndrain = ["x y"]', '[devices]: drain: "x y" is not a GPU'),
        ('[devices]\ndrian = ["1"]', "[devices]: unknown key 'drian' (known keys: drain)."),
    ],
)
def test_a_mistake_is_one_line_with_its_place(text: str, problem: str) -> None:
    """What can't be meant is told with its table and key, and no rule of the file holds."""
    with pytest.raises(admin_rules.MistakeError) as caught:
        said(f'{text}\n[users.alice]\nidle = "1h"' if "[users]" not in text else text)
    line = str(caught.value)
    assert line.isprintable()
    assert line.startswith(FILE)
    assert problem.rstrip(".") in line


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (b"time 24h", "Expected '=' after a key in a key/value pair (at line 3"),
        (b"time = ", "Invalid value (at line 3"),
        (b'time = "24h', "(at line 3"),
        (b"gpus = 3", "Cannot overwrite a value (at line 3"),
        (b"[limits]", "Cannot declare ('limits',) twice (at line 3"),
        (b'message = "caf\xe9"', "'utf-8' codec can't decode byte 0xe9"),
        (b"\0\1\2", "(at line 3"),
        (b"x = [\n1,\n", "(at end of document)"),
    ],
)
def test_a_mistake_in_the_form_has_its_line(broken: bytes, problem: str) -> None:
    """A mistake in the form of the file is told with its line, as tomllib says it."""
    with pytest.raises(admin_rules.MistakeError) as caught:
        admin_rules.parse(b"[limits]\ngpus = 2\n" + broken + b"\n", FILE)
    assert str(caught.value).startswith(f"{FILE}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 20_000,
        "x = " + "[" * 20_000 + "]" * 20_000,
        "x = " + "{a=" * 20_000,
        "a." * 5_000 + "b = 1",
        "[" + "a." * 5_000 + "b]",
        "x = " + "9" * 50_000,
        "x = 1979-99-99",
        "[limits]\n" + "".join(f"k{number} = 1\n" for number in range(3000)),
    ],
    ids=range(8),
)
def test_no_file_makes_it_fail_or_talk_without_end(text: str) -> None:
    """However odd a file is, its mistake is one short line."""
    with pytest.raises(admin_rules.MistakeError) as caught:
        admin_rules.parse(text.encode(), FILE)
    problem = str(caught.value)
    assert 0 < len(problem) < 500
    assert problem.isprintable()


def test_the_documented_file_is_right() -> None:
    """The file that docs/rules.md shows has no mistake, and says what stands beside it."""
    (text,) = re.findall(
        r"reserve_gpu.toml <<'EOF'\n(.*?)^EOF$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    found = said(text, "students")
    assert found.problems == ()
    assert (found.gpus and found.gpus.value) == 4
    assert said(text, "students", called="bob").gpus
    assert (found.message, found.drained) == ("Maintenance on Friday at 17:00", ("GPU-8f2a",))
