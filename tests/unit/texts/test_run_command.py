"""Texts of the errors about the command after `reserve-gpu run --`."""

from __future__ import annotations

import shlex
import signal
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.run import command, lookup
from reserve_gpu.commands.run.handoff import STARTERS
from reserve_gpu.model.errors import CommandError, RequestError
from tests.support.commandline import CHANGED
from tests.support.handoff import OURS, refusal

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from tests.support.here import Here

QUEUED = ("at", "sbatch", "tsp", "docker-compose", "gnome-terminal")  # one for each reason


@pytest.mark.parametrize(
    "line",
    [
        *(f"{program} python t.py" for program in (*STARTERS, *QUEUED)),
        "su - bob",
        "ssh lab1 nvidia-smi",
        "docker compose up",
        "docker run IMAGE",
        "docker run -d --gpus device=0 IMAGE",
        "env CUDA_VISIBLE_DEVICES=1 python t.py",
    ],
)
def test_refusal(line: str, snapshot: SnapshotAssertion) -> None:
    """A command that would not keep the reservation is refused."""
    assert refusal(line) == snapshot


@pytest.mark.parametrize(
    "line",
    [
        "A=1 python t.py",
        "'CUDA_VISIBLE_DEVICES=1 python t.py'",
        "'cd x && sh t.sh'",
        "cd x",
        "exec sh t.sh",
        "nosuch x '|' sh",
        "--wait sh",
        "a\x1b[1m=1",
    ],
)
def test_explanation(
    line: str, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is not a program is explained."""
    monkeypatch.setenv("SHELL", "/bin/sh")
    with pytest.raises((RequestError, CommandError)) as caught:
        lookup.find(shlex.split(line), lambda: OURS)
    assert str(caught.value) == snapshot


SCRIPTS = [  # the first line, the mode, and the command
    *[("#!/bin/sh", 0o755, "t.sh"), ("#!/bin/sh", 0o644, "./t.sh")],
    *[("#!./plain", 0o755, "./t.sh"), ("#!/nowhere/sh", 0o755, "./t.sh")],
]


def test_script_that_cannot_be_run(here: Here, snapshot: SnapshotAssertion) -> None:
    (here.folder / "plain").touch()
    script, texts = here.folder / "t.sh", []
    handlers = {number: signal.getsignal(number) for number in CHANGED}
    for first_line, mode, name in SCRIPTS:
        script.write_text(first_line)
        script.chmod(mode)
        with pytest.raises(CommandError) as caught:
            lookup.find([name, "x"], lambda: OURS)
        texts.append(str(caught.value))
    with pytest.raises(CommandError) as caught:
        command.become(str(script), ["./t.sh"])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert "\n".join([*texts, str(caught.value)]) == snapshot
