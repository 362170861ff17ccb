"""Users and groups are looked up once, not once for each place that names them."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.system import accounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.here import Here

# Note each look-up in a file, as a directory server would see it.
NOTE = """
import grp, os, pwd, sys
file = open("looked_up", "w", buffering=1)
def noted(module, name):
    look_up = getattr(module, name)
    def note(*arguments):
        print(name, arguments[0], file=file)
        return look_up(*arguments)
    setattr(module, name, note)
noted(pwd, "getpwuid")
noted(grp, "getgrnam")
noted(os, "getgrouplist")
"""
WITHOUT_HOME = "os.environ.pop('HOME', None)\n"
COMMAND = "from reserve_gpu.cli import main; sys.exit(main.main({words}))"
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for line in ("%load_ext reserve_gpu", "%reserve_gpu", "%reserve_gpu --status"):
    assert shell.run_cell(line).success
"""


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def counting(clock: Clock, took_s: float = 0.0) -> tuple[list[str], Callable[[str], None]]:
    """Return the keys that are looked up, and a look-up that takes so long and finds nothing."""
    asked: list[str] = []

    def look_up(key: str) -> None:
        asked.append(key)
        clock.now += took_s

    return asked, accounts.remember(look_up, clock)


def test_an_answer_is_kept_for_a_minute() -> None:
    """A name is looked up again after a minute, even if the first look-up found nothing."""
    clock = Clock()
    asked, recall = counting(clock)
    for clock.now in (0, 1, 59, 60, 61, 119, 120):
        recall("alice")
    recall("bob")
    assert asked == ["alice", "alice", "alice", "bob"]


@pytest.mark.parametrize(("took_s", "kept_s"), [(0.5, 60), (2, 200), (60, 300)])
def test_a_slow_answer_is_kept_for_longer(took_s: float, kept_s: float) -> None:
    """A slow look-up is repeated later, so that its server slows down few refreshes."""
    clock = Clock()
    asked, recall = counting(clock, took_s)
    recall("alice")
    for clock.now in (took_s + kept_s - 1, took_s + kept_s):
        recall("alice")
    assert asked == ["alice", "alice"]
    assert clock.now == kept_s + 2 * took_s


def test_remembered_answers_are_bounded() -> None:
    """A process that sees very many users does not remember them all."""
    asked, recall = counting(Clock())
    for number in range(accounts.CAPACITY + 1):
        recall(str(number))
    for number, times in ((accounts.CAPACITY, 1), (0, 2)):
        recall(str(number))
        assert asked.count(str(number)) == times


@pytest.mark.process
@pytest.mark.parametrize(
    "code",
    [
        COMMAND.format(words=["status"]),
        COMMAND.format(words=["list"]),
        COMMAND.format(words=["run", "true"]),
        WITHOUT_HOME + COMMAND.format(words=["run", "true"]),
        NOTEBOOK,
    ],
    ids=["status", "list", "run", "run_without_home", "notebook"],
)
def test_each_user_is_looked_up_once(here: Here, code: str) -> None:
    """A process looks up each user and group once, however many GPUs the user holds."""
    here.write("gpu\n" * 4)
    here.rules.write_text("[limits]\ngpus = 9\n[groups.adm]\ngpus = 8\n[groups.nosuch]\ngpus = 7")
    with here.rival("0"), here.rival("1"), here.rival("2"):
        done = here.python(NOTE + code)
    assert done.returncode == 0, done.stderr
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert sorted((here.folder / "looked_up").read_text().splitlines()) == [
        *("getgrnam adm", "getgrnam nosuch"),
        f"getgrouplist {user}",
        f"getpwuid {os.geteuid()}",
    ]
