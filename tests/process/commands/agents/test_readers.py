"""Readers that don't read: no event delays a command for long, and no line is cut."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.locked import locked
from tests.support.machine import LIMIT_S
from tests.support.processes import US, queue, wait_for
from tests.support.unread import fill, full_pipe
from tests.support.users import NOBODY, as_user, for_users

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.machine import Machine

    Place = Callable[[Path], tuple[int, int]]

DONE = ("sh", "-c", "echo done")
UNTIL_EOF = ("sh", "-c", "echo started; cat >&2")


def full_socket(_: Path) -> tuple[int, int]:
    reader, writer = (each.detach() for each in socket.socketpair())
    fill(writer)
    return reader, writer


def full_datagrams(_: Path) -> tuple[int, int]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    reader, writer = ours.detach(), theirs.detach()
    fill(writer)
    return reader, writer


def full_terminal(_: Path) -> tuple[int, int]:
    reader, writer = pty.openpty()
    fill(writer)
    return reader, writer


def stopped_terminal(_: Path) -> tuple[int, int]:
    reader, writer = pty.openpty()
    termios.tcflow(writer, termios.TCOOFF)
    return reader, writer


def abandoned_pipe(_: Path) -> tuple[int, int]:
    reader, writer = os.pipe()
    os.close(reader)
    return os.open(os.devnull, os.O_RDONLY), writer


def full_fifo(folder: Path) -> tuple[int, int]:
    os.mkfifo(folder / "fifo")
    both = os.open(folder / "fifo", os.O_RDWR)
    fill(both)
    return os.open(os.devnull, os.O_RDONLY), both


def full_device(_: Path) -> tuple[int, int]:
    return os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)


PLACES = (
    full_pipe,
    full_socket,
    full_datagrams,
    full_terminal,
    stopped_terminal,
    abandoned_pipe,
    full_fifo,
    full_device,
)


@pytest.fixture(params=[full_pipe])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Return a descriptor that has no room, and whose reader does not read."""
    reader, writer = request.param(tmp_path)
    yield writer
    for each in (reader, writer):
        os.close(each)


def followers(machine: Machine) -> list[int]:
    """Return the processes that write the events of running commands."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            environ = (process / "environ").read_bytes()
            if b"after_exec" in words and os.fsencode(machine.locks) in environ:
                found.append(int(process.name))
    return found


def lines(text: str) -> list[dict[str, Any]]:
    """Return the events between what filled a pipe before."""
    return [json.loads(line) for line in text.splitlines() if line.strip("x")]


@pytest.mark.parametrize("writer", PLACES, ids=lambda place: place.__name__, indirect=True)
def test_a_reader_that_does_not_read(machine: Machine, writer: int) -> None:
    """A command and its follower end although the events are not read."""
    done = subprocess.run(
        [*US, "run", "--events", str(writer), "--", *DONE], env=machine.environ(),
        cwd=machine.folder, pass_fds=(writer,), timeout=LIMIT_S, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    wait_for(lambda: not followers(machine))
    assert not [name for name in locked(machine.locks) if name.startswith("GPU-")]


@pytest.mark.parametrize("options", [("--json",), (), ("--json", "--for", "1h")])
def test_stderr_is_full(machine: Machine, writer: int, options: tuple[str, ...]) -> None:
    """A command starts although its stderr, with the events and messages, is not read."""
    done = subprocess.run(
        [*US, "run", *options, "--", *DONE], env=machine.environ(), cwd=machine.folder,
        timeout=LIMIT_S, stdout=subprocess.PIPE, stderr=writer, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"done\n")
    wait_for(lambda: not followers(machine))


@pytest.mark.parametrize("writer", [full_pipe, stopped_terminal], indirect=True)
@pytest.mark.parametrize("options", [("--json",), ()])
def test_a_wait_with_a_full_stderr(machine: Machine, writer: int, options: tuple[str, ...]) -> None:
    """A waiter whose stderr is full gets its GPU, and its command starts."""
    machine.write("gpu\n")
    line = [*US, "run", "--wait", *options, "--", *DONE]
    with machine.child() as rival:
        rival.reserve()
        with machine.running(
            *line, environ=machine.environ(), stdout=subprocess.PIPE, stderr=writer
        ) as waiter:
            wait_for(lambda: queue(machine))
            rival.run("reserve_gpu.release()")
            assert waiter.stdout
            with waiter.stdout as stdout:
                assert stdout.read() == b"done\n"


def test_a_refusal_with_a_full_stderr(machine: Machine, writer: int) -> None:
    """A refused `run --json` ends although stderr is not read."""
    done = subprocess.run(
        [*US, "run", "--json", "-n", "9", "--", *DONE], env=machine.environ(),
        cwd=machine.folder, timeout=LIMIT_S, stdout=subprocess.PIPE, stderr=writer, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize("arguments", [["sttus"], ["hosts", "--bogus"]])
def test_a_mistake_with_a_full_stderr(machine: Machine, writer: int, arguments: list[str]) -> None:
    """A command that `run` has started, and that fails at once, ends although stderr is not read.

    It has replaced `run` and holds its GPU.
    """
    done = subprocess.run(
        [*US, "run", "--quiet", "--", *US, *arguments], env=machine.environ(), cwd=machine.folder,
        timeout=LIMIT_S, stdout=subprocess.PIPE, stderr=writer, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, b"")
    assert not [name for name in locked(machine.locks) if name.startswith("GPU-")]


def test_lost_events_are_counted(machine: Machine) -> None:
    """The next event that is written says how many were lost before."""
    reader, writer = full_pipe(machine.folder)
    process = subprocess.Popen(
        [*US, "run", "--events", str(writer), "--", *UNTIL_EOF], env=machine.environ(),
        cwd=machine.folder, pass_fds=(writer,), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(writer)
    assert process.stdout
    assert process.stdout.readline() == b"started\n"
    with os.fdopen(reader, "rb") as pipe:
        os.set_blocking(reader, False)
        pipe.read()
        os.set_blocking(reader, True)
        process.communicate()
        (released,) = lines(pipe.read().decode())
    assert (released["event"], released["lost"]) == ("released", 1)


def test_a_fifo_without_a_reader(machine: Machine) -> None:
    """A FIFO without a reader keeps the events for its first reader."""
    fifo = machine.folder / "fifo"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [*US, "run", "--events", str(fifo), "--", *UNTIL_EOF], env=machine.environ(),
        cwd=machine.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "started\n"
    with fifo.open() as reader:
        process.communicate()
        assert [each["event"] for each in lines(reader.read())] == ["reserved", "released"]


def test_the_pipe_of_another_user() -> None:
    """After a change of the user, events go to a pipe that only its owner can open again."""
    with for_users() as machine:
        # setpriv itself may have root's rights.
        python = [*as_user(NOBODY), "sh", "-c", f"{sys.executable} -c ''"]
        if subprocess.run(python, stderr=subprocess.DEVNULL, check=False).returncode:
            pytest.skip(f"{NOBODY} can't run {sys.executable} here")
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [*as_user(NOBODY), *US, "run", "--json", "--", *DONE], env=machine.environ(),
            cwd="/", stdout=subprocess.DEVNULL, stderr=writer,
        )  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        assert process.wait(LIMIT_S) == 0
        assert [each["event"] for each in lines(said)] == ["reserved", "released"]
        _, writer = full_pipe(machine.folder)
        done = subprocess.run(
            [*as_user(NOBODY), *US, "run", "--json", "--", *DONE], env=machine.environ(),
            cwd="/", stdout=subprocess.PIPE, stderr=writer, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.stdout == b"done\n"
        wait_for(lambda: not followers(machine))


def test_the_command_gets_its_descriptors_as_they_were(machine: Machine) -> None:
    """Events leave the flags of stderr alone, so that the command can wait for its reader."""
    code = "import os; print(os.get_blocking(2))"
    done = machine.command(*US, "run", "--json", "--", sys.executable, "-c", code)
    assert done.stdout == "True\n"


def test_processes_that_share_a_pipe(machine: Machine) -> None:
    """Refusals longer than what a pipe takes at once are not mixed with those of others."""
    machine.write("gpu\n" * 8)
    with machine.child() as rival:
        assert not rival.reserve("count=8").error
        reader, writer = os.pipe()
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4 * select.PIPE_BUF)
        line = [*US, "run", "--events", str(writer), "--", *DONE]
        processes = [
            subprocess.Popen(
                line, env=machine.environ(), cwd=machine.folder, pass_fds=(writer,),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for _ in range(4)
        ]  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = pipe.read()
        assert [process.wait(LIMIT_S) for process in processes] == [75] * 4
    assert len(said) > 4 * select.PIPE_BUF
    assert [each["event"] for each in lines(said)] == ["refused"] * 4


def test_a_full_disk(machine: Machine) -> None:
    """A file on a full disk has only whole lines."""
    file = machine.folder / "events.jsonl"
    file.write_text('{"event": "before"}\n' * 50)
    command = f"ulimit -f 1; exec {' '.join(US)} run --events events.jsonl -- echo done"
    done = machine.command("bash", "-c", command)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    wait_for(lambda: not followers(machine))
    assert {each["event"] for each in lines(file.read_text())} == {"before"}


def test_a_descriptor_that_is_for_reading(machine: Machine) -> None:
    """A descriptor that can't be written is refused before anything is reserved."""
    done = machine.command("sh", "-c", f"{' '.join(US)} run --events 3 -- true 3</dev/null")
    assert (done.returncode, done.stderr) == (2, "--events 3: Bad file descriptor.\n")


def test_events_on_a_terminal(machine: Machine) -> None:
    """A terminal shows each event on a line."""
    master, slave = pty.openpty()
    done = subprocess.run(
        [*US, "run", "--json", "--", *DONE], env=machine.environ(), cwd=machine.folder,
        stdout=subprocess.PIPE, stderr=slave, check=False,
    )  # fmt: skip
    assert done.stdout == b"done\n"
    wait_for(lambda: not followers(machine))
    os.close(slave)
    said = os.read(master, 1 << 16).decode()
    os.close(master)
    assert [each["event"] for each in lines(re.sub(r"\r\n", "\n", said))] == [
        "reserved",
        "released",
    ]
