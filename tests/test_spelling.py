"""What may be meant by words that were typed, as tables; in a line that is typed: test_cli.py."""

from __future__ import annotations

import shlex

import pytest

from reserve_gpu import spelling

KNOWN = ["--wait", "--share", "--status", "--min-memory"]


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
    ("line", "wrong", "form"),
    [
        ("--wait 1 h", "h", "--wait '1 h'"),
        ("3 --until Fri 18:00", "18:00", "--until 'Fri 18:00'"),
        ("--until=1 May 3 pm --share", "pm", "--until '1 May 3 pm'"),
        ("--share --wait 1 h", "h", "--wait '1 h'"),
        ("--share 1 x", "x", ""),
        ("x", "x", ""),
    ],
)
def test_a_value_of_several_words(line: str, wrong: str, form: str) -> None:
    """Whoever types a value without quotation marks reads how to put it in them."""
    said = spelling.in_quotes(shlex.split(line), wrong, ["--wait", "--until"])
    assert said.partition(": ")[2] == form
