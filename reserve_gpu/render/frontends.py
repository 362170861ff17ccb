"""Frontends for requesting a GPU, and the commands that users type in them."""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from reserve_gpu.model import errors
from reserve_gpu.model.devices import MIB
from reserve_gpu.model.requests import UNITS, Request, Size
from reserve_gpu.system import ipython_shell, settings
from reserve_gpu.system.forks import no_fork

COMMAND_LIMIT = 200  # characters; messages show COMMAND instead of a longer command
COMMAND = "COMMAND ..."
SECONDS = {"d": 86400, "h": 3600, "m": 60}


class Frontend(NamedTuple):
    """A way to request a GPU: the IPython magic, the command line, or a Python call.

    Attributes:
        program: The first words of a command line. Empty for `reserve()` in Python.
        place: The word for this process, such as `kernel`. Empty for a shell command.
        command: The shell command that follows `--`.
        is_for_program: Whether a program reads the messages. A program might run a suggested
            command immediately.
    """

    program: str
    place: str
    command: str = ""
    is_for_program: bool = False

    @property
    def here(self) -> str:
        """Return the phrase for this process in a message, such as `this kernel`."""
        return f"this {self.place or 'process'}"

    @property
    def sight(self) -> str:
        """Return the word for what is using the GPU, such as `notebook`; empty for a command."""
        return {"kernel": "notebook"}.get(self.place, self.place)

    def typed(self, request: Request, *, waits: bool = False) -> str:
        """Return the command that a user types to make a request.

        Args:
            request: The request.
            waits: Whether to add the option for waiting in the queue.
        """
        if not self.program:
            arguments = [*_arguments(request), *(["wait='1h'"] if waits else [])]
            return f"reserve_gpu.reserve({', '.join(arguments)})"
        # A coding agent's tools often time out after a few minutes. A waiter that returns soon
        # keeps its position in the queue, so a program is told to wait a few minutes at a time.
        wait = "--wait 5m" if self.is_for_program else "--wait"
        program, *rest = self.program.split()
        if program == errors.PROGRAM:
            program = errors.program_command()
        words = [program, *rest, *_words(request), *([wait] if waits else [])]
        return " ".join([*words, *(["--", self.command] if self.command else [])])


MAGIC = Frontend("%reserve_gpu", "kernel")
PYTHON = Frontend("", "process")
SHELL = Frontend("reserve-gpu run", "", COMMAND)


def shell(command: list[str]) -> Frontend:
    """Return the frontend for a shell command. The command can be an empty string."""
    line = " ".join(map(_quoted, command))
    is_short = 0 < len(line) <= COMMAND_LIMIT and line.isprintable()
    return SHELL._replace(command=line if is_short else COMMAND)


def is_watched() -> bool:
    """Return whether a person can see this IPython session's output in a terminal or notebook.

    Clients that run notebooks unattended send `allow_stdin=False`. Examples are ipyparallel and
    nbclient, which `jupyter execute`, `nbconvert --execute` and papermill use. These clients save
    either the last state of a display or every state.
    https://jupyter-client.readthedocs.io/en/stable/messaging.html#execute
    """
    shell = ipython_shell.current_shell()
    if not hasattr(shell, "get_parent"):  # IPython in a terminal, or a kernel other than ipykernel
        return True
    return bool(shell.get_parent().get("content", {}).get("allow_stdin"))


def for_this_process(frontend: Frontend) -> Frontend:
    """Return the frontend with `is_for_program` set unless a person reads this process's output."""
    is_in_kernel = ipython_shell.has_kernel()
    is_person = is_watched() if is_in_kernel else bool(sys.stdin and sys.stdin.isatty())
    is_person = is_person and not os.environ.get(settings.AGENT)
    return frontend._replace(is_for_program=not (is_person or errors.shows_cell_syntax))


def _words(request: Request) -> Iterator[str]:
    """Yield the request's arguments for the magic or the command line."""
    for keyword, value in _options(request).items():
        flag = "--" + keyword.strip("_").replace("_", "-")
        if keyword == "devices":
            yield from map(_quoted, value)
        elif keyword == "count":
            yield f"-n {value}"
        elif value is True:
            yield flag
        elif value.isprintable():  # leave out a note that contains line breaks
            yield f"{flag}{'=' if value.startswith('-') else ' '}{_quoted(value)}"


def _arguments(request: Request) -> Iterator[str]:
    """Yield the request's arguments for `reserve()`."""
    for keyword, value in _options(request).items():
        text = ",".join(value) if isinstance(value, tuple) else value
        yield repr(text) if keyword == "devices" else f"{keyword}={text!r}"


def _options(request: Request) -> dict[str, Any]:
    """Return the request's options, keyed by the names of `reserve()` arguments.

    The value of a flag is True.
    """
    terms, lease = request.terms, request.terms.lease
    values = {
        "devices": request.devices,
        "count": None if request.devices else request.count,
        "min_memory": request.min_memory_mib
        and typed_size(request.min_memory_mib, request.memory_unit),
        "name": request.model,
        "memory": terms.size and _part(terms.size),
        "note": terms.note,
        "for_": lease.lasts_s and _seconds(lease.lasts_s),
        "until": lease.until and time.strftime("%Y-%m-%d %H:%M", time.localtime(lease.until)),
        "idle": lease.idle_s and _seconds(lease.idle_s),
        "if_wanted": lease.if_wanted,
        "end_kernel": lease.end_kernel,
    }
    return {keyword: value for keyword, value in values.items() if value}


def _quoted(word: str) -> str:
    with no_fork:
        import shlex  # only needed for messages that contain a command

    return shlex.quote(word)


def _seconds(seconds: float) -> str:
    """Format seconds as `4h`, `90m` or `45s`, in the largest unit that gives a whole number."""
    fitting = (
        unit for unit, length in SECONDS.items() if seconds >= length and not seconds % length
    )
    unit = next(fitting, "s")
    return f"{seconds / SECONDS.get(unit, 1):.12g}{unit}"


def _part(size: Size) -> str:
    return typed_size(size.mib, size.unit) if size.percent is None else f"{size.percent:.12g}%"


def typed_size(mib: float, unit: str) -> str:
    """Format a size in the unit that the user typed, such as `16GB`, without rounding it."""
    return f"{mib * MIB / UNITS[unit]:.12g}{unit}"
