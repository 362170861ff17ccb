"""Events whose reader does not read delay no command for long, and no line is cut."""

from __future__ import annotations

import os
import pty
import socket
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.agents import names_of
from tests.support.full_pipes import fill, full_pipe
from tests.support.locked import locked
from tests.support.machine import LIMIT_S
from tests.support.processes import US, queue, wait_for
from tests.support.users import NOBODY, as_user, for_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Machine

DONE = ("sh", "-c", "echo done")
LIFE = ["reserved", "released"]


def full_socket(_: Path) -> tuple[int, int]:
    """Return both ends of a socket without room."""
    reader, writer = (each.detach() for each in socket.socketpair())
    fill(writer)
    return reader, writer


def stopped_terminal(_: Path) -> tuple[int, int]:
    """Return both ends of a terminal whose output is stopped."""
    reader, writer = pty.openpty()
    termios.tcflow(writer, termios.TCOOFF)
    return reader, writer


@pytest.fixture(params=[full_pipe])
def writer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Return a descriptor that can't be written."""
    reader, writer = request.param(tmp_path)
    yield writer
    for each in (reader, writer):
        os.close(each)


def followers(machine: Machine) -> list[int]:
    """Return the pids of the processes that write the events of running commands."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            environ = (process / "environ").read_bytes()
            if b"after_exec" in words and os.fsencode(machine.locks) in environ:
                found.append(int(process.name))
    return found


def start(machine: Machine, *words: str, **settings: Any) -> subprocess.Popen[bytes]:
    """Start `reserve-gpu run`."""
    settings = {"cwd": machine.folder, "stdout": subprocess.PIPE, **settings}
    return subprocess.Popen([*US, "run", *words], env=machine.environ(), **settings)


def finish(machine: Machine, *words: str, **settings: Any) -> tuple[int, bytes]:
    """Run `reserve-gpu run`, and return its exit code and its output."""
    process = start(machine, *words, **settings)
    out, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, out


def require_end_of_reservation(machine: Machine) -> None:
    """Wait until no process writes events, and require that no GPU is locked."""
    wait_for(lambda: not followers(machine))
    assert not [name for name in locked(machine.locks) if name.startswith("GPU-")]


@pytest.mark.parametrize(
    "writer",
    [full_pipe, full_socket, stopped_terminal],
    ids=lambda place: place.__name__,
    indirect=True,
)
def test_a_command_ends_although_its_events_are_not_read(machine: Machine, writer: int) -> None:
    done = finish(machine, "--events", str(writer), "--", *DONE, pass_fds=(writer,))
    assert done == (0, b"done\n")
    require_end_of_reservation(machine)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--json", "--for", "1h", "--", *DONE), 0),
        (("--", *DONE), 0),
        (("--json", "-n", "9", "--", *DONE), 2),
        # A command of this package that fails at once, and that has replaced `run`.
        (("--quiet", "--", *US, "sttus"), 2),
    ],
    ids=["events", "messages", "refusal", "unknown command"],
)
def test_a_command_ends_although_its_stderr_is_full(
    machine: Machine, writer: int, words: tuple[str, ...], code: int
) -> None:
    done = finish(machine, *words, stderr=writer)
    assert done == (code, b"" if code else b"done\n")
    require_end_of_reservation(machine)


@pytest.mark.parametrize(
    ("writer", "options"),
    [(full_pipe, ["--json"]), (full_pipe, []), (stopped_terminal, [])],
    ids=["events", "messages", "terminal"],
    indirect=["writer"],
)
def test_a_waiter_gets_its_gpu_although_its_stderr_is_full(
    machine: Machine, writer: int, options: list[str]
) -> None:
    machine.write("gpu\n")
    with machine.child() as rival:
        rival.reserve()
        waiter = start(machine, "--wait", *options, "--", *DONE, stderr=writer)
        wait_for(lambda: queue(machine))
        rival.run("reserve_gpu.release()")
        assert waiter.communicate(timeout=LIMIT_S)[0] == b"done\n"


def test_a_file_on_a_full_disk_has_only_whole_lines(machine: Machine) -> None:
    file = machine.folder / "events.jsonl"
    line = '{"event": "before"}\n'
    file.write_text(line * 50)
    command = f"ulimit -f 1; exec {' '.join(US)} run --events events.jsonl -- echo done"
    done = machine.command("bash", "-c", command)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    wait_for(lambda: not followers(machine))
    assert {*file.read_text().splitlines(keepends=True)} == {line}


def test_events_go_to_a_pipe_that_only_another_user_can_open_again() -> None:
    with for_users() as machine:
        # setpriv itself may have the rights of root.
        python = [*as_user(NOBODY), "sh", "-c", f"{sys.executable} -c ''"]
        if subprocess.run(python, stderr=subprocess.DEVNULL, check=False).returncode:
            pytest.skip(f"{NOBODY} can't run {sys.executable} here")
        reader, writer = os.pipe()
        command = [*as_user(NOBODY), *US, "run", "--json", "--", *DONE]
        environ = machine.environ()
        process = subprocess.Popen(
            command, env=environ, cwd="/", stdout=subprocess.DEVNULL, stderr=writer
        )
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        assert process.wait(LIMIT_S) == 0
        assert names_of(text) == LIFE
        _, writer = full_pipe(machine.folder)
        assert subprocess.check_output(command, env=environ, cwd="/", stderr=writer) == b"done\n"
        wait_for(lambda: not followers(machine))


def test_a_descriptor_that_is_not_writable_is_refused(machine: Machine) -> None:
    done = machine.command("sh", "-c", f"{' '.join(US)} run --events 3 -- true 3</dev/null")
    assert done.returncode == 2
    assert "--events 3" in done.stderr
