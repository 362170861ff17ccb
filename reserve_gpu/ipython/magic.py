"""Run the %reserve_gpu magic, and the hooks before and after each cell."""

from __future__ import annotations

import shlex
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.display import display

from reserve_gpu.api import ask, show_reserved
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model import errors
from reserve_gpu.model.requests import Request
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render.frontends import MAGIC
from reserve_gpu.render.phrases import labels
from reserve_gpu.reservation.activity import DRIVER_LIMIT_S
from reserve_gpu.reservation.feature import Leaving
from reserve_gpu.reservation.session import session
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from reserve_gpu.model.devices import Device, Process

LEAVE_LIMIT_S = 2.0  # seconds; a client kills a Jupyter kernel that does not exit within 5 s


def run(line: str) -> None:
    """Run `%reserve_gpu`.

    Args:
        line: The text after `%reserve_gpu`.

    Raises:
        UsageError: The line is invalid. IPython shows this error without a traceback.
        ReserveGPUError: Any error that `reserve()` can raise.
    """
    try:
        if words := _words(line):
            with no_fork:
                from reserve_gpu.ipython import parser  # not needed without arguments

            _do(parser.magic_parser().parse_args(words))
        else:
            _reserve(Request())
    except errors.RequestError as error:
        raise UsageError(str(error)) from error


def warn(lines: Sequence[str]) -> None:
    """Show warnings in the current cell's output."""
    with no_fork:
        from reserve_gpu.render import pictures  # imported here because most cells have no warnings

    pictures.warn(lines)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:  # an unclosed quotation mark
        hint = ""
        if line.count("'") % 2:
            hint = '. Put text with an apostrophe in double quotes: "it\'s"'
        raise errors.RequestError(f"{error}: {sanitize(line)}{hint}") from error


def _do(arguments: Namespace) -> None:
    with no_fork:
        from reserve_gpu import request_options
        from reserve_gpu.commands import registry
        from reserve_gpu.ipython import parser

    values = vars(arguments)
    commands = [name for name in parser.COMMANDS if values[name] not in (None, False)]
    if len(commands) > 1:
        flags = ", ".join(f"--{name}" for name in commands)
        raise errors.RequestError(f"Use only one of these options: {flags}.")
    if arguments.help:
        print(parser.magic_parser().format_help())
    elif commands and arguments.devices:
        name, held = sanitize(arguments.join or ""), labels(session().devices) or "no GPU"
        raise errors.RequestError(parser.COMMANDS[commands[0]].format(name, held=held))
    elif commands:
        result = registry.load(commands[0]).run_in_notebook(arguments)
        if result is not None:
            display(result)  # type: ignore[no-untyped-call]
    elif arguments.all or arguments.hosts is not None:
        flag = "--all" if arguments.all else "--hosts"
        raise errors.RequestError(f"Use {flag} together with --status.")
    else:
        request, wait = request_options.to_request(arguments)
        _reserve(request, wait, is_optional=arguments.optional)


def _reserve(
    request: Request, wait: float | str | None = None, *, is_optional: bool = False
) -> None:
    """Reserve devices, show progress while waiting, and print the outcome."""
    outcome = ask(request, wait, "auto", MAGIC, is_optional=is_optional)
    if outcome.warnings:
        warn(outcome.warnings)
    if outcome.excused and outcome.excused.picture:
        outcome.excused.picture.show(values=outcome.excused.to_dict())
    elif outcome.excused:
        print(outcome.excused)
    print(outcome.text)
    if not outcome.excused:
        show_reserved()


# -- hooks for cells and restarts ------------------------------------------------------------------


def leave_to_restart() -> None:
    """Keep the devices for the next Jupyter kernel while this one restarts.

    Raises:
        ReserveGPUError: The devices can't be kept.
    """
    session().run_within(LEAVE_LIMIT_S, session().leave_as, Leaving.RESTART)


def begin_cell() -> list[str]:
    """Run the hooks before a cell, and return the lines to print."""
    this_session = session()
    lines = [line for feature in this_session.features.values() for line in feature.cell_begins()]
    with suppress(errors.ReserveGPUError):  # the next %reserve_gpu raises the same error
        lines += this_session.begin_cell()
    return lines


def end_cell() -> list[str]:
    """Record, for other users to see, that a cell has ended, and return the lines to print."""
    this_session = session()
    lines = this_session.end_cell()
    if (held := this_session.held) and not this_session.is_busy:
        read = cache(partial(_processes, held.devices))  # read only once for all features
        lines += [line for each in this_session.features.values() for line in each.cell_ended(read)]
    return lines


def _processes(devices: Sequence[Device]) -> dict[Device, list[Process]]:
    """Return the processes on each device, or an empty dict if they can't be identified."""
    with suppress(errors.DriverError), Nvml(DRIVER_LIMIT_S) as gpus:
        if gpus.sees_all:  # a PID from another namespace might refer to a different process
            return {device: gpus.processes(device) for device in devices}
    return {}
