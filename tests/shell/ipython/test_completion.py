"""What Tab offers behind %reserve_gpu, in real shells; in a kernel: test_kernels.py."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

import IPython
import pytest
from IPython.core.completer import provisionalcompleter

from tests.support.shell import printed

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.shell import Shell

OPTIONS = [
    *("--count", "--min-memory", "--name", "--memory", "--wait", "--note"),
    *("--optional", "--for", "--until", "--idle", "--if-wanted", "--end-kernel"),
    *("--status", "--all", "--hosts", "--release", "--join"),
    *("--check", "--help"),
]
DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
# Before 8.6 IPython adds to what is offered Python's own names; ours are there anyway.
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
    ("%reserve_gpu 0,", []),
    ("%reserve_gpu 1 -", OPTIONS),
    ("%reserve_gpu -n ", ["1", "2", "4", "8"]),
    ("%reserve_gpu -n 2 ", OPTIONS[1:]),
    ("%reserve_gpu --note x --wait 1h --", [f for f in OPTIONS if f not in ("--note", "--wait")]),
    ("%reserve_gpu --name 0 --na", []),
    ("%reserve_gpu --note pri", []),
    ("%reserve_gpu --note ", []),
    ("%reserve_gpu --note=", []),
    ("%reserve_gpu --name ", []),
    ("%reserve_gpu pri", []),
    ("%reserve_gpu --memory ", ["4GB", "10GB", "20GB", "40GB", "50%"]),
    ("%reserve_gpu --memory 1", ["10GB"]),
    ("%reserve_gpu --min-memory 8g", ["8GiB"]),
    ("%reserve_gpu --min-memory=1", ["--min-memory=16GiB"]),
    ("%reserve_gpu --wait ", ["10m", "1h", "8h", "1d"]),
    ("%reserve_gpu --wait 1", ["10m", "1h", "1d"]),
    ("%reserve_gpu --wait --st", ["--status"]),
    ("%reserve_gpu --for ", ["1h", "4h", "8h", "1d"]),
    ("%reserve_gpu --until ", ["12:00", "18:00", *DAYS]),
    ("%reserve_gpu --until f", ["Fri"]),
    ("%reserve_gpu --idle ", ["30m", "1h", "2h"]),
    ("x = 1\n%reserve_gpu --rel", ["--release"]),
]


@pytest.mark.ipython
@pytest.mark.skipif(
    IS_OLD, reason="IPython before 8.6 mixes Python's own names into what it offers"
)
def test_what_is_offered(here: Here) -> None:
    """Tab offers the options that are not given yet, and behind one that takes a value, values."""
    shell = shell_of(here)
    for line, texts in CASES:
        start = line[: max(line.rfind(" "), line.rfind("\n")) + 1]
        assert offered(shell, line) == ([start + text for text in texts] or [line]), line


@pytest.mark.skipif(IS_OLD, reason="IPython before 8.6 shows texts alone")
def test_kinds(here: Here) -> None:
    """Beside each text stands whether it is an option or a value."""
    shell = shell_of(here)
    for line, kind in (("%reserve_gpu --w", "option"), ("%reserve_gpu --wait ", "value")):
        with provisionalcompleter():
            found = list(shell.shell.Completer.completions(line, len(line)))
        assert {each.type for each in found} == {kind}


@pytest.mark.ipython
@pytest.mark.skipif(IS_OLD, reason="the matchers of IPython from 8.6 on")
def test_nothing_else_is_offered(here: Here) -> None:
    """Jedi, files and Python's names are not even asked on the magic's line."""
    shell = here.shell()
    shell.shell.Completer.use_jedi = True
    (here.folder / "print_me").touch()
    shell.run("print_too = printed = 1")
    for line in ("%reserve_gpu pri", "%reserve_gpu --note pri", "x = 1\n%reserve_gpu --name pri"):
        assert offered(shell, line) == [line]


@pytest.mark.ipython
@pytest.mark.skipif(not IS_OLD, reason="the way of IPython before 8.6")
def test_values_in_an_old_shell(here: Here) -> None:
    """An old IPython offers values too, beside Python's own names."""
    assert "%reserve_gpu --wait 10m" in offered(shell_of(here), "%reserve_gpu --wait 1")


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        (
            "",
            [
                "reserve_gpu = --stat",
                "reserve_gpus --stat",
                "print('%reserve_gpu') --stat",
                "%reserve_gpu --status --stat",
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


@pytest.mark.ipython
def test_tab_touches_nothing(here: Here) -> None:
    """Tab asks no driver and takes no lock, so it answers at once where the driver hangs."""
    here.add("delay nvmlInitWithFlags * 3600")
    assert "%reserve_gpu --status" in offered(shell_of(here), "%reserve_gpu ")
    assert here.calls() == []
    assert not here.locks.exists()
