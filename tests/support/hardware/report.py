"""The results of the hardware tests, and the page that shows them."""

from __future__ import annotations

import getpass
import os
import re
import socket
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PASSED_DETAIL = 120  # characters
DETAIL = 400
UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
HOME_FOLDER = re.compile(r"/(?:home|Users)/[^/\s'\"]+")
ISSUES = re.compile(r'^Issues = "(.+)"$', re.MULTILINE)


class Result(Enum):
    """The result of a row. A measured fact has none."""

    PASS = "PASS"  # noqa: S105 - not a password
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"


class Row(NamedTuple):
    """One line of the page.

    Attributes:
        name: The promise, or the measured quantity.
        result: None for a fact that was measured.
        detail: The measured values, or the reason why the result is unknown.
        is_fact: Whether the row is a measurement, which can't fail.
    """

    name: str
    result: Result | None
    detail: str
    is_fact: bool


def check(
    promises: Mapping[str, str] | None = None,
    *,
    facts: Mapping[str, str] | None = None,
    limit_s: float = 40,
) -> pytest.MarkDecorator:
    """Mark a hardware test, and declare its rows.

    The names of rows can contain parameters of the test, as in `{size}`.

    Args:
        promises: The promises that the test checks, by their key in `Findings.promise`.
        facts: The quantities that the test measures, by their key in `Findings.fact`.
        limit_s: The test stops after this number of seconds.
    """
    return pytest.mark.gpu(promises or {}, facts or {}, limit_s=limit_s)


class Findings:
    """The rows of one test. Rows without a result are UNKNOWN when the test ends."""

    def __init__(self, item: pytest.Item) -> None:
        (mark,) = item.iter_markers("gpu")
        promises, facts = mark.args
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        self.limit_s: float = mark.kwargs["limit_s"]
        self.reason = "the test did not get there"
        self._names = {
            key: name.format(**parameters) for key, name in {**promises, **facts}.items()
        }
        self._facts = frozenset(facts)
        self._rows: dict[str, Row] = {}

    def promise(self, key: str, is_kept: bool | None, detail: object = "") -> None:  # noqa: FBT001
        """Record the result of a promise. is_kept: None if the test can't find out."""
        assert key not in self._facts
        result = {None: Result.UNKNOWN, True: Result.PASS, False: Result.FAIL}[is_kept]
        self._rows[key] = Row(self._names[key], result, one_line(detail), is_fact=False)

    def fact(self, key: str, value: object) -> None:
        """Record a measured value."""
        assert key in self._facts
        self._rows[key] = Row(self._names[key], None, one_line(value), is_fact=True)

    def failed(self) -> str:
        """Return the broken promises, one per line."""
        rows = [row for row in self._rows.values() if row.result is Result.FAIL]
        return "\n".join(f"{row.name}: {row.detail}" for row in rows)

    def rows(self) -> list[Row]:
        """Return all declared rows, in their order."""
        reason = one_line(self.reason)
        return [
            self._rows.get(key) or Row(name, Result.UNKNOWN, reason, is_fact=key in self._facts)
            for key, name in self._names.items()
        ]


def one_line(value: object) -> str:
    """Return a value as one line without names of users, hosts, folders and GPUs."""
    if isinstance(value, list):
        value = ", ".join(text for text in map(str, value) if text)
    text = UUID.sub(r"\1-...", " ".join(str(value).split()))
    # Pytest runs with another HOME; without a user name, expanduser() changes nothing.
    folders = (str(ROOT), os.path.expanduser("~"), os.path.expanduser(f"~{user_name()}"))
    for folder in sorted(folders, key=len, reverse=True):
        text = text.replace(folder, "...") if len(folder) > 1 else text
    text = HOME_FOLDER.sub("...", text)
    for name in private_names():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "...", text)
    return text[:DETAIL]


def private_names() -> Iterable[str]:
    """Return this machine's name and this user's, except names that say nothing."""
    names = {socket.gethostname(), socket.gethostname().partition(".")[0], user_name()}
    return sorted(names - {"", "localhost", "nobody", "root"}, key=len, reverse=True)


def user_name() -> str:
    """Return this user's name, or an empty string in a container without a name for the user."""
    with suppress(KeyError, OSError):
        return getpass.getuser()
    return ""


def page(title: str, rows: list[Row]) -> str:
    """Return the page: the machine, the promises, the facts and the counts."""
    promises = [row for row in rows if not row.is_fact]
    lines = [title, "", *(promise_line(row) for row in promises)]
    if facts := [row for row in rows if row.is_fact]:
        lines += ["", "Measured:", *(fact_line(row) for row in facts)]
    counts = (f"{sum(row.result is each for row in promises)} {each.value}" for each in Result)
    return "\n".join([*lines, "", ", ".join(counts)])


def promise_line(row: Row) -> str:
    assert row.result
    is_passed = row.result is Result.PASS
    detail = row.detail[:PASSED_DETAIL] if is_passed else row.detail
    return f"{row.result.value:8} {row.name}" + (f"  [{detail}]" if detail else "")


def fact_line(row: Row) -> str:
    return (
        f"{row.name}: {row.detail}" if row.result is None else f"{row.name}: UNKNOWN ({row.detail})"
    )


def post_hint(path: str) -> str:
    """Ask the user to post the page, at the address in pyproject.toml."""
    (url,) = ISSUES.findall((ROOT / "pyproject.toml").read_text())
    where = "of the repository that you cloned" if "/OWNER/" in url else f"at {url}"
    return f"Please post {path} as an issue {where}."


def to_plain(rows: list[Row]) -> list[list[Any]]:
    """Return rows as values that pytest-xdist can send to another process."""
    return [[row.name, row.result and row.result.value, row.detail, row.is_fact] for row in rows]


def from_plain(rows: list[list[Any]]) -> list[Row]:
    return [
        Row(name, result and Result(result), detail, is_fact)
        for name, result, detail, is_fact in rows
    ]
