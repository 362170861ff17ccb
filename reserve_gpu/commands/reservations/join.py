"""The `join` command and the magic's `--join` option: use another process's GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu import api
from reserve_gpu.commands.output import print_stderr
from reserve_gpu.commands.reservations import choice
from reserve_gpu.commands.run import command
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import RequestError, program_command
from reserve_gpu.model.option import add
from reserve_gpu.render import reservation_list
from reserve_gpu.reservation.remote_release import reservations_of_user
from reserve_gpu.system import process_identity

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from reserve_gpu.model.holders import Reserved

MORE = """\
Without WHICH, this joins your only reservation. Without COMMAND, it starts
your shell. The command gets the same GPUs, the same memory share and the same
variables. The GPUs stay reserved until both the notebook and the command have
ended.
"""
split = command.split_at_sign


def add_arguments(parser: ArgumentParser) -> None:
    """Add the `join` command's arguments."""
    parser.usage, parser.epilog = "reserve-gpu join [WHICH] [-- COMMAND ...]", MORE
    add((choice.WHICH,), parser)


def run(arguments: Namespace) -> NoReturn:
    """Join one of the user's reservations, then become a command or, by default, the user's shell.

    Raises:
        RequestError: The arguments do not select exactly one reservation, or the command would not
            keep the reservation.
        CommandError: The command can't be found or can't be run.
    """
    if len(arguments.which) > 1:
        raise RequestError(reservation_list.missing_separator())
    words = arguments.command or [os.environ.get("SHELL") or "/bin/sh"]
    program = command.find_own(words, ["join", *arguments.which])
    process_identity.set_name(process_identity.command(words) or "")
    print_stderr(api.join(find_reservation(arguments.which)))
    command.start_watchdog(is_timed=False, is_quiet=False)
    command.become(program, words)


def run_in_notebook(arguments: Namespace) -> None:
    """Join one of the user's reservations from this Jupyter kernel."""
    which = [arguments.join] if arguments.join else []
    print(api.join(find_reservation(which, "%reserve_gpu --join")))


def find_reservation(words: Sequence[str], typed: str = "") -> Reserved:
    """Find a reservation that another of the user's processes holds.

    Args:
        words: The arguments. The first argument names the reservation. Without arguments, there
            must be exactly one reservation.
        typed: The part of the command line before the name, for error messages. Defaults to
            `reserve-gpu join`.

    Raises:
        RequestError: The arguments do not select exactly one reservation.
    """
    own_pids = {os.getpid(), *(left.lock_keeper for left in api.kept_reservations())}
    reservations = [
        each
        for each in reservations_of_user()
        if each.holder.pid not in own_pids
        and not each.holder.beside
        and any(isinstance(row.device, Device) for row in each.rows)
    ]
    (match,) = choice.choices(words[:1], reservations, typed or f"{program_command()} join")
    return match.reserved
