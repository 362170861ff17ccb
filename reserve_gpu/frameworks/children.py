"""Child processes that answer in lines of JSON: all at once, with a limit, none left behind.

Each child is started and ended by a thread of its own. Ctrl-C interrupts the main thread alone, so
it can't come between the start of a child and the place where we know of it. And a child dies with
the thread that started it (see probes.py), which therefore waits for its end. A ThreadPoolExecutor
would not do: Ctrl-C while it takes one of its locks would leave that locked for ever.
"""

from __future__ import annotations

import json
import os
import signal
import time
from _thread import start_new_thread
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from subprocess import Popen

POLL_S = 0.05
KILL_LIMIT_S = 5  # a process that is killed is gone at once, unless it hangs in its driver
ANSWERS = "{answers}"  # in a command: stands for the descriptor to answer on
PIPE_BYTES = 1 << 16  # what a pipe holds (man 7 pipe); an answer takes far less
KEPT_BYTES = 4096  # at the end of a child's output


class End(NamedTuple):
    """What a child has answered, all its lines in one, and how it ended.

    code: its exit code, or minus the signal that killed it; None where the time was over.
    output: the end of what it printed.
    """

    news: dict[str, Any]
    code: int | None
    output: str


Message: TypeAlias = "tuple[str, End | Exception]"  # a child's name, and what came of it


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
    Raises OSError where a process can't be started, RuntimeError where no thread can be.
    """
    start, stop = time.monotonic(), Event()
    messages, running, ends = SimpleQueue[Message](), list[str](), dict[str, End]()

    def run(name: str) -> None:
        try:
            messages.put((name, _run(commands[name], environ, start + limit_s, stop)))
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            messages.put((name, error))

    try:
        for name in commands:
            running.append(name)
            start_new_thread(run, (name,))
        while running:
            progress(running, time.monotonic() - start)
            with suppress(Empty):
                name, end = messages.get(timeout=POLL_S)
                running.remove(name)
                if isinstance(end, Exception):
                    raise end
                ends[name] = end
    finally:
        stop.set()
        with suppress(Empty):  # each thread kills its child first
            while running:
                running.remove(messages.get(timeout=KILL_LIMIT_S + 1)[0])
    return ends


def _run(command: Sequence[str], environ: Mapping[str, str], deadline: float, stop: Event) -> End:
    """Run one child until it has ended, its time is over, or `stop` is set; then kill the rest.

    deadline: of the monotonic clock.
    """
    import subprocess

    answers, child_end = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [str(child_end) if word == ANSWERS else word for word in command],
                env=dict(environ),
                pass_fds=[child_end],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is not for it; and its children can be killed too
            )
        finally:
            os.close(child_end)
        output, is_over = _follow(process, deadline, stop)
        code = _kill(process)
        news = _merged(_read(answers))
    finally:
        os.close(answers)
    return End(news, None if is_over else code, output.decode("utf-8", "replace"))


def _follow(process: Popen[bytes], deadline: float, stop: Event) -> tuple[bytes, bool]:
    """Wait; returns the end of what the child printed, and whether its time was over."""
    with cast("IO[bytes]", process.stdout) as pipe:
        os.set_blocking(pipe.fileno(), False)
        output = b""
        while True:
            has_ended = _has_ended(process)  # before the last reading, which so misses nothing
            output = (output + (pipe.read(PIPE_BYTES) or b""))[-KEPT_BYTES:]
            if has_ended or stop.wait(POLL_S):
                return output, False
            if time.monotonic() > deadline:
                return output, True


def _has_ended(process: Popen[bytes]) -> bool:
    """Whether the child has ended; it stays a zombie.

    While it is one, its process group can't become that of others, whom `_kill` would kill.
    """
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # SIGCHLD is ignored here, or somebody waits for all children
        return True


def _kill(process: Popen[bytes]) -> int | None:
    """Kill the child and all that it has started; returns its exit code, None if it hangs."""
    import subprocess

    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(KILL_LIMIT_S)
    except subprocess.TimeoutExpired:  # no signal reaches it while it hangs in its driver
        return None


def _read(answers: int) -> bytes:
    """What the child has answered; something that it started may still have the other end."""
    os.set_blocking(answers, False)
    with suppress(BlockingIOError):
        return os.read(answers, PIPE_BYTES)
    return b""


def _merged(answers: bytes) -> dict[str, Any]:
    """The objects in lines of JSON as one; other lines are ignored."""
    merged: dict[str, Any] = {}
    for line in answers.splitlines():
        with suppress(ValueError):
            news = json.loads(line)
            merged |= news if isinstance(news, dict) else {}
    return merged
