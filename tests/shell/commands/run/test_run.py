"""`reserve-gpu run`, until it becomes the command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.run_command import both_reserved

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here


@pytest.mark.parametrize("options", ["", "--for 1h"])
def test_quiet(typed: CommandLine, options: str) -> None:
    """With --quiet, only errors are printed."""
    done = typed("run", "-q", *options.split(), "--", "true")
    assert (done.visible, done.stderr) == ("0", "")
    assert "GPU7" in typed("run", "--quiet", "7", "--", "true").stderr


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("-- env", "env"),
        ("-- env -- -n 2", "env -- -n 2"),
        ("0 -n 1 --wait -- env --help", "env --help"),
        ("env", "env"),
    ],
)
def test_start_of_the_command(typed: CommandLine, words: str, argv: str) -> None:
    """The command follows the first `--`; without options, `--` is not needed."""
    done = typed("run", *words.split())
    assert done.argv == argv.split(), done.stderr
    assert "GPU0" in done.stderr
    assert done.visible == "0"


@pytest.mark.parametrize(
    "own", ["1,3", "-n 1", "-n1", "--note x", "--wait", "--wait 1h", "0 --optional"],
)  # fmt: skip
def test_command_after_options_needs_a_separator(here: Here, typed: CommandLine, own: str) -> None:
    """A command after options or GPUs, but without `--`, is refused with the corrected line."""
    done = typed("run", *own.split(), "env", "-u", "A")
    assert done.code == 2
    assert f"reserve-gpu run {own} -- env -u A\n" in done.stderr
    assert here.calls() == []


OLD_OPTIONS = "0 1:0 --count=2 --min-memory=16GB --name=A100 --wait=10s --note=mine"
KERNEL = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}", "--ext", "reserve_gpu"]


def test_kernel_of_an_earlier_version_starts(here: Here, typed: CommandLine) -> None:
    """Every option of an installed kernel is accepted, even if no GPU matches."""
    done = typed("kernel", "start", *OLD_OPTIONS.split(), "--", *KERNEL)
    assert (done.argv, done.visible) == (KERNEL, "")
    assert "Unknown" not in done.stderr


def test_without_a_driver(here: Here, typed: CommandLine) -> None:
    """Without a driver, commands fail with exit code 69; --optional keeps the visible devices."""
    here.add("fail nvmlInitWithFlags * 9")
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    for words in (["run", "--", "env"], ["status"], ["status", "--json"], ["check"]):
        done = typed(*words)
        assert (done.code, done.stdout, done.argv) == (69, "", None)
        assert "not loaded" in done.stderr
    done = typed("run", "--optional", "--", "env")
    assert (done.argv, done.visible) == (["env"], "3")


def test_optional(here: Here, typed: CommandLine) -> None:
    """With --optional, the command runs with no visible GPU, and the reason is printed."""
    with both_reserved(here):
        done = typed("run", "--optional", "--", "env")
    assert (done.argv, done.visible) == (["env"], "")
    assert "rival.ipynb" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Continuing")
