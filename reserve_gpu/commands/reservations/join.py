"""`reserve-gpu join`, and `%reserve_gpu --join`: use what a notebook of this user's has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu import api
from reserve_gpu.commands.reservations import choice
from reserve_gpu.commands.run import command, reporter
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import RequestError, own_command
from reserve_gpu.model.option import add
from reserve_gpu.render import reservation_list as said
from reserve_gpu.reservation.remote_release import of_user
from reserve_gpu.system import process_identity

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from reserve_gpu.model.holders import Reserved

MORE = """\
Without a name your only reservation is joined, without a command your shell
is started. It has the same GPUs, the same part and the same variables. The
GPUs are taken as long as the notebook or the command lives.
"""
split = command.split_at_sign


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `join`."""
    parser.usage, parser.epilog = "reserve-gpu join [WHICH] [-- COMMAND ...]", MORE
    add((choice.WHICH,), parser)


def run(arguments: Namespace) -> NoReturn:
    """Join one of the user's reservations, and become a command, by default the user's shell.

    Raises RequestError if the words name no reservation, or several; CommandError.
    """
    if len(arguments.which) > 1:
        raise RequestError(said.without_sign())
    words = arguments.command or [os.environ.get("SHELL") or "/bin/sh"]
    program = command.find_own(words, ["join", *arguments.which])
    process_identity.call_it(process_identity.command(words) or "")
    reporter.say(api.join(chosen(arguments.which)))
    command.set_alarm(is_timed=False, is_quiet=False)
    command.become(program, words)


def run_in_notebook(arguments: Namespace) -> None:
    """Join a reservation of this user's with this kernel."""
    which = [arguments.join] if arguments.join else []
    print(api.join(chosen(which, "%reserve_gpu --join")))


def chosen(words: Sequence[str], typed: str = "") -> Reserved:
    """Return the reservation in another process of this user that the words name.

    Args:
        words: The words of the command line; the first one names the reservation.
        typed: The command before its name; by default `reserve-gpu join`.

    Raises:
        RequestError: If it names none, or several.
    """
    own = {os.getpid(), *(left.lock_keeper for left in api.all_left())}
    every = [each for each in of_user() if each.holder.pid not in own and not each.holder.beside]
    every = [each for each in every if any(isinstance(row.device, Device) for row in each.rows)]
    (found,) = choice.choices(words[:1], every, typed or f"{own_command()} join")
    return found.reserved
