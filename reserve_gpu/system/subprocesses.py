"""Run several programs in parallel and read their output, or start a background process."""

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

POLL_S = 0.05  # seconds between checks for new output
CHUNK = 1 << 16  # default capacity of a pipe in bytes (man 7 pipe)
BYTES_LIMIT = 4 << 20  # maximum output to keep per stream, in bytes; older output is dropped
ENDS_S = 1.0  # seconds to wait for a program to exit after its output has ended
KILL_LIMIT_S = 5.0  # seconds to wait for a killed process, which might hang in a driver


class Program:
    """A running program and its output.

    Args:
        command: The command line.
        environ: The environment variables, or None to inherit this process's.
        is_ssh: Whether the program is ssh. If so, its stdin is a pipe, and `end` does not kill its
            child processes, because a ControlMaster might be serving other connections.

    Raises:
        OSError: The program can't be started.
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
            start_new_session=True,  # protects the program and ssh's ControlMaster from Ctrl-C
        )
        self._is_ssh = is_ssh
        streams = (self._process.stdout, self._process.stderr)
        self._output: dict[IO[bytes], bytes] = {stream: b"" for stream in streams if stream}
        for stream in self._output:
            os.set_blocking(stream.fileno(), False)

    @property
    def output(self) -> tuple[bytes, bytes]:
        """Return the output on stdout and stderr that has been read so far."""
        out, err = self._output.values()
        return out, err

    def feed(self, data: bytes) -> None:
        """Write to the program's stdin.

        Raises:
            OSError: The program has closed its stdin.
        """
        if self._process.stdin:
            self._process.stdin.write(data)

    def has_ended(self) -> bool:
        """Read the available output, and return whether the program has ended or closed stdout.

        Call this method often, because a program blocks when its pipe is full. The program's stderr
        might still be open, because a ControlMaster that ssh leaves behind does not close it.
        """
        has_ended = self._process.poll() is not None
        for stream, output in self._output.items():
            data = stream.read(CHUNK)  # None if no output is available
            self._output[stream] = (output + (data or b""))[-BYTES_LIMIT:]
            has_ended = has_ended or (stream is self._process.stdout and data == b"")
        return has_ended

    def code(self) -> int | None:
        """Return the exit code, or the negative number of the signal that killed the program.

        The result is None if the program does not exit within `ENDS_S`.
        """
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(ENDS_S)
        return None

    def end(self) -> None:
        """Kill the program and, unless it is ssh, its child processes."""
        if all(stream.closed for stream in self._output):
            return
        with suppress(ProcessLookupError):
            if self._is_ssh:
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(
            subprocess.TimeoutExpired
        ):  # a process that hangs in a driver call can't be killed
            self._process.wait(KILL_LIMIT_S)
        self.has_ended()
        for stream in (self._process.stdin, *self._output):
            if stream:
                stream.close()


@contextmanager
def run_programs(
    commands: Mapping[str, Sequence[str]],
    environ: Mapping[str, str] | None = None,
    *,
    is_ssh: bool = False,
) -> Iterator[dict[str, Program]]:
    """Run programs, and kill them when the context manager exits.

    Args:
        commands: The command lines, by name.
        environ: The environment variables, or None to inherit this process's.
        is_ssh: Whether all of the programs are ssh, as described in `Program`.

    Yields:
        The running programs, by name.

    Raises:
        OSError: A program can't be started.
    """
    programs: dict[str, Program] = {}
    try:
        for name, command in commands.items():
            programs[name] = Program(command, environ, is_ssh=is_ssh)
        yield programs
    finally:
        for program in programs.values():
            program.end()


def wait_for_output(
    programs: Mapping[str, Program],
    limit_s: float,
    is_whole: Callable[[bytes], bool] = lambda _: False,
    show: Callable[[Sequence[str], float], object] = lambda *_: None,
) -> Iterator[str]:
    """Yield the name of each program as soon as the program has ended or its output is complete.

    Args:
        programs: The running programs, by name.
        limit_s: Timeout in seconds. Programs that are still running then are not yielded.
        is_whole: A function that returns whether a program's output on stdout is complete.
        show: A function that is called regularly with the names of the programs that are still
            running, and the number of seconds since the start.
    """
    start, running = time.monotonic(), {**programs}
    while running and (waited_s := time.monotonic() - start) <= limit_s:
        show([*running], waited_s)
        for name, program in [*running.items()]:
            if program.has_ended() or is_whole(program.output[0]):
                del running[name]
                yield name
        if running:
            executor.sleep(POLL_S)


def read_output(command: Sequence[str], limit_s: float, **environ: str) -> str:
    """Run a program and return its output on stdout.

    Args:
        command: The command line.
        limit_s: Timeout in seconds.
        environ: Additional environment variables.

    Returns:
        The output. It is empty if the program can't be started or times out.
    """
    with suppress(OSError), run_programs({"": command}, {**os.environ, **environ}) as running:
        for name in wait_for_output(running, limit_s):
            return running[name].output[0].decode(errors="replace")
    return ""


def start_background(
    words: Sequence[str],
    descriptors: Sequence[int] = (),
    environ: Mapping[str, str] | None = None,
) -> None:
    """Run a Python program that forks a background process, and wait until the program exits.

    Both processes run in the root directory, without a terminal.

    Args:
        words: Python's command-line arguments.
        descriptors: The descriptors that the background process inherits.
        environ: The environment variables. By default, they let Python import this package.

    Raises:
        OSError: The program can't be started, or fails.
    """
    done = subprocess.run(
        spawn.python(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=spawn.environment() if environ is None else environ,
        pass_fds=descriptors,
        start_new_session=True,  # protects both processes from Ctrl-C and SIGHUP
        check=False,
    )
    if done.returncode:
        raise OSError(f"a background process failed with exit code {done.returncode}")


def start_background_module(
    module: str, about: Mapping[str, Any], descriptors: Sequence[int]
) -> None:
    """Start a background process that imports a module and calls its `main` function.

    Args:
        module: The name of the module.
        about: The argument to `main`, which is passed as JSON text.
        descriptors: The descriptors that the background process inherits.

    Raises:
        OSError: The background process can't be started.
    """
    call = f"__import__({module!r}, fromlist=['main']).main(sys.argv[1])"
    start_background(["-c", f"import os, sys; os.fork() or {call}", json.dumps(about)], descriptors)
