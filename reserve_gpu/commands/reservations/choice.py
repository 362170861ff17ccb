"""Which of a user's reservations words mean; `list`, `join` and `release` share it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from reserve_gpu.commands.output import Output
from reserve_gpu.gpus import names
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.option import Option
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import reservation_list as said
from reserve_gpu.render import status_view
from reserve_gpu.reservation import remote_release
from reserve_gpu.reservation.remote_release import Choice
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import Reserved

NOT_RELEASED = 75  # EX_TEMPFAIL
WHICH = Option("which WHICH", "a GPU (0), a notebook (train.ipynb) or a pid (4321)", nargs="*")
JSON = Option("--json", "for programs")


def choices(words: Sequence[str], every: Sequence[Reserved], command: str) -> list[Choice]:
    """Return the reservations that are meant; without a word the only one. Raises RequestError."""
    now = time.time()
    chosen: dict[int | None, Choice] = {}
    pids = {each.holder.listed_pid for each in every}
    if not (every or words):
        raise RequestError(said.NONE)
    for word in words or [""]:
        meant = [choice for each in every if (choice := _meant(word, each, pids))]
        # A joined process is meant only if its host is not.
        meant = [each for each in meant if not each.reserved.holder.beside] or meant
        if not meant:
            raise RequestError(said.no_such(sanitize(word), every, command, now))
        if len(meant) > 1:
            raise RequestError(said.which([each.reserved for each in meant], command, now))
        chosen.setdefault(meant[0].reserved.holder.listed_pid, meant[0])
    return [*chosen.values()]


def _meant(word: str, reserved: Reserved, pids: set[int | None]) -> Choice | None:
    """Return the choice if a word names a reservation: by a device, its pid, or its names.

    The user may have read the pid before the kernel restarted. pids: Those of all
    reservations. They go before the pid that a kernel had.
    """
    rows, holder = reserved.rows, reserved.holder
    known_pids = remote_release.pids_of(holder) - (pids - {holder.listed_pid})
    if not word or word in map(str, known_pids):
        return Choice(reserved, rows)
    if names.is_name(word):
        rows = tuple(
            row
            for row in rows
            if any(names.matching(name, [row.device]) for name in names.parse(word))
        )
        proven = tuple(row for row in rows if remote_release.is_proven(reserved, row))
        return Choice(reserved, proven or rows, is_unproven=not proven) if rows else None
    notebook, command_ = holder.notebook or "", holder.record.who.command or ""
    if word in {notebook, notebook.removesuffix(".ipynb")}:
        return Choice(reserved, rows, notebook)
    is_command = not word.isdecimal() and word in {command_, *command_.split()}
    return Choice(reserved, rows) if is_command else None


def to_dict(each: Reserved, now: float) -> dict[str, Any]:
    """Return a reservation as programs read it."""
    return {
        **status_view.holder_dict(each.holder, now),
        "devices": [row.label for row in each.rows],
    }


def to_json(values: dict[str, Any], *, is_done: bool = True) -> Output:
    """Return values as JSON, next to the machine and the time."""
    about = {"version": status_view.VERSION, "host": procfs.machine_name(), "time": time.time()}
    code = 0 if is_done else NOT_RELEASED
    return Output(json.dumps({**about, **values}, indent=2), code, "json")
