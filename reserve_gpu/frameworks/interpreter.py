"""Which Python is asked: the one that runs this, or another one, and what is installed for it."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, NamedTuple

from reserve_gpu.errors import ImpossibleError, RequestError, shown
from reserve_gpu.frameworks import children, probes

if TYPE_CHECKING:
    from collections.abc import Sequence

PATH_LIMIT = 500  # characters of a path that are shown
OLDEST = (3, 8)  # that can run probes.py
# A program that is no Python does nothing with this: to a shell it is a syntax error.
VERSION = """print('{"version": [%d, %d]}' % __import__('sys').version_info[:2])"""


class Interpreter(NamedTuple):
    """A Python. frameworks: those that it can import. sys_path: where from; None for its own."""

    path: str
    frameworks: tuple[str, ...]
    sys_path: tuple[str, ...] | None = None


def this(frameworks: Sequence[str]) -> Interpreter:
    """The Python that runs this. Raises ImpossibleError where it doesn't know its own name."""
    if not sys.executable:
        raise ImpossibleError("A check needs a Python to start, and this one doesn't know its own.")
    entries: list[object] = [*sys.path]
    path = tuple(entry for entry in entries if isinstance(entry, str))  # as Python has it
    return Interpreter(sys.executable, (*filter(probes.is_installed, frameworks),), path)


def other(name: str, frameworks: Sequence[str], limit_s: float) -> Interpreter:
    """The Python with this path, or this name on PATH.

    limit_s: seconds that it may take to answer. Raises RequestError where it is none, or too old.
    """
    found = shutil.which(name)
    if found is None:
        raise RequestError(f"There is no program {_shown(name)!r} that this user may run.")
    path = os.path.abspath(found)
    version = _ask(path, ["-c", VERSION], "version", limit_s)
    if version < [*OLDEST]:
        has, needs = (".".join(map(str, numbers)) for numbers in (version, OLDEST))
        raise RequestError(f"{_shown(path)} is Python {has}; a check needs {needs} or newer.")
    installed = _ask(path, [probes.__file__, probes.INSTALLED, *frameworks], "installed", limit_s)
    return Interpreter(path, (*(each for each in frameworks if each in installed),))


def _ask(path: str, words: Sequence[str], key: str, limit_s: float) -> list[object]:
    """The list that the program answers. Raises RequestError where it answers none."""
    try:
        end = children.run_all({key: [path, *words]}, os.environ, limit_s, lambda *_: None)[key]
    except OSError as error:
        raise RequestError(f"{_shown(path)} can't be run: {error.strerror}.") from error
    answer = end.news.get(key)
    if isinstance(answer, list):
        return answer
    if end.code is None:
        raise RequestError(f"{_shown(path)} gave no answer within {limit_s:g} s.")
    raise RequestError(f"{_shown(path)} does not answer as a Python does.")


def _shown(path: str) -> str:
    return shown(path, PATH_LIMIT)
