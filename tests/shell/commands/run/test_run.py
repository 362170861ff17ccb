"""`reserve-gpu run`, until it becomes the command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.main import both_reserved

if TYPE_CHECKING:
    from tests.support.commandline import CommandLine
    from tests.support.here import Here


@pytest.mark.parametrize(
    ("name", "code"),
    [("nosuch", 127), ("./nosuch", 127), ("./plain", 126), ("./", 126), ("./folder", 126),
     ("", 127)],
)  # fmt: skip
def test_command_that_cannot_be_run_reserves_nothing(
    here: Here, typed: CommandLine, name: str, code: int
) -> None:
    """A command that can't be found or run is refused before the driver is called."""
    (here.folder / "plain").touch()
    (here.folder / "folder").mkdir()
    done = typed("run", "--wait", "--", name)
    assert (done.code, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert here.calls() == []
    assert not here.locks.exists()


@pytest.mark.parametrize("options", ["", "--for 1h", "--wait 1h"])
def test_quiet(typed: CommandLine, options: str) -> None:
    """With --quiet, only errors are printed."""
    done = typed("run", "-q", *options.split(), "--", "true")
    assert (done.visible, done.stderr) == ("0", "")
    assert "GPU7" in typed("run", "--quiet", "7", "--", "true").stderr


def test_values_of_several_words(here: Here, typed: CommandLine) -> None:
    """A quoted value may contain spaces, and a word after a value names a GPU."""
    words = ["--wait", "1 h", "--min-memory", "4 GB", "--note", "until Friday"]
    done = typed("run", *words, "--", "true")
    assert (done.visible, done.argv) == ("0", ["true"])
    assert typed("run", "--wait", "1s", "1", "--", "true").visible == "1"
    assert typed("run", "--note", "x", "GPU1", "--", "true").visible == "1"


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("-- env", "env"),
        ("-- env --", "env --"),
        ("-- env -- -n 2", "env -- -n 2"),
        ("0 -n 1 --wait -- env --help", "env --help"),
        ("env", "env"),
        ("env -n 2 --wait", "env -n 2 --wait"),
        ("env 1", "env 1"),
        ("--name GTX -- env 0", "env 0"),
    ],
)
def test_start_of_the_command(typed: CommandLine, words: str, argv: str) -> None:
    """The command follows the first `--`; without options, `--` is not needed."""
    done = typed("run", *words.split())
    assert done.argv == argv.split(), done.stderr
    assert "GPU0" in done.stderr
    assert done.visible == "0"


@pytest.mark.parametrize(
    "own", ["0", "1:0", "1,3", "GPU-8f2a", "0000:01:00.0", "-n 1", "-n1", "--note=0", "--note x",
            "--wait", "--wait 1h", "0 --optional"],
)  # fmt: skip
def test_command_after_options_needs_a_separator(here: Here, typed: CommandLine, own: str) -> None:
    """A command after options or GPUs, but without `--`, is refused with the corrected line."""
    done = typed("run", *own.split(), "env", "-u", "A")
    assert done.code == 2
    assert f"reserve-gpu run {own} -- env -u A\n" in done.stderr
    assert here.calls() == []


@pytest.mark.parametrize("option", ["--idle=1h", "--if-wanted", "--end-kernel"])
def test_options_of_kernels_are_unknown(typed: CommandLine, option: str) -> None:
    done = typed("run", option, "--", "true")
    assert done.code == 2
    assert option.partition("=")[0] in done.stderr


OLD_OPTIONS = "0 1:0 --count=2 --min-memory=16GB --name=A100 --wait=10s --note=mine"
KERNEL = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}", "--ext", "reserve_gpu"]


@pytest.mark.parametrize(("options", "visible"), [("", "0"), (OLD_OPTIONS, "")])
def test_kernel_of_an_earlier_version_starts(
    here: Here, typed: CommandLine, options: str, visible: str
) -> None:
    """Every option of an installed kernel is accepted, even if no GPU matches."""
    done = typed("kernel", "start", *options.split(), "--", *KERNEL)
    assert (done.argv, done.visible) == (KERNEL, visible)
    assert "Unknown" not in done.stderr


@pytest.mark.usefixtures("terminal")
def test_without_a_free_gpu(here: Here, typed: CommandLine) -> None:
    """Without a free GPU, nothing is run, and the error lists the holders and commands to type."""
    with both_reserved(here):
        done = typed("run", "--", "echo", "ran")
    assert (done.code, done.stdout, done.argv) == (75, "", None)
    assert done.stderr.count(f"rival.ipynb (pid {os.getpid()})") == 3
    _, release, wait, *_ = done.stderr.splitlines()
    assert release.endswith(f"reserve-gpu release {os.getpid()}")
    assert wait.endswith("reserve-gpu run --wait -- echo ran")


def test_wait_timeout(here: Here, typed: CommandLine) -> None:
    with both_reserved(here):
        done = typed("run", "--wait", "0.1s", "--", "echo", "ran")
    assert (done.code, done.argv) == (75, None)
    assert "0.1 s" in done.stderr


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


def test_driver_without_gpus(here: Here, typed: CommandLine) -> None:
    """With --optional, no GPU is visible, because the driver may list one later."""
    here.write("count 0\ngpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = "3"
    done = typed("run", "--", "env")
    assert (done.code, done.stdout, done.argv) == (69, "", None)
    done = typed("run", "--optional", "--", "env")
    assert (done.argv, done.visible) == (["env"], "")


def test_optional(here: Here, typed: CommandLine) -> None:
    """With --optional, the command runs with no visible GPU, and the reason is printed."""
    with both_reserved(here):
        done = typed("run", "--optional", "--", "env")
    assert (done.argv, done.visible) == (["env"], "")
    assert "rival.ipynb" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Continuing")


def test_unusable_lock_directory(here: Here, typed: CommandLine) -> None:
    os.environ["RESERVE_GPU_LOCK_DIR"] = "/dev/null/x"
    done = typed("run", "--", "true")
    assert (done.code, done.argv, done.stderr.count("\n")) == (78, None, 1)
