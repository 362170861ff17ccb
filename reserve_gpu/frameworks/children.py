"""Child processes that answer in lines of JSON: all at once, with a limit, none left behind."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from reserve_gpu import calls, foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

POLL_S = 0.05
KILL_LIMIT_S = 5  # a process that is killed is gone at once, unless it hangs in its driver
PIPE_BYTES = 1 << 16  # what a pipe holds (man 7 pipe); an answer takes far less


class End(NamedTuple):
    """What a child has answered, all its lines in one, and how it ended.

    code: its exit code, or minus the signal that killed it; None where the time was over.
    output: the end of what it printed on stderr.
    """

    news: dict[str, Any]
    code: int | None
    output: str


class Child:
    """A running child, which answers on stdout. Raises OSError where it can't be started."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        import subprocess

        self._process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is not for it; and its children can be killed too
        )
        self._printed: dict[IO[bytes], bytes] = {}
        for stream in filter(None, (self._process.stdout, self._process.stderr)):
            os.set_blocking(stream.fileno(), False)
            self._printed[stream] = b""

    def has_ended(self) -> bool:
        """Tell whether it has ended. Ask often: a child whose pipe is full does not go on."""
        self._read()
        return self._process.poll() is not None

    def end(self) -> End:
        """Kill it, if it still runs, and all that it has started."""
        import subprocess

        code = self._process.poll()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it hangs in its driver, which no signal ends
            self._process.wait(KILL_LIMIT_S)
        self._read()
        for stream in self._printed:
            stream.close()
        answers, output = self._printed.values()
        return End(_merged(answers), code, output.decode("utf-8", "replace"))

    def _read(self) -> None:
        for stream, printed in self._printed.items():
            # None where there is nothing to read now: who it has started may have the other end.
            self._printed[stream] = (printed + (stream.read(PIPE_BYTES) or b""))[-PIPE_BYTES:]


def run_all(
    commands: Mapping[str, Sequence[str]],
    environ: Mapping[str, str],
    limit_s: float,
    progress: Callable[[Sequence[str], float], object],
) -> dict[str, End]:
    """Run the commands, by name, at the same time, to their end or the limit.

    limit_s: seconds that each may take.
    progress: called now and then with the names of those that still run, and the seconds so far.
    Raises OSError where a process can't be started.
    """
    return calls.apart(_run_all, commands, environ, limit_s, show=lambda news: progress(*news))


def _run_all(
    commands: Mapping[str, Sequence[str]], environ: Mapping[str, str], limit_s: float
) -> dict[str, End]:
    start, running, ends = time.monotonic(), dict[str, Child](), dict[str, End]()
    try:
        for name, command in commands.items():
            running[name] = Child(command, environ)
        while running:
            waited_s = time.monotonic() - start
            for name, child in list(running.items()):
                if child.has_ended() or waited_s > limit_s:
                    ends[name] = running.pop(name).end()
            calls.tell((list(running), waited_s))
            calls.sleep(POLL_S)
    finally:
        for child in running.values():
            child.end()
    return ends


def _merged(answers: bytes) -> dict[str, Any]:
    """Return the objects in lines of JSON as one; other lines are ignored."""
    merged: dict[str, Any] = {}
    for line in answers.splitlines():
        with suppress(ValueError):
            news = foreign.parsed(line)
            merged |= news if isinstance(news, dict) else {}
    return merged
