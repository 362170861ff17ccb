"""Child processes that answer in lines of JSON: all at once, with a limit, none left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

POLL_S = 0.05
KILL_LIMIT_S = 5  # a process that is killed is gone at once, unless it hangs in its driver
ANSWERS = "{answers}"  # in a command: stands for the descriptor to answer on
PIPE_BYTES = 1 << 16  # what a pipe holds (man 7 pipe); an answer takes far less
READS = 64  # at a time, of a child that prints without end
KEPT_BYTES = 4096  # at the end of a child's output


class End(NamedTuple):
    """What a child has answered, all its lines in one, and how it ended.

    code: its exit code, or minus the signal that killed it; None where the time was over.
    output: the end of what it printed.
    """

    news: dict[str, Any]
    code: int | None
    output: str


class Child:
    """A running child. Raises OSError where it can't be started."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        import subprocess

        self._output = b""
        self._answers, child_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [str(child_end) if word == ANSWERS else word for word in command],
                env=dict(environ),
                pass_fds=[child_end],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is not for it; and its children can be killed too
            )
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(child_end)
        for descriptor in (self._answers, self._process.stdout.fileno()):  # type: ignore[union-attr]
            os.set_blocking(descriptor, False)

    def has_ended(self) -> bool:
        """Read what it has printed; whether it has ended.

        It stays a zombie, so that its process group can't become that of others, whom `end` would
        kill.
        """
        try:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            has_ended = os.waitid(os.P_PID, self._process.pid, how) is not None
        except ChildProcessError:  # SIGCHLD is ignored here, or somebody waits for all children
            has_ended = True
        for _ in range(READS):
            if not (printed := self._process.stdout.read(PIPE_BYTES)):  # type: ignore[union-attr]
                break
            self._output = (self._output + printed)[-KEPT_BYTES:]
        return has_ended

    def end(self, *, is_over: bool = False) -> End:
        """Kill it, if need be, and all that it has started. is_over: its time was over."""
        import subprocess

        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = None
        with suppress(subprocess.TimeoutExpired):  # it hangs in its driver, which no signal ends
            code = self._process.wait(KILL_LIMIT_S)
        answers = b""
        with suppress(BlockingIOError):  # something that it started may still have the other end
            answers = os.read(self._answers, PIPE_BYTES)
        os.close(self._answers)
        self._process.stdout.close()  # type: ignore[union-attr]
        output = self._output.decode("utf-8", "replace")
        return End(_merged(answers), None if is_over else code, output)


def run_all(
    commands: Mapping[str, Sequence[str]],
    environ: Mapping[str, str],
    limit_s: float,
    progress: Callable[[Sequence[str], float], object],
) -> dict[str, End]:
    """Run the commands at the same time, to their end or the limit.

    commands: by name; ANSWERS in them stands for the descriptor to answer on.
    limit_s: seconds that each may take.
    progress: called now and then with the names of those that still run, and the seconds so far.
    Raises OSError where a process can't be started.
    """
    start, running, ends = time.monotonic(), dict[str, Child](), dict[str, End]()
    with interrupts.deferred():  # not between the start of a child and our knowing of it
        try:
            for name, command in commands.items():
                running[name] = Child(command, environ)
            while running:
                waited_s = time.monotonic() - start
                for name, child in list(running.items()):
                    has_ended = child.has_ended()
                    if has_ended or waited_s > limit_s:
                        ends[name] = running.pop(name).end(is_over=not has_ended)
                with interrupts.allowed():
                    progress(list(running), waited_s)
                    time.sleep(POLL_S)
        finally:
            for child in running.values():
                child.end()
    return {name: ends[name] for name in commands}


def _merged(answers: bytes) -> dict[str, Any]:
    """The objects in lines of JSON as one; other lines are ignored."""
    merged: dict[str, Any] = {}
    for line in answers.splitlines():
        with suppress(ValueError):
            news = json.loads(line)
            merged |= news if isinstance(news, dict) else {}
    return merged
