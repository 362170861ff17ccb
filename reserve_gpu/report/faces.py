"""How a hint is typed where it is read: in a notebook, in a shell, in Python."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from reserve_gpu.calls import no_fork
from reserve_gpu.model import MIB, UNITS, Lease, Request

COMMAND_LIMIT = 200  # characters; a longer one is not repeated
COMMAND = "COMMAND ..."
SECONDS = {"d": 86400, "h": 3600, "m": 60}


class Face(NamedTuple):
    """One of the ways in which people ask for a GPU.

    program: what a line begins with; empty for Python's `reserve()`. command: what follows `--`.
    place: what a reservation belongs to there, in a word; empty where it ends without one.
    """

    program: str
    place: str
    command: str = ""

    @property
    def here(self) -> str:
        """How the process is called there: `this kernel`."""
        return f"this {self.place or 'process'}"

    @property
    def sight(self) -> str:
        """What a GPU is visible to there, in a word: `notebook`; empty as place is."""
        return {"kernel": "notebook"}.get(self.place, self.place)

    def typed(self, request: Request, *, waits: bool = False) -> str:
        """What to type for that request. waits: with the wish to wait in the queue."""
        if not self.program:
            wishes = [*_arguments(request), *(["wait='1h'"] if waits else [])]
            return f"reserve_gpu.reserve({', '.join(wishes)})"
        words = [self.program, *_words(request), *(["--wait"] if waits else [])]
        return " ".join([*words, *(["--", self.command] if self.command else [])])


MAGIC = Face("%reserve_gpu", "kernel")
PYTHON = Face("", "process")
SHELL = Face("reserve-gpu run", "", COMMAND)


def shell(command: list[str]) -> Face:
    """That of a shell in which a command was typed."""
    line = " ".join(map(_quoted, command))
    is_short = len(line) <= COMMAND_LIMIT and line.isprintable()
    return SHELL._replace(command=line if is_short else COMMAND)


def _words(request: Request) -> Iterator[str]:
    """The request as the magic and the command line take it."""
    yield from map(_quoted, request.devices)
    if request.count and not request.devices:
        yield f"-n {request.count}"
    if request.min_memory_mib:
        yield f"--min-memory {_size(request.min_memory_mib, request.memory_unit)}"
    if request.model:
        yield _option("--name", request.model)
    if request.exclude:
        yield f"--exclude {' '.join(map(_quoted, request.exclude))}"
    if request.part_mib is not None:
        yield f"--memory {_size(request.part_mib, request.promise.part_unit)}"
    elif request.share:
        yield "--share"
    if request.promise.note and request.promise.note.isprintable():
        yield _option("--note", request.promise.note)
    for keyword, value in _lease(request.promise.lease):
        flag = keyword.strip("_").replace("_", "-")
        yield f"--{flag} {_quoted(value)}" if value else f"--{flag}"


def _option(flag: str, value: str) -> str:
    """An option with its value, also with one that looks like an option."""
    return f"{flag}{'=' if value.startswith('-') else ' '}{_quoted(value)}"


def _quoted(word: str) -> str:
    with no_fork:
        import shlex  # which who gets a GPU never needs

    return shlex.quote(word)


def _arguments(request: Request) -> Iterator[str]:
    """The same as `reserve()` takes it."""
    if request.devices:
        yield repr(",".join(request.devices))
    if request.count and not request.devices:
        yield f"count={request.count}"
    if request.min_memory_mib:
        yield f"min_memory={_size(request.min_memory_mib, request.memory_unit)!r}"
    if request.model:
        yield f"name={request.model!r}"
    if request.exclude:
        yield f"exclude={','.join(request.exclude)!r}"
    if request.part_mib is not None:
        yield f"memory={_size(request.part_mib, request.promise.part_unit)!r}"
    elif request.share:
        yield "share=True"
    if request.promise.note:
        yield f"note={request.promise.note!r}"
    for keyword, value in _lease(request.promise.lease):
        yield f"{keyword}={value or True!r}"


def _lease(lease: Lease) -> Iterator[tuple[str, str]]:
    """Until when, by the keywords of `reserve()`; a flag has an empty value."""
    if lease.lasts_s is not None:
        yield "for_", _seconds(lease.lasts_s)
    if lease.until is not None:
        yield "until", time.strftime("%Y-%m-%d %H:%M", time.localtime(lease.until))
    if lease.idle_s is not None:
        yield "idle", _seconds(lease.idle_s)
    if lease.if_wanted:
        yield "if_wanted", ""
    if lease.end_kernel:
        yield "end_kernel", ""


def _seconds(seconds: float) -> str:
    """`4h`, `90m`, `45s`: the largest unit in which it is a whole number."""
    fitting = (
        unit for unit, length in SECONDS.items() if seconds >= length and not seconds % length
    )
    unit = next(fitting, "s")
    return f"{seconds / SECONDS.get(unit, 1):.12g}{unit}"


def _size(mib: float, unit: str) -> str:
    """`16GB`: in the unit that was typed, and not rounded: it asks for just as much."""
    return f"{mib * MIB / UNITS[unit]:.12g}{unit}"
