"""How a hint is typed where it is read: in a notebook, in a shell, in Python."""

import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from reserve_gpu.model import errors
from reserve_gpu.model.devices import MIB
from reserve_gpu.model.requests import UNITS, Request, Size
from reserve_gpu.system import ipython_shell
from reserve_gpu.system.forks import no_fork

COMMAND_LIMIT = 200  # characters; a longer one is not repeated
COMMAND = "COMMAND ..."
SECONDS = {"d": 86400, "h": 3600, "m": 60}


class Frontend(NamedTuple):
    """One of the ways in which people ask for a GPU.

    program: the first word of a line; empty for Python's `reserve()`. command: what follows `--`.
    place: what holds the reservation, in a word: `kernel`; empty for a command in a shell.
    is_for_program: nobody sits there, and what is named as a way out may be typed at once.
    """

    program: str
    place: str
    command: str = ""
    is_for_program: bool = False

    @property
    def here(self) -> str:
        """Return what this process is called there: `this kernel`."""
        return f"this {self.place or 'process'}"

    @property
    def sight(self) -> str:
        """Return what a GPU is visible to there, in a word: `notebook`; empty if place is."""
        return {"kernel": "notebook"}.get(self.place, self.place)

    def typed(self, request: Request, *, waits: bool = False) -> str:
        """Return what to type for that request. waits: with the option to wait in the queue."""
        if not self.program:
            wishes = [*_arguments(request), *(["wait='1h'"] if waits else [])]
            return f"reserve_gpu.reserve({', '.join(wishes)})"
        # Callers of programs end them after some minutes; who comes back keeps the place.
        wait = "--wait 5m" if self.is_for_program else "--wait"
        program, *rest = self.program.split()
        if program == errors.PROGRAM:
            program = errors.own_command()
        words = [program, *rest, *_words(request), *([wait] if waits else [])]
        return " ".join([*words, *(["--", self.command] if self.command else [])])


MAGIC = Frontend("%reserve_gpu", "kernel")
PYTHON = Frontend("", "process")
SHELL = Frontend("reserve-gpu run", "", COMMAND)


def shell(command: list[str]) -> Frontend:
    """Return the front end of a shell in which a command was typed, or none."""
    line = " ".join(map(_quoted, command))
    is_short = 0 < len(line) <= COMMAND_LIMIT and line.isprintable()
    return SHELL._replace(command=line if is_short else COMMAND)


def is_watched() -> bool:
    """Return whether a person reads this IPython, in a terminal or a notebook.

    Clients that run notebooks unattended can't answer a question: nbclient (`jupyter execute`,
    `nbconvert --execute`, papermill) and ipyparallel. They keep the last state of a display, or all
    of its states. https://jupyter-client.readthedocs.io/en/stable/messaging.html#execute
    """
    shell = ipython_shell.current_shell()
    if not hasattr(shell, "get_parent"):  # a terminal, or a kernel of another make
        return True
    return bool(shell.get_parent().get("content", {}).get("allow_stdin"))


def read_here(frontend: Frontend) -> Frontend:
    """Return the front end as it is read in this process: by a person, or by a program."""
    is_in_kernel = ipython_shell.has_kernel()
    is_person = is_watched() if is_in_kernel else bool(sys.stdin and sys.stdin.isatty())
    return frontend._replace(is_for_program=not (is_person or errors.is_beside_cells))


def _words(request: Request) -> Iterator[str]:
    """Yield the request as the magic and the command line take it."""
    for keyword, value in _wishes(request).items():
        flag = "--" + keyword.strip("_").replace("_", "-")
        if keyword == "devices":
            yield from map(_quoted, value)
        elif keyword == "count":
            yield f"-n {value}"
        elif value is True:
            yield flag
        elif value.isprintable():  # a note may have line breaks
            yield f"{flag}{'=' if value.startswith('-') else ' '}{_quoted(value)}"


def _arguments(request: Request) -> Iterator[str]:
    """Yield the request as `reserve()` takes it."""
    for keyword, value in _wishes(request).items():
        text = ",".join(value) if isinstance(value, tuple) else value
        yield repr(text) if keyword == "devices" else f"{keyword}={text!r}"


def _wishes(request: Request) -> dict[str, Any]:
    """Return what the request asks for, by the keywords of `reserve()`; a flag has True."""
    terms, lease = request.terms, request.terms.lease
    values = {
        "devices": request.devices,
        "count": None if request.devices else request.count,
        "min_memory": request.min_memory_mib and _size(request.min_memory_mib, request.memory_unit),
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
        import shlex  # which who gets a GPU never needs

    return shlex.quote(word)


def _seconds(seconds: float) -> str:
    """Return `4h`, `90m`, `45s`: the largest unit in which it is a whole number."""
    fitting = (
        unit for unit, length in SECONDS.items() if seconds >= length and not seconds % length
    )
    unit = next(fitting, "s")
    return f"{seconds / SECONDS.get(unit, 1):.12g}{unit}"


def _part(size: Size) -> str:
    return _size(size.mib, size.unit) if size.percent is None else f"{size.percent:.12g}%"


def _size(mib: float, unit: str) -> str:
    """Return `16GB`: in the unit that was typed, and not rounded: it asks for just as much."""
    return f"{mib * MIB / UNITS[unit]:.12g}{unit}"
