"""Commands with an end time, and the watchdog that ends them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reserve_gpu.system import subprocesses, watchdog
from tests.support.locked import locked
from tests.support.machine import LIMIT_S
from tests.support.processes import US, is_running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.machine import Machine

# A command that starts its own watchdog. Arguments: the seconds until SIGTERM, and then SIGKILL.
TIMED = r"""
import os, signal, sys, time
from reserve_gpu.system import watchdog, subprocesses
def note(*_):
    os.write(1, b"asked\n")  # print might be interrupted by this handler
def save(*_):
    os.write(1, b"saved\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, HANDLER)
print("ready", flush=True)
subprocesses.start_background(watchdog.words(time.time() + float(sys.argv[1]), float(sys.argv[2])))
while True:
    signal.pause()
"""
SAVES, NOTES, IGNORES = (
    TIMED.replace("HANDLER", handler) for handler in ("save", "note", "signal.SIG_IGN")
)
# A command that counts Ctrl-C until it reads a line. A signal just before a blocking call of Python
# waits for the end of the call, so the wakeup descriptor reports signals.
COUNTS = r"""
import os, select, signal
count, (heard, hears) = 0, os.pipe()
os.set_blocking(hears, False)
signal.signal(signal.SIGINT, lambda *_: None)
signal.set_wakeup_fd(hears)
print("ready", flush=True)
while heard in (ready := select.select([0, heard], [], [])[0]):
    count += len(os.read(heard, 1))
    os.write(1, f"interrupt {count}\n".encode())
print(f"{count} in all", flush=True)
"""
# A program that makes its standard input its controlling terminal.
CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
# Run the arguments without pidfd_open (434), as on an old Linux kernel: it fails with ENOSYS (38).
# https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
OLD_LINUX = r"""
import ctypes, os, struct, sys
def step(code, k, yes=0, no=0):
    return struct.pack("HBBI", code, yes, no, k)
steps = step(0x20, 0) + step(0x15, 434, 0, 1) + step(0x06, 0x50000 | 38) + step(0x06, 0x7FFF0000)
kept = ctypes.create_string_buffer(steps)
program = struct.pack("HP", 4, ctypes.addressof(kept))
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    sys.exit("no filter")
os.execvp(sys.argv[1], sys.argv[1:])
"""
SLEEP = ("--", "sh", "-c", "echo; exec sleep 60")


def watchdogs(pid: int) -> list[int]:
    """Return the pids of the watchdogs of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_watchdog = any(word.endswith(b"system/watchdog.py") for word in words)
            if is_watchdog and str(pid).encode() in words and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


def open_files(pid: int) -> set[str]:
    """Return the files that a process has open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(link))
    return found


@contextmanager
def started(machine: Machine, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command, and wait until it has printed a line."""
    with machine.running(*command, environ=machine.environ(), stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        yield process
        process.stdout.close()


@contextmanager
def timed(machine: Machine, code: str, *seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Python program with a watchdog, which must not outlive the program."""
    with started(machine, sys.executable, "-c", code, *map(str, seconds)) as process:
        yield process
    wait_for(lambda: not watchdogs(process.pid))


@pytest.mark.promise
@pytest.mark.parametrize(("line", "code"), [("exit 3", 3), ("kill -SEGV $$", -signal.SIGSEGV)])
def test_exit_code_is_that_of_the_command(machine: Machine, line: str, code: int) -> None:
    done = machine.command(*US, "run", "--for", "4h", "--", "sh", "-c", line)
    assert done.returncode == code
    assert "SIGTERM" in done.stderr


@pytest.mark.promise
def test_killed_command_leaves_no_watchdog_and_no_reservation(machine: Machine) -> None:
    with started(machine, *US, "run", "--for", "4h", *SLEEP) as process:
        (pid,) = watchdogs(process.pid)
        process.kill()
        process.wait(LIMIT_S)
        wait_for(lambda: not is_running(pid))
    assert not locked(machine.locks)


@pytest.mark.parametrize(("options", "count"), [((), 0), (("--end-kernel",), 1)])
def test_inherited_end_needs_end_kernel(
    machine: Machine, options: tuple[str, ...], count: int
) -> None:
    """A command that inherits a reservation with an end is ended only with `--end-kernel`."""
    kernel = (*US, "kernel", "start", "--for=4h", *options)
    with started(machine, *kernel, "--", *US, "run", *SLEEP) as process:
        assert len(watchdogs(process.pid)) == count


@pytest.mark.promise
def test_command_gets_sigterm_at_its_end(machine: Machine) -> None:
    done = machine.command(*US, "run", "--for", "1s", "--", "sleep", "60")
    assert done.returncode == -signal.SIGTERM
    assert not locked(machine.locks)


@pytest.mark.full
def test_command_without_its_watchdog_is_overdue(machine: Machine) -> None:
    """If the watchdog is killed, the command continues, and other users see that it is overdue."""
    with started(machine, *US, "run", "--for", "3s", *SLEEP) as process:
        (pid,) = watchdogs(process.pid)
        os.kill(pid, signal.SIGKILL)

        def is_overdue() -> bool:
            status = json.loads(machine.command(*US, "status", "--json").stdout)
            return any(holder["overdue"] for holder in status["devices"][0]["holders"])

        wait_for(is_overdue, 0.1)
        assert process.poll() is None


@pytest.mark.parametrize("after_s", [0.2, -3600], ids=["soon", "during a suspension"])
def test_command_can_save_at_its_end(machine: Machine, after_s: float) -> None:
    """A handler of SIGTERM can print and choose the exit code, even if the end is in the past."""
    with timed(machine, SAVES, after_s, 60) as process:
        assert process.communicate(timeout=LIMIT_S)[0] == b"saved\n"
        assert process.returncode == 0


def test_command_that_ignores_sigterm_is_killed(machine: Machine) -> None:
    with timed(machine, IGNORES, 0, 0.5) as process:
        assert process.wait(LIMIT_S) == -signal.SIGKILL


# -- the watchdog ----------------------------------------------------------------------------------


def test_watchdog_holds_no_files_of_the_command(machine: Machine) -> None:
    """A watchdog has no lock, terminal, pipe or directory of the command, and its own session."""
    with started(machine, *US, "run", "--for", "4h", *SLEEP) as process:
        (pid,) = watchdogs(process.pid)
        wait_for(lambda: open_files(pid) == {"/dev/null", "anon_inode:[pidfd]"})
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.getsid(pid) != os.getsid(process.pid)


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [
        pytest.param((sys.executable, "-c", OLD_LINUX), "5.3", id="old Linux"),
        pytest.param(("unshare", "--pid", "--fork", "--kill-child"), "process 1", id="process 1"),
    ],
)
def test_command_that_can_not_be_ended_is_refused(
    machine: Machine, prefix: tuple[str, ...], reason: str
) -> None:
    """Without a pidfd, or as process 1 of a container, a command with an end reserves nothing."""
    if (os.geteuid() and prefix[0] == "unshare") or machine.command(*prefix, "true").returncode:
        pytest.skip("system calls can't be filtered, or no PID namespace can be created here")
    done = machine.command(*prefix, *US, "run", "--for", "1h", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert reason in line
    assert ("5.3" in line) == (reason == "5.3")
    if reason == "5.3":
        assert machine.command(*prefix, *US, "run", "--", "echo", "ran").stdout == "ran\n"


def test_failed_start_of_a_watchdog_raises() -> None:
    with pytest.raises(OSError, match="exit code 1"):
        subprocesses.start_background(watchdog.words("noon"))  # type: ignore[arg-type]


# -- in a terminal ---------------------------------------------------------------------------------


class Terminal:
    """A terminal that controls a program."""

    def __init__(self, machine: Machine, *command: str) -> None:
        self._own, end = os.openpty()
        self._unread = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *command], env=machine.environ(PS1="prompt> "),
            cwd=machine.folder, stdin=end, stdout=end, stderr=end, start_new_session=True,
        )  # fmt: skip
        os.close(end)

    def type(self, keys: str) -> None:
        """Send keys to the program."""
        os.write(self._own, keys.encode())

    def read_to(self, words: str) -> None:
        """Wait until the terminal shows these words, after those of earlier calls."""
        while words not in self._unread:
            readable, _, _ = select.select([self._own], [], [], LIMIT_S)
            assert readable, self._unread
            try:
                self._unread += os.read(self._own, 4096).decode()
            except OSError as error:
                raise AssertionError(self._unread) from error
        self._unread = self._unread.partition(words)[2]

    def close(self) -> None:
        """Kill the program."""
        self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._own)


@contextmanager
def terminal(machine: Machine, *command: str) -> Iterator[Terminal]:
    """Run a command in a terminal."""
    opened = Terminal(machine, *command)
    try:
        yield opened
    finally:
        opened.close()


def test_ctrl_c_interrupts_only_the_command(machine: Machine) -> None:
    """Each Ctrl-C is one SIGINT for the command, which continues if it handles the signal."""
    command = (*US, "run", "--for", "1h", "--", sys.executable, "-c", COUNTS)
    with terminal(machine, *command) as screen:
        screen.read_to("ready")
        (pid,) = watchdogs(screen.process.pid)
        for count in (1, 2, 3):
            screen.type("\x03")
            screen.read_to(f"interrupt {count}")
        assert is_running(pid)
        screen.type("\n")
        screen.read_to("3 in all")
        assert screen.process.wait(LIMIT_S) == 0
        wait_for(lambda: not is_running(pid))
