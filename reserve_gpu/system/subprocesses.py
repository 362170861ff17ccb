"""Other programs, asked all at once: each is heard until it has ended, or the time is over.

Also processes of our own that outlive the one that starts them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from reserve_gpu.system import executor, spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

POLL_S = 0.05
CHUNK = 1 << 16  # what a pipe holds (man 7 pipe)
BYTES_LIMIT = 4 << 20  # of what a program says: its end
ENDS_S = 1.0  # for a program, once its output has ended
KILL_LIMIT_S = 5.0  # a process that is killed is gone at once, unless it hangs in its driver


class Program:
    """A program that runs, and what it has said so far. Raises OSError where it can't be started.

    is_ssh: it is fed on stdin, and what it has started may serve others later on.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str] | None, *, is_ssh: bool
    ) -> None:
        self._process = subprocess.Popen(
            [spawn.program(command[0]), *command[1:]],
            env=environ,
            stdin=subprocess.PIPE if is_ssh else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is not for it, nor for a ControlMaster of ssh
        )
        self._is_ssh = is_ssh
        streams = (self._process.stdout, self._process.stderr)
        self._said: dict[IO[bytes], bytes] = {stream: b"" for stream in streams if stream}
        for stream in self._said:
            os.set_blocking(stream.fileno(), False)

    @property
    def said(self) -> tuple[bytes, bytes]:
        """Return what it has said on stdout and on stderr."""
        out, err = self._said.values()
        return out, err

    def feed(self, data: bytes) -> None:
        """Write to its stdin. Raises OSError."""
        if self._process.stdin:
            self._process.stdin.write(data)

    def has_ended(self) -> bool:
        """Take in what it says; tells whether it has ended, or has closed its stdout.

        Ask often: a program whose pipe is full does not go on. The end of stderr may never come:
        where ssh has left a connection for others, that keeps the pipe open.
        """
        has_ended = self._process.poll() is not None
        for stream, said in self._said.items():
            data = stream.read(CHUNK)  # None where there is nothing now
            self._said[stream] = (said + (data or b""))[-BYTES_LIMIT:]
            has_ended = has_ended or (stream is self._process.stdout and data == b"")
        return has_ended

    def code(self) -> int | None:
        """Return its exit code, or minus the signal that killed it; None if it does not end."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(ENDS_S)
        return None

    def end(self) -> None:
        """Kill it, if it still runs, and all that it has started."""
        if all(stream.closed for stream in self._said):
            return
        with suppress(ProcessLookupError):
            if self._is_ssh:
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # no signal ends what hangs in a driver
            self._process.wait(KILL_LIMIT_S)
        self.has_ended()
        for stream in (self._process.stdin, *self._said):
            if stream:
                stream.close()


@contextmanager
def started(
    commands: Mapping[str, Sequence[str]],
    environ: Mapping[str, str] | None = None,
    *,
    is_ssh: bool = False,
) -> Iterator[dict[str, Program]]:
    """Start the commands, by name, and end what is left of them. Raises OSError."""
    programs: dict[str, Program] = {}
    try:
        for name, command in commands.items():
            programs[name] = Program(command, environ, is_ssh=is_ssh)
        yield programs
    finally:
        for program in programs.values():
            program.end()


def heard(
    programs: Mapping[str, Program],
    limit_s: float,
    is_whole: Callable[[bytes], bool] = lambda _: False,
    show: Callable[[Sequence[str], float], object] = lambda *_: None,
) -> Iterator[str]:
    """Yield the name of each that has ended, or whose stdout is whole, within limit_s.

    show: called now and then with the names of those that still run, and the seconds so far.
    """
    start, left = time.monotonic(), {**programs}
    while left and (waited_s := time.monotonic() - start) <= limit_s:
        show([*left], waited_s)
        for name, program in [*left.items()]:
            if program.has_ended() or is_whole(program.said[0]):
                del left[name]
                yield name
        if left:
            executor.sleep(POLL_S)


def output(command: Sequence[str], limit_s: float, **environ: str) -> str:
    """Return what a program prints; empty if it is not there, or does not end within limit_s."""
    with suppress(OSError), started({"": command}, {**os.environ, **environ}) as running:
        for name in heard(running, limit_s):
            return running[name].said[0].decode(errors="replace")
    return ""


def leave(
    words: Sequence[str],
    descriptors: Sequence[int] = (),
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run Python, which leaves a background process without a terminal, in the root directory.

    words: Python's arguments. Raises OSError if it fails.
    """
    done = subprocess.run(
        spawn.python(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=spawn.environment() if environ is None else environ,
        pass_fds=descriptors,
        start_new_session=True,  # no Ctrl-C reaches it, nor the end of the terminal
        check=False,
    )
    if done.returncode:
        raise OSError(f"a process for that has failed with {done.returncode}")


def leave_to(module: str, about: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Leave a process that calls `main` of that module, which is imported only then.

    about: what it gets, as JSON. Raises OSError.
    """
    call = f"__import__({module!r}, fromlist=['main']).main(sys.argv[1])"
    leave(["-c", f"import os, sys; os.fork() or {call}", json.dumps(about)], descriptors)
