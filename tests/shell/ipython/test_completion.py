"""Completion of %reserve_gpu in IPython shells; for kernels, see tests/process/ipython."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING

import IPython
import pytest
from IPython.core.completer import provisionalcompleter

from tests.support.shell import print_warnings

if TYPE_CHECKING:
    from tests.support.here import Here
    from tests.support.shell import Shell

OPTIONS = [
    *("--count", "--min-memory", "--name", "--memory", "--wait", "--note"),
    *("--optional", "--for", "--until", "--idle", "--if-wanted", "--end-kernel"),
    *("--status", "--all", "--hosts", "--release", "--join"),
    *("--check", "--help"),
]
# IPython before 8.6 mixes Python's names into the completions.
IS_OLD = IPython.version_info < (8, 6)


def completed_lines(shell: Shell, line: str) -> list[str]:
    """Return the lines that Tab offers, and check that nothing is printed."""
    output = StringIO()
    with (
        redirect_stdout(output), redirect_stderr(output), print_warnings(), provisionalcompleter()
    ):  # fmt: skip
        found = list(shell.shell.Completer.completions(line, len(line)))
    assert output.getvalue() == ""
    return [line[: completion.start] + completion.text for completion in found]


@pytest.mark.parametrize("magic", ["%reserve_gpu", "reserve_gpu", "  %reserve_gpu"])
def test_options(here: Here, magic: str) -> None:
    """Tab offers all options, with and without the percent sign, and completes a prefix."""
    shell = here.shell()
    found, options = completed_lines(shell, f"{magic} --"), [f"{magic} {text}" for text in OPTIONS]
    assert set(options) <= set(found) if IS_OLD else options == found
    assert completed_lines(shell, f"{magic} 0 --na") == [f"{magic} 0 --name"]


CASES = [
    ("%reserve_gpu ", OPTIONS),
    ("%reserve_gpu -n ", ["1", "2", "4", "8"]),
    ("%reserve_gpu --note x --wait 1h --", [f for f in OPTIONS if f not in ("--note", "--wait")]),
    ("%reserve_gpu --min-memory=1", ["--min-memory=16GiB"]),
    ("%reserve_gpu --wait --st", ["--status"]),
    ("x = 1\n%reserve_gpu --rel", ["--release"]),
]


@pytest.mark.ipython
@pytest.mark.skipif(IS_OLD, reason="IPython before 8.6 mixes Python's names into the completions")
def test_completions(here: Here) -> None:
    """Tab offers the options that are not given yet, and values after an option with a value."""
    shell = here.shell()
    for line, texts in CASES:
        start = line[: max(line.rfind(" "), line.rfind("\n")) + 1]
        assert completed_lines(shell, line) == ([start + text for text in texts] or [line]), line


@pytest.mark.ipython
@pytest.mark.skipif(IS_OLD, reason="IPython before 8.6 has other matchers")
def test_only_the_magic_completes_its_line(here: Here) -> None:
    """Jedi, files and Python's names do not complete the magic's line."""
    shell = here.shell()
    shell.shell.Completer.use_jedi = True
    (here.folder / "print_me").touch()
    shell.run("print_too = printed = 1")
    for line in ("%reserve_gpu pri", "%reserve_gpu --note pri", "x = 1\n%reserve_gpu --name pri"):
        assert completed_lines(shell, line) == [line]


@pytest.mark.ipython
@pytest.mark.skipif(not IS_OLD, reason="for IPython before 8.6")
def test_values_in_an_old_shell(here: Here) -> None:
    """An old IPython also offers values, next to Python's names."""
    assert "%reserve_gpu --wait 10m" in completed_lines(here.shell(), "%reserve_gpu --wait 1")


@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", "reserve_gpu = --stat"),
        ("", "%reserve_gpu --status --stat"),
        ("import reserve_gpu", "reserve_gpu --stat"),
        ("%automagic off", "reserve_gpu --stat"),
        ("%unload_ext reserve_gpu", "%reserve_gpu --stat"),
    ],
)
def test_other_code_is_not_completed(here: Here, before: str, line: str) -> None:
    """No option is offered for Python code, for a given option, or after unloading."""
    shell = here.shell()
    shell.run(before)
    assert not any(text.endswith("--status") for text in completed_lines(shell, line))
