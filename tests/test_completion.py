"""What Tab offers behind %reserve_gpu, in real shells; in a kernel: test_kernels.py."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

import IPython
import pytest
from IPython.core.completer import provisionalcompleter

from tests.shell import printed

if TYPE_CHECKING:
    from tests.here import Here
    from tests.shell import Shell

pytestmark = pytest.mark.ipython

OPTIONS = [
    *("--count", "--min-memory", "--name", "--exclude", "--memory", "--wait", "--share", "--note"),
    *("--optional", "--for", "--until", "--idle", "--if-wanted", "--end-kernel"),
    *("--status", "--check", "--release", "--help"),
]
DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
REQUESTS = OPTIONS[: OPTIONS.index("--status")]
# Before 8.6 IPython adds to what is offered Python's own names; ours are there all the same.
IS_OLD = IPython.version_info < (8, 6)


def shell_of(here: Here) -> Shell:
    """Return a shell without Jedi, which knows Python alone and takes seconds to load."""
    shell = here.shell()
    shell.shell.Completer.use_jedi = False
    return shell


def offered(shell: Shell, line: str) -> list[str]:
    """Return what the line may become by Tab, which says nothing besides."""
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output), printed(), provisionalcompleter():
        found = list(shell.shell.Completer.completions(line, len(line)))
    assert output.getvalue() == ""
    return [line[: each.start] + each.text for each in found]


@pytest.mark.parametrize("magic", ["%reserve_gpu", "reserve_gpu", "  %reserve_gpu"])
def test_options(here: Here, magic: str) -> None:
    """Tab offers all options, with the percent sign and without, and completes a begun one."""
    shell = shell_of(here)
    everything, wanted = offered(shell, f"{magic} --"), [f"{magic} {text}" for text in OPTIONS]
    assert set(wanted) <= set(everything) if IS_OLD else wanted == everything
    assert offered(shell, f"{magic} 0 --na") == [f"{magic} 0 --name"]


CASES = [
    ("%reserve_gpu ", OPTIONS),
    ("%reserve_gpu 2:", []),
    ("%reserve_gpu 2:5 ", REQUESTS[1:]),
    ("%reserve_gpu 1 -", ["--min-memory", "--name", "--exclude", *REQUESTS[4:]]),
    ("%reserve_gpu -n 2 ", REQUESTS[1:]),
    ("%reserve_gpu -n 2 --exclude ", []),
    ("%reserve_gpu --share --wait 1h --", [f for f in REQUESTS if f not in ("--share", "--wait")]),
    ("%reserve_gpu --exclude 0 --ex", []),
    ("%reserve_gpu --json ", ["--status", "--check"]),
    ("%reserve_gpu --json --status ", []),
    ("%reserve_gpu --status --watch ", []),
    ("%reserve_gpu --watch ", ["--status"]),
    ("%reserve_gpu --release ", []),
    ("%reserve_gpu --note pri", []),
    ("%reserve_gpu --note ", []),
    ("%reserve_gpu # pri", []),
    ("%reserve_gpu -n ", ["1", "2", "4", "8"]),
    ("%reserve_gpu --min-memory ", ["8GiB", "16GiB", "24GiB", "40GiB", "80GiB"]),
    ("%reserve_gpu --min-memory 4", ["40GiB"]),
    ("%reserve_gpu --memory ", ["4GB", "10GB", "20GB", "40GB"]),
    ("%reserve_gpu --memory 1", ["10GB"]),
    ("%reserve_gpu --min-memory=1", ["--min-memory=16GiB"]),
    ("%reserve_gpu --wait 1", ["10m", "1h", "1d"]),
    ("%reserve_gpu --for ", ["1h", "4h", "8h", "1d"]),
    ("%reserve_gpu --for 4h --", [f for f in REQUESTS if f not in ("--for", "--until")]),
    ("%reserve_gpu --until ", ["12:00", "18:00", *DAYS]),
    ("%reserve_gpu --until f", ["Fri"]),
    ("%reserve_gpu --until Fri --f", []),
    ("%reserve_gpu --idle ", ["30m", "1h", "2h"]),
    ("%reserve_gpu --idle 1h --i", ["--if-wanted"]),
    ("%reserve_gpu --status ", ["--json", "--watch"]),
    ("%reserve_gpu --check --", ["--json"]),
    ("x = 1\n%reserve_gpu --sh", ["--share"]),
]


@pytest.mark.skipif(
    IS_OLD, reason="IPython before 8.6 mixes Python's own names into what it offers"
)
def test_options_and_values(here: Here) -> None:
    """Tab offers what can still be given, and values of options that take the same everywhere."""
    shell = shell_of(here)
    for line, texts in CASES:
        start = line[: max(line.rfind(" "), line.rfind("\n")) + 1]
        assert offered(shell, line) == ([start + text for text in texts] or [line]), line


@pytest.mark.skipif(IS_OLD, reason="the matchers of IPython from 8.6 on")
def test_nothing_else_is_offered(here: Here) -> None:
    """Jedi, files and Python's names are not even asked on the magic's line."""
    shell = here.shell()
    shell.shell.Completer.use_jedi = True
    (here.folder / "print_me").touch()
    shell.run("print_too = printed = 1")
    for line in ("%reserve_gpu pri", "%reserve_gpu --note pri", "x = 1\n%reserve_gpu --name pri"):
        assert offered(shell, line) == [line]


@pytest.mark.skipif(not IS_OLD, reason="the way of IPython before 8.6")
def test_values_in_an_old_shell(here: Here) -> None:
    """An old IPython offers values too, beside Python's own names."""
    shell = shell_of(here)
    assert {"%reserve_gpu --until 18:00"} <= set(offered(shell, "%reserve_gpu --until "))
    assert "%reserve_gpu --wait 10m" in offered(shell, "%reserve_gpu --wait 1")


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        (
            "",
            [
                "reserve_gpu = --stat",
                "reserve_gpus --stat",
                "print('%reserve_gpu') --stat",
                "%reserve_gpu # --stat",
                "%reserve_gpu --status --stat",
                "%reserve_gpu 0 --stat",
            ],
        ),
        ("import reserve_gpu", ["reserve_gpu --stat"]),
        ("%automagic off", ["reserve_gpu --stat"]),
        ("%unload_ext reserve_gpu", ["%reserve_gpu --stat"]),
    ],
)
def test_what_is_not_the_magic(here: Here, before: str, lines: list[str]) -> None:
    """No option is offered for Python that only looks like the magic, nor once that is unloaded."""
    shell = shell_of(here)
    shell.run(before)
    for line in lines:
        assert not any(text.endswith("--status") for text in offered(shell, line)), line


def test_loading_again_offers_nothing_twice(here: Here) -> None:
    """An extension that was loaded again offers everything once."""
    shell = shell_of(here)
    shell.run("%reload_ext reserve_gpu")
    assert offered(shell, "%reserve_gpu --stat").count("%reserve_gpu --status") == 1


def test_tab_asks_nothing(here: Here) -> None:
    """No key asks the driver, or reads a lock."""
    shell = shell_of(here)
    for line in ("%reserve_gpu ", "%reserve_gpu 0,", "%reserve_gpu --name ", "%reserve_gpu -n "):
        offered(shell, line)
    assert here.calls() == []
    assert not here.locks.exists()
