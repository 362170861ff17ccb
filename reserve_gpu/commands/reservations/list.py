"""The `list` command: show the user's reservations on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.commands.output import Output
from reserve_gpu.commands.reservations import choice
from reserve_gpu.model.option import add
from reserve_gpu.render import reservation_list
from reserve_gpu.reservation.remote_release import reservations_of_user

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the `list` command's arguments."""
    add((choice.JSON,), parser)


def run(arguments: Namespace) -> Output:
    """Return one line or one JSON object for each of the user's reservations."""
    reservations, now = reservations_of_user(), time.time()
    if arguments.json:
        rows = [choice.to_dict(each, now) for each in reservations]
        return choice.to_json({"reservations": rows})
    lines = [reservation_list.line(each, now) for each in reservations]
    return Output("\n".join(lines) or reservation_list.NONE)
