"""Child processes that answer in lines of JSON: all at once, with a limit, none left behind."""

from __future__ import annotations

import json
import os
import time
from _thread import start_new_thread
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from subprocess import Popen

POLL_S = 0.05
KILL_LIMIT_S = 5  # a process that is killed is gone at once, unless its driver hangs
ANSWER_LIMIT = 1 << 20  # bytes; nobody has that much to say
ANSWERS = "{answers}"  # in a command: the descriptor to answer on
KEPT = 4096  # bytes at the end of what a child writes to stderr


class End(NamedTuple):
    """What a child said, all its lines in one, and how it ended.

    code: its exit code, minus the signal that killed it, or None where the time was over.
    stderr: the end of it.
    """

    said: dict[str, Any]
    code: int | None
    stderr: str


class Child:
    """A running child. argv: ANSWERS in it stands for the descriptor to answer on."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        import subprocess

        self.said, self.stderr = b"", b""
        self.answers, answer_end = os.pipe()
        opened = [self.answers, answer_end]
        try:
            self.errors, error_end = os.pipe()
            opened += [self.errors, error_end]
            for end in (self.answers, self.errors):
                os.set_blocking(end, False)
            self.process: Popen[bytes] = subprocess.Popen(
                [str(answer_end) if part == ANSWERS else part for part in argv],
                env=dict(environ), pass_fds=[answer_end], stdin=subprocess.DEVNULL,
                stdout=error_end, stderr=error_end,
                start_new_session=True,  # Ctrl-C is for us; and all that it starts can be killed
            )  # fmt: skip
        except BaseException:
            _close(*opened)
            raise
        _close(answer_end, error_end)

    def is_running(self) -> bool:
        """Read what there is; False once the child has ended and everything is read."""
        # It stays a zombie until `end`, so that its process group can't become another's.
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            has_ended = os.waitid(os.P_PID, self.process.pid, how) is not None
        except ChildProcessError:  # SIGCHLD is ignored here, or somebody waits for all children
            has_ended = True
        self.said = (self.said + _read(self.answers))[:ANSWER_LIMIT]
        self.stderr = (self.stderr + _read(self.errors))[-KEPT:]
        return not has_ended

    def end(self, *, in_time: bool = True) -> End:
        """End the child, and what it has started."""
        import signal
        import subprocess

        try:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired:  # it hangs in its driver, where no signal reaches it
            code, in_time = 0, False
        finally:
            _close(self.answers, self.errors)
        return End(
            _merged(self.said), code if in_time else None, self.stderr.decode("utf-8", "replace")
        )


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
    """
    news: SimpleQueue[Any] = SimpleQueue()
    stop: list[bool] = []
    try:
        # On another thread, as Ctrl-C could come between the start of a child and our knowing it.
        start_new_thread(_watch, (commands, environ, limit_s, news.put, stop))
        while isinstance(told := news.get(), tuple):
            progress(*told)
    except BaseException:
        stop.append(True)
        with suppress(Empty):
            while isinstance(news.get(timeout=KILL_LIMIT_S), tuple):
                pass
        raise
    if isinstance(told, BaseException):
        raise told
    ended: dict[str, End] = told
    return ended


def _watch(
    commands: Mapping[str, Sequence[str]],
    environ: Mapping[str, str],
    limit_s: float,
    tell: Callable[[Any], object],
    stop: Sequence[bool],
) -> None:
    """Tell how things stand in tuples, and at last how all children ended, or what went wrong."""
    start = time.monotonic()
    running: dict[str, Child] = {}
    ended: dict[str, End] = {}
    last: Any = {}
    try:
        for name, argv in commands.items():
            running[name] = Child(argv, environ)
        while running and not stop:
            waited_s = time.monotonic() - start
            for name, child in list(running.items()):
                if not child.is_running():
                    ended[name] = running.pop(name).end()
                elif waited_s > limit_s:
                    ended[name] = running.pop(name).end(in_time=False)
            tell((list(running), waited_s))
            time.sleep(POLL_S)
        last = {name: ended[name] for name in commands if name in ended}
    except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
        last = error
    finally:
        for child in running.values():
            child.end()
        tell(last)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    """What can be read without waiting, of a child that writes without end a good part."""
    parts = []
    for _ in range(64):
        try:
            part = os.read(descriptor, 65536)
        except BlockingIOError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def _merged(said: bytes) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for line in said.splitlines():
        try:
            news = json.loads(line)
        except ValueError:
            continue
        if isinstance(news, dict):
            merged |= news
    return merged
