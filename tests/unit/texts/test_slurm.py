"""The messages of `kernel install --slurm` and of the relay."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.commands.slurm.relay import Relay

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

    from tests.support.commandline import CommandLine
    from tests.support.here import Here

MISTAKES = [
    *("--slurm --hosts lab", "-- -p gpu", "--slurm --wait 1h", "--slurm nonsense"),
    *("--slurm --memory much", "--slurm --for soon"),
]


def test_refused_options(srun: str, typed: CommandLine, snapshot: SnapshotAssertion) -> None:
    lines = (
        f"{words}\n    {typed('kernel', 'install', *words.split()).stderr}" for words in MISTAKES
    )
    assert "".join(lines) == snapshot


def test_without_srun(here: Here, typed: CommandLine, snapshot: SnapshotAssertion) -> None:
    os.environ["PATH"] = str(here.folder / "none")
    assert typed("kernel", "install", "--slurm", "--prefix", ".").stderr == snapshot


@pytest.mark.parametrize(
    ("content", "command"),
    [
        pytest.param(None, ["--", "srun"], id="no connection file"),
        pytest.param("", ["--", "srun"], id="invalid connection file"),
        pytest.param("{}", [], id="no command"),
        pytest.param("{}", ["--", "srun"], id="incomplete connection file"),
    ],
)
def test_relay(
    content: str | None,
    command: list[str],
    here: Here,
    typed: CommandLine,
    snapshot: SnapshotAssertion,
) -> None:
    if content is not None:
        (here.folder / "file.json").write_text(content)
    assert typed("kernel", "slurm", "-f", "file.json", *command).stderr == snapshot


def test_states_of_a_job(capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion) -> None:
    async def states() -> list[str]:
        relay = Relay({"key": "", "signature_scheme": "hmac-sha256"}, ["srun"])
        shown = [relay._status]
        await relay._handle_node("job", [b"4711", b"n0"])
        shown.append(relay._status)
        relay._fail("node failure")
        relay._report_refusal(None)
        for socket in relay._sockets.values():
            socket.close()
        return [*shown, relay._failure]

    assert "\n".join([*asyncio.run(states()), capsys.readouterr().err]) == snapshot
