"""Select reservations by the names on a command line, and describe reservations as JSON."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from reserve_gpu.commands.output import Output
from reserve_gpu.gpus import names
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.option import Option
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import reservation_list, status_view
from reserve_gpu.reservation import remote_release
from reserve_gpu.reservation.remote_release import Choice
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.model.holders import Reserved

NOT_RELEASED = 75  # exit code EX_TEMPFAIL
WHICH = Option("which WHICH", "a GPU (0), notebook (train.ipynb) or process ID (4321)", nargs="*")
JSON = Option("--json", "print JSON")


def choices(words: Sequence[str], reservations: Sequence[Reserved], command: str) -> list[Choice]:
    """Return the named reservations. Without any names, return the only reservation.

    Args:
        words: The names, which can be devices, notebooks, commands, or process IDs.
        reservations: The reservations to choose from.
        command: The part of the command line before the names, for error messages.

    Raises:
        RequestError: A name does not match exactly one reservation, or no name is given and there
            is not exactly one reservation.
    """
    now = time.time()
    chosen: dict[int | None, Choice] = {}
    pids = {each.holder.listed_pid for each in reservations}
    if not (reservations or words):
        raise RequestError(reservation_list.NONE)
    for word in words or [""]:
        matches = [choice for each in reservations if (choice := _match(word, each, pids))]
        # A holder takes precedence over the processes that have joined its reservation.
        matches = [each for each in matches if not each.reserved.holder.beside] or matches
        if not matches:
            are_own = all(each.holder.uid in (None, os.geteuid()) for each in reservations)
            raise RequestError(
                reservation_list.no_match(
                    sanitize(word), reservations, command, now, are_own=are_own
                )
            )
        if len(matches) > 1:
            candidates = [each.reserved for each in matches]
            raise RequestError(reservation_list.ambiguous(candidates, command, now))
        chosen.setdefault(matches[0].reserved.holder.listed_pid, matches[0])
    return [*chosen.values()]


def _match(word: str, reserved: Reserved, pids: set[int | None]) -> Choice | None:
    """Return a `Choice` if a word names this reservation, otherwise None.

    After a kernel restarts, its previous process ID still names its reservation, unless another
    holder now has that ID.

    Args:
        word: A device, process ID, notebook, or command. An empty word matches any reservation.
        reserved: The reservation.
        pids: The current process IDs of all holders.
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
    """Return a reservation as a dictionary for JSON output."""
    return {
        **status_view.holder_dict(each.holder, now),
        "devices": [row.label for row in each.rows],
    }


def to_json(values: dict[str, Any], *, is_done: bool = True) -> Output:
    """Return a result as JSON output, with the format version, the machine's name, and the time.

    Args:
        values: The result's fields.
        is_done: Whether everything was released. If not, the exit code is `NOT_RELEASED`.
    """
    header = {"version": status_view.VERSION, "host": procfs.machine_name(), "time": time.time()}
    code = 0 if is_done else NOT_RELEASED
    return Output(json.dumps({**header, **values}, indent=2), code, "json")
