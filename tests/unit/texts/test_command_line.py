"""The usage errors of `reserve-gpu`, and commands that can't be run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.model import errors
from tests.support.locked import watched

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from tests.support.commandline import CommandLine
    from tests.support.here import Here


MISTAKES = [
    "run", "run --quiet", "run -n -1 -- true",
    "run -n -- true", "run nonsense -- true", "run --wait soon -- true",
    "run --for 99999999d -- true", "run --for -- true",
    "run all -- env", "run --memory 10 GB env",
    "run --wiat=1h -- true x", "run --gpu=1 -- true", "run wait -- true",
    "run 0 --name RTX 2080 Ti -- true", "run --idle 1h -- true", "run 0 --wait env -u A",
    "nonsense", "0", "0 nonsense",
    "env A=1", "-n 2 env", "start env", "kill 3", "wait", "free", "install",
    "ps aux", "stat", "--status", "kernel list", "ls", "watch", "uninstall", "extend 2h",
    "status --jsno", "status 3", "status --json=3",
    "status --format htlm", "report --by users", "report --since 7 d",
    "report --since yesterday 18:00", "release GPU0", "release GPU0 --all", "top",
    "join 0 true",
    "kernel install --model A100", "kernel install --prefix",
    "kernel install --user --sys-prefix", "kernel install --until 2099-12-01",
    "kernel install --name ../x",
]  # fmt: skip


def test_usage_errors(typed: CommandLine, snapshot: SnapshotAssertion) -> None:
    """A mistake is one line on stderr, with exit code 2."""
    lines = []
    for words in MISTAKES:
        done = typed(*words.split())
        assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1), words
        lines.append(f"reserve-gpu {words}\n    {done.stderr}")
    assert "".join(lines) == snapshot


@pytest.mark.parametrize(
    "name", ["nosuch", "./plain", "./folder", "", "no\x1b[31msuch"],
    ids=["not found", "not executable", "directory", "empty", "control characters"],
)  # fmt: skip
def test_command_that_cannot_be_run(
    name: str, here: Here, typed: CommandLine, snapshot: SnapshotAssertion
) -> None:
    (here.folder / "plain").touch()
    (here.folder / "folder").mkdir()
    assert typed("run", "--", name).stderr == snapshot


@pytest.mark.parametrize("words", ["check", "status --hosts lab1", "run --for 1h -q -- true"])
def test_program_that_cannot_be_started(
    words: str, typed: CommandLine, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")

    def fail(event: str, _: object) -> None:
        if event == "subprocess.Popen":
            raise BlockingIOError(11, "Resource temporarily unavailable")

    with watched(fail):
        assert typed(*words.split()).stderr == snapshot


def test_kernel_that_is_not_installed(
    here: Here, typed: CommandLine, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    (here.folder / "share" / "jupyter" / "kernels" / "python3-gpu").mkdir(parents=True)
    lines = [typed("kernel", "install", "--prefix", each).stderr for each in (".", "/dev/null")]
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    lines.append(typed("kernel", "install").stderr)
    install = errors.install_command("ipykernel")
    assert "".join(lines).replace(str(here.folder), ".").replace(install, "INSTALL") == snapshot


def test_kernel_without_a_gpu(here: Here, typed: CommandLine, snapshot: SnapshotAssertion) -> None:
    """`kernel hold` replies with JSON, whose reason is shown on the other machine."""
    hold = ("kernel", "hold", "--id", "1", "--kernel")
    with here.rival("0"), here.rival("1"):
        texts = [typed(*hold, "nosuch").stdout, typed(*hold, "python3", "--wait", "5s").stdout]
    assert "".join([*texts, typed("kernel", "start", "-n", "9", "--", "true").stderr]) == snapshot
