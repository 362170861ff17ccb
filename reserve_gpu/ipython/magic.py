"""%reserve_gpu: parse the line, call, show what came of it."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import TYPE_CHECKING

from IPython.core.error import UsageError
from IPython.display import display

from reserve_gpu import api
from reserve_gpu.model import errors
from reserve_gpu.model.requests import Request
from reserve_gpu.render import messages, phrases, pictures
from reserve_gpu.render.frontends import MAGIC, read_here
from reserve_gpu.render.progress import Live
from reserve_gpu.reservation import status
from reserve_gpu.reservation.session import session
from reserve_gpu.system import jupyter_kernel, procfs
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from argparse import Namespace


def run(line: str) -> None:
    """Do what the line asks for.

    Raises UsageError for a line that makes no sense, which IPython shows in one line, and the
    other errors that `reserve()` raises.
    """
    try:
        if words := _words(line):
            with no_fork:
                from reserve_gpu.ipython import parser  # a bare line needs none

            _do(parser.magic_parser().parse_args(words))
        else:
            _reserve(Request())
    except errors.RequestError as error:
        raise UsageError(str(error)) from error


def tell_kept() -> None:
    """Say what is kept for this kernel, which has restarted and not asked for it yet."""
    if text := api.kept():
        pictures.tell(pictures.of_line(text))


def tell_start() -> None:
    """Say which GPU the kernel was started with; or why with none, and how the machine stands."""
    if reason := session().reason:
        told = pictures.of_line(reason)
        with suppress(errors.DriverError):  # that is the reason, and is told
            told = status.status()._replace(frontend=read_here(MAGIC)).picture()
            told = told.below(reason.splitlines())
        pictures.tell(told)
    elif held := api.current():
        devices = [
            f"{device.label} ({errors.sanitize(device.name or '?')})" for device in held.devices
        ]
        place = (
            f"runs on {errors.sanitize(procfs.machine_name())} and "
            if jupyter_kernel.origin()
            else ""
        )
        pictures.tell(f"This kernel {place}has {phrases.listed(devices)}.")
        api.show_reserved()


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:  # a quotation mark that is not closed
        raise errors.RequestError(f"{error}: {errors.sanitize(line)}") from error


def _do(arguments: Namespace) -> None:
    with no_fork:
        from reserve_gpu import request_options
        from reserve_gpu.commands import registry
        from reserve_gpu.ipython import parser

    values = vars(arguments)
    asked = [name for name in parser.COMMANDS if values[name] not in (None, False)]
    if len(asked) > 1:
        flags = " or ".join(f"--{name}" for name in asked)
        raise errors.RequestError(f"One at a time: {flags}.")
    if arguments.help:
        print(parser.magic_parser().format_help())
    elif asked and arguments.devices:
        named = errors.sanitize(arguments.devices[0])
        raise errors.RequestError(parser.COMMANDS[asked[0]].format(named))
    elif asked:
        seen = registry.load(asked[0]).run_in_notebook(arguments)
        if seen is not None:
            display(seen)  # type: ignore[no-untyped-call]
    elif arguments.all or arguments.hosts is not None:
        flag = "--all" if arguments.all else "--hosts"
        raise errors.RequestError(f"{flag} goes with --status.")
    else:
        request, wait = request_options.to_request(arguments)
        _reserve(request, wait, is_optional=arguments.optional)


def _reserve(
    request: Request, wait: float | str | None = None, *, is_optional: bool = False
) -> None:
    """Reserve, show what is waited for, and print the outcome."""
    live = Live()
    try:
        with live:
            outcome = api.ask(request, wait, live.show, MAGIC, is_optional=is_optional)
    except KeyboardInterrupt:
        if wait is None and not live.has_waited:  # nothing has changed
            raise
        kept = api.current()
        text = messages.interrupted(kept.devices if kept else (), MAGIC)
        raise errors.WaitInterrupted(text) from None
    if outcome.warnings:
        pictures.warn(outcome.warnings)
    if outcome.excused and outcome.excused.picture:
        outcome.excused.picture.show(values=outcome.excused.to_dict())
    elif outcome.excused:
        print(outcome.excused)
    print(outcome.text)
    if not outcome.excused:
        api.show_reserved()
