"""A command that ends when its time is over, and what ends it: real processes, real signals."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import reserve_gpu
from reserve_gpu.system import subprocesses, watchdog
from tests.support.machine import LIMIT_S, program
from tests.support.processes import US, is_running, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here
    from tests.support.machine import Machine

from tests.support.watchdog import alarms, running

# What becomes a command that says when it is ready: it is to be ended after so many seconds, and to
# be killed after so many more.
TIMED = r"""
import os, signal, sys, time
from reserve_gpu.system import watchdog, subprocesses
def note(*_):
    os.write(1, b"asked\n")  # print may be at work already
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
# A command that counts the Ctrl-Cs that it gets, until it reads a line.
# A signal that comes just before a blocking call of Python's own waits for its end; one that writes
# into a pipe does not.
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
# A program that makes its standard input the terminal that it is controlled from.
CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


# An old kernel, which knows no pidfd_open (434): it answers ENOSYS (38). It becomes its arguments.
# https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
OLD = r"""
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


@contextmanager
def timed(machine: Machine, code: str, *seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    """Make a Python program that is to be ended, once it is ready."""
    command = (sys.executable, "-c", code, *map(str, seconds))
    with machine.running(*command, environ=machine.environ(), stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.stdout.close()
    wait_for(lambda: not alarms(process.pid))


# -- the command's own end -------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.parametrize(("line", "code"), [("exit 3", 3), ("kill -SEGV $$", -signal.SIGSEGV)])
def test_the_exit_code_is_the_commands(machine: Machine, line: str, code: int) -> None:
    """A command that ends before its time ends as it would without one, also by a signal."""
    done = machine.command(*US, "run", "--for", "4h", "--", "sh", "-c", line)
    assert done.returncode == code
    assert re.search(
        r"^The command gets SIGTERM at .*, and SIGKILL a minute later\.$", done.stderr, re.MULTILINE
    )


@pytest.mark.promise
def test_nothing_is_left_when_the_command_is_killed(here: Here) -> None:
    """After a kill -9 of the command there is neither a watching process nor a reservation."""
    with running(here, "--for", "4h", "--", "sh", "-c", "echo; exec sleep 60") as process:
        (watching,) = alarms(process.pid)
        process.kill()
        process.wait(LIMIT_S)
        wait_for(lambda: not is_running(watching))
    assert not reserve_gpu.status().rows[0].holders


def test_without_a_time_nothing_watches(machine: Machine) -> None:
    """Without --for and --until there is the command's process and no other."""
    with running(machine, "--", "sh", "-c", "echo; exec sleep 60") as process:
        assert alarms(process.pid) == []
    with running(
        machine, "--until", "tomorrow", "--", "sh", "-c", "echo; exec sleep 60"
    ) as process:
        assert len(alarms(process.pid)) == 1


@pytest.mark.parametrize(("more", "count"), [((), 0), (("--end-kernel",), 1)])
def test_an_end_that_was_not_asked_for(machine: Machine, more: tuple[str, ...], count: int) -> None:
    """A command whose reservation got its end elsewhere is ended only where its terms say so."""
    line = (*US, "run", "--", "sh", "-c", "echo; exec sleep 60")
    command = (*US, "kernel", "start", "--for=4h", *more, "--", *line)
    with machine.running(*command, environ=machine.environ(), stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        assert len(alarms(process.pid)) == count
        process.stdout.close()


# -- the end of its time ---------------------------------------------------------------------------


@pytest.mark.promise
def test_it_ends_with_its_time(here: Here) -> None:
    """At the end of its time a command gets SIGTERM, and its GPU is free."""
    done = here.command(*US, "run", "--for", "1s", "--", "sleep", "60")
    assert done.returncode == -signal.SIGTERM
    assert not reserve_gpu.status().rows[0].holders


def test_it_may_save(machine: Machine) -> None:
    """A command that handles SIGTERM ends as it likes: with what it prints, and its exit code."""
    with timed(machine, SAVES, 0.2, 60) as process:
        assert process.communicate(timeout=LIMIT_S)[0] == b"saved\n"
        assert process.returncode == 0


def test_it_is_killed_at_last(machine: Machine) -> None:
    """A command that ignores SIGTERM is killed, so long after it as was said."""
    with timed(machine, IGNORES, 0, 0.5) as process:
        assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_it_is_not_killed_before(machine: Machine) -> None:
    """Between the two signals the command has all of its time, and is watched still."""
    with timed(machine, NOTES, 0, 60) as process:
        assert process.stdout
        assert process.stdout.readline() == b"asked\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert len(alarms(process.pid)) == 1


@pytest.mark.full
def test_a_stopped_command_may_save_too(machine: Machine) -> None:
    """A command that is stopped at the end of its time goes on, to handle SIGTERM."""
    with timed(machine, SAVES, 1, 60) as process:
        wait_for(lambda: alarms(process.pid))
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert process.communicate(timeout=LIMIT_S)[0] == b"saved\n"
        assert process.returncode == 0


def test_a_moment_that_is_past_has_come(machine: Machine) -> None:
    """A machine that was suspended finds the moment past when it wakes up, and ends the command."""
    with timed(machine, SAVES, -3600, 60) as process:
        assert process.wait(LIMIT_S) == 0


# -- what watches ----------------------------------------------------------------------------------


def test_what_watches_holds_nothing(machine: Machine) -> None:
    """It has no lock, terminal or pipe of the command, no folder, and a session of its own."""
    with running(machine, "--for", "4h", "--", "sh", "-c", "echo; exec sleep 60") as process:
        (watching,) = alarms(process.pid)
        wait_for(lambda: "/dev/null" in opened(watching))
        assert opened(watching) == {"/dev/null", "anon_inode:[pidfd]"}
        assert os.readlink(f"/proc/{watching}/cwd") == "/"
        assert os.getsid(watching) != os.getsid(process.pid)


def opened(pid: int) -> set[str]:
    """Return what a process has open."""
    return {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}


def test_the_command_has_no_child(machine: Machine) -> None:
    """A command that waits for all its children waits for none that it has not started."""
    code = "import os; os.wait()"
    done = machine.command(*US, "run", "--for", "4h", "--", sys.executable, "-c", code)
    assert "ChildProcessError" in done.stderr


def test_an_old_kernel(machine: Machine) -> None:
    """Where the kernel has no pidfd that is said in one line, and nothing is reserved."""
    old = (sys.executable, "-c", OLD)
    if machine.command(*old, "true").returncode:
        pytest.skip("system calls can't be filtered here")
    done = machine.command(*old, *US, "run", "--for", "1h", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "This system can't end a command at a given time: Function not implemented; it needs Linux "
        "5.3 or later. Omit --for and --until.\n"
    )
    assert machine.command(*old, *US, "run", "--", "echo", "ran").stdout == "ran\n"


def test_the_first_process_of_a_container(machine: Machine) -> None:
    """Process 1 of a container can't be ended from inside: it reserves nothing, and says why."""
    container = ("unshare", "--pid", "--fork", "--kill-child")
    if os.geteuid() or machine.command(*container, "true").returncode:
        pytest.skip("no PID namespace can be made here")
    done = machine.command(*container, *US, "run", "--for", "1h", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (2, "")
    assert "process 1 of a container" in done.stderr
    assert "Linux 5.3" not in done.stderr  # which is no reason here
    assert "Reserving" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_process_that_can_not_be_watched() -> None:
    """What can't be started, as for a moment that is none, is an error."""
    with pytest.raises(OSError, match="failed with exit code 1"):
        subprocesses.start_background(watchdog.words("noon"))  # type: ignore[arg-type]


# -- in a terminal ---------------------------------------------------------------------------------


class Terminal:
    """A terminal in which a program runs that it controls."""

    def __init__(self, machine: Machine, *command: str) -> None:
        self._own, end = os.openpty()
        self._unread = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *command], env=machine.environ(PS1="prompt> "),
            cwd=machine.folder, stdin=end, stdout=end, stderr=end, start_new_session=True,
        )  # fmt: skip
        os.close(end)

    def type(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def read_to(self, words: str) -> None:
        """Wait until these words are shown, after those that were waited for before."""
        while words not in self._unread:
            readable, _, _ = select.select([self._own], [], [], LIMIT_S)
            assert readable, self._unread
            try:
                self._unread += os.read(self._own, 4096).decode()
            except OSError as error:
                raise AssertionError(self._unread) from error
        self._unread = self._unread.partition(words)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        os.close(self._own)


@contextmanager
def terminal(machine: Machine, *command: str) -> Iterator[Terminal]:
    opened = Terminal(machine, *command)
    try:
        yield opened
    finally:
        opened.close()


def test_ctrl_c_reaches_the_command_once(machine: Machine) -> None:
    """Each Ctrl-C is one SIGINT for the command, which goes on if it handles that."""
    command = (*US, "run", "--for", "1h", "--", sys.executable, "-c", COUNTS)
    with terminal(machine, *command) as screen:
        screen.read_to("ready")
        (watching,) = alarms(screen.process.pid)
        for count in (1, 2, 3):
            screen.type("\x03")
            screen.read_to(f"interrupt {count}")
        assert is_running(watching)
        screen.type("\n")
        screen.read_to("3 in all")
        assert screen.process.wait(LIMIT_S) == 0
        wait_for(lambda: not is_running(watching))


@pytest.mark.skipif(not program("bash"), reason="there is no bash here")
def test_ctrl_z_and_fg(machine: Machine) -> None:
    """Ctrl-Z stops the command, and only it; `fg` brings it back, with its terminal."""
    with terminal(machine, "bash", "--norc", "--noprofile", "--noediting", "-i") as screen:
        line = " ".join([*US, "run", "--for", "1h", "--", "sh", "-c"])
        screen.read_to("prompt> ")
        screen.type(f"{line} 'echo begun here; exec cat'\n")
        screen.read_to("begun here\r\n")
        screen.type("\x1a")
        screen.read_to("Stopped")
        screen.read_to("prompt> ")
        screen.type("fg\n")
        screen.read_to("cat'\r\n")
        screen.type("word\n")
        screen.read_to("word\r\nword\r\n")
        screen.type("\x04")
        screen.read_to("prompt> ")
        screen.type("echo code=$?\n")
        screen.read_to("code=0")
