"""reserve-gpu list, join and release: what a user has on this machine, from elsewhere."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu import machine, this_process
from reserve_gpu.calls import Late
from reserve_gpu.core import api, elsewhere, looking
from reserve_gpu.errors import DriverError, LockError, RequestError, shown
from reserve_gpu.gpus import names
from reserve_gpu.model import Answer, Device, Reserved
from reserve_gpu.report import about_reservations as said

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection, Sequence

    from reserve_gpu import command
    from reserve_gpu.model import Row
else:
    command = Late("command")


NOT_RELEASED = 75  # EX_TEMPFAIL
ROOT = 0
DONE = (Answer.RELEASED, Answer.ENDED, Answer.GONE)


def listed(_arguments: Namespace) -> str:
    """Return a line for each reservation of this user."""
    every, now = of_user(), time.time()
    return "\n".join(said.line(each, now) for each in every) or said.NONE


def join(arguments: Namespace) -> NoReturn:
    """Join a reservation of this user's, and become a command, by default the user's shell.

    Raises RequestError where it is not clear which is meant; CommandError.
    """
    if len(arguments.which) > 1:
        raise RequestError(said.WITHOUT_SIGN)
    words = arguments.command or [os.environ.get("SHELL") or "/bin/sh"]
    program = command.find(words)
    this_process.call_it(this_process.command(words) or "")
    command.say(api.join(chosen(arguments.which)))
    command.set_alarm(is_timed=False, is_quiet=False)
    command.become(program, words)


def chosen(words: Sequence[str], typed: str = "reserve-gpu join") -> Reserved:
    """Return the one reservation of this user's, in another process, that is meant.

    typed: what stands before its name. Raises RequestError.
    """
    own = {os.getpid(), *(left.heir for left in api.all_left())}
    every = [each for each in of_user() if each.holder.pid not in own and not each.holder.beside]
    (reserved,) = _chosen(words[:1], every, typed)
    return reserved


def release(arguments: Namespace) -> tuple[str, int]:
    """Have other processes release what they hold; returns what to tell, and the exit code.

    Raises RequestError where it is not clear which are meant.
    """
    if arguments.all and arguments.which:
        raise RequestError("Give names, or --all.")
    every = _of_anybody() if os.geteuid() == ROOT else of_user()
    chosen = every if arguments.all else _chosen(arguments.which, every, "reserve-gpu release")
    by_name = {each.holder.notebook for each in chosen} & {*arguments.which}
    answers = [(each, _act(each, arguments.end, by_name)) for each in chosen]
    lines = [said.released(each, answer, every) for each, answer in answers]
    done = [each for each, answer in answers if answer in DONE]
    rest = said.still_there(done, _rows()) if done else []
    is_done = len(done) == len(answers) and not rest
    return "\n".join([*lines, *rest]) or said.NONE, 0 if is_done else NOT_RELEASED


def _act(reserved: Reserved, is_end: bool, by_name: Collection[str | None]) -> Answer:  # noqa: FBT001
    if is_end:
        return elsewhere.end(reserved, by_name=reserved.holder.notebook in by_name)
    return elsewhere.release(reserved)


def of_user() -> list[Reserved]:
    """Return what this user has on this machine. Raises LockError."""
    return [each for each in _of_anybody() if machine.is_own(each.holder)]


def _of_anybody() -> list[Reserved]:
    return [each for each in Reserved.among(_rows()) if each.holder.seen]


def _rows() -> tuple[Row, ...]:
    """Return the devices that somebody has reserved, also where the driver does not answer."""
    try:
        status = looking.status()
    except DriverError:
        return machine.reserved_without_driver()
    if status.problem:
        raise LockError(status.problem)
    return status.rows


def _chosen(words: Sequence[str], every: Sequence[Reserved], command: str) -> list[Reserved]:
    """Return the reservations that are meant; without a word the only one. Raises RequestError."""
    now, chosen = time.time(), []
    if not (every or words):
        raise RequestError(said.NONE)
    for word in words or [""]:
        meant = [each for each in every if not word or _is_meant(word, each)]
        meant = [each for each in meant if not each.holder.beside] or meant  # not their guests
        if not meant:
            raise RequestError(said.no_such(shown(word), every, command, now))
        if len(meant) > 1:
            raise RequestError(said.which(meant, command, now))
        chosen += [each for each in meant if each not in chosen]
    return chosen


def _is_meant(word: str, reserved: Reserved) -> bool:
    """Tell whether a word is a device's name, the notebook's name, or the pid of a reservation.

    The look that showed its pid may be of before the restart of a kernel.
    """
    devices = [row.device for row in reserved.rows if isinstance(row.device, Device)]
    with suppress(RequestError):  # it names no device
        if any(names.matching(name, devices) for name in names.parse(word)):
            return True
    who = reserved.holder.record.who
    notebook, command_ = who.notebook or "", who.command or ""
    pids = map(str, elsewhere.pids_of(reserved.holder))
    names_ = {*pids, notebook, notebook.removesuffix(".ipynb")}
    return word in {*names_, command_, *command_.split()}
