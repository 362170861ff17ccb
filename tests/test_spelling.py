"""What may be meant by words that were typed, as tables; in a line that is typed: test_cli.py."""

from __future__ import annotations

import shlex

import pytest

from reserve_gpu import spelling
from reserve_gpu.errors import RequestError

KNOWN = ["--wait", "--share", "--status", "--min-memory"]
VALUED = {"--wait", "--min-memory", "--name", "--note", "--until"}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--wiat", ["--wait"]),
        ("wait", ["--wait"]),
        ("WAIT", ["--wait"]),
        ("stat", ["--status"]),
        ("-w", ["--wait"]),
        ("-s", ["--share", "--status"]),
        ("memory", ["--min-memory"]),
        ("thesis", []),
        ("", []),
        ("--", []),
        ("-x", []),
        ("x" * 100_000, []),
    ],
)
def test_near(word: str, expected: list[str]) -> None:
    """A word is near one that is spelled alike, hyphens aside; a letter near all that it begins."""
    assert spelling.near(word, KNOWN) == expected


@pytest.mark.parametrize(
    ("line", "wrong", "expected"),
    [
        ("%reserve_gpu 1 --wiat 1h", "--wiat", " Did you mean: %reserve_gpu 1 --wait 1h"),
        ("%reserve_gpu --wiat=1h", "--wiat=1h", " Did you mean: %reserve_gpu --wait=1h"),
        ("x --note 'a b' wait", "wait", " Did you mean: x --note 'a b' --wait"),
        ("%reserve_gpu -s", "-s", " Did you mean --share or --status?"),
        ("%reserve_gpu thesis", "thesis", ""),
        ("x wait 'a\x1b'", "wait", " Did you mean: x --wait 'a\N{REPLACEMENT CHARACTER}'"),
    ],
)
def test_did_you_mean(line: str, wrong: str, expected: str) -> None:
    """The line is shown with the word that may be meant, so that it can be typed as it stands."""
    assert spelling.did_you_mean(shlex.split(line), wrong, KNOWN) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--wait 1 h", ["--wait=1 h"]),
        ("--wait=1 h", ["--wait=1 h"]),
        ("3 --min-memory 16 GB --wait", ["3", "--min-memory=16 GB", "--wait"]),
        ("--note until Friday -n 2", ["--note=until Friday", "-n", "2"]),
        ("--until Fri 18:00 --share", ["--until=Fri 18:00", "--share"]),
        ("--until 2026-12-01 8:30", ["--until=2026-12-01 8:30"]),
        ("--wait 1 3", None),
        ("--wait 1 GPU1,cuda:0 0-3", None),
        ("--wait", None),
        ("--note x", None),
        ("--share a b", None),
        ("-n 2 --note=x 3", None),
        ("--note '' 3", None),
        ("", None),
    ],
)
def test_joined(line: str, expected: list[str] | None) -> None:
    """Words that name no device belong to the value before them; all others stay as they are."""
    words = shlex.split(line)
    assert spelling.joined(words, VALUED) == (words if expected is None else expected)


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ("--wait 1 h 3", "--wait '1 h' 3"),
        ("--until Fri 18:00 1:0", "--until 'Fri 18:00' 1:0"),
        ("--name RTX 2080 Ti", "--name 'RTX 2080 Ti'"),
        ("--note=until May 3 pm 1 --share", "--note 'until May 3 pm' 1"),
    ],
)
def test_what_may_be_a_device_is_not_guessed(line: str, form: str) -> None:
    """Where some words name devices and some don't, the form in quotation marks is the answer."""
    with pytest.raises(RequestError, match=f": {form}$"):
        spelling.joined(shlex.split(line), VALUED)
