"""`reserve-gpu list`: what this user has reserved on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.commands.output import Output
from reserve_gpu.commands.reservations import choice
from reserve_gpu.model.option import add
from reserve_gpu.render import reservation_list as said
from reserve_gpu.reservation.remote_release import of_user

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `list`."""
    add((choice.JSON,), parser)


def run(arguments: Namespace) -> Output:
    """Return a line for each reservation of this user."""
    every, now = of_user(), time.time()
    if arguments.json:
        return choice.to_json({"reservations": [choice.to_dict(each, now) for each in every]})
    return Output("\n".join(said.line(each, now) for each in every) or said.NONE)
