"""The usage errors of `reserve-gpu`, and commands that can't be run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
    "report --since yesterday 18:00", "release GPU0",
    "kernel install --model A100", "kernel install --prefix",
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
