"""`kernel start`: reserve for a kernel, and become it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu import api, request_options
from reserve_gpu.commands.run import command, reporter
from reserve_gpu.model import errors
from reserve_gpu.model.option import add
from reserve_gpu.render import frontends
from reserve_gpu.system import jupyter_kernel, procfs, settings

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

split = command.split


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the request."""
    add(request_options.REQUEST_KEYWORDS, parser)


def run(arguments: Namespace) -> NoReturn:
    """Become a kernel, which starts in any case; its first cell tells why it has no GPU."""
    program, reason = command.find(arguments.command), None
    errors.is_beside_cells = True
    by = settings.STARTED_BY_OLDER, f"{settings.STARTED_BY}{procfs.stamp(os.getppid())}"
    if os.environ.get(settings.JOB_KERNEL) in by:
        os.environ[settings.JOB_KERNEL] = procfs.stamp(os.getpid())
    started = jupyter_kernel.started()
    if started:
        pid, _, began = procfs.stamp(os.getpid()).partition(" ")
        told = {**started, "pid": pid, "began": began}
        os.environ[settings.STARTED] = jupyter_kernel.as_started(told)
        with suppress(ValueError):  # a name that no variable can have
            os.environ["JPY_SESSION_NAME"] = started.get("notebook", "")
    try:
        for text in api.take_over(jupyter_kernel.connection_file(arguments.command)):
            reporter.say(f"Warning: {text}")
        if not started:
            command.reserve_and_report(arguments, frontends.MAGIC)
        elif not api.current():  # what was asked for from afar has not been kept
            wishes = filter(None, started.get("wishes", "").split("\0"))
            command.reserve_and_report(request_options.request_of([*wishes]), frontends.MAGIC)
    except errors.ReserveGPUError as error:
        first = "This kernel was started without a GPU of its own."
        going_on = api.go_on_after(error)
        reporter.say(f"{first}\n{error}\n{going_on}")
        # Its first cell shows the status of the machine, and the remedy.
        what = error.picture.brief if error.picture else str(error)
        reason = f"{first}\n{what}\n{going_on}"
        if not isinstance(error, errors.NoFreeDeviceError):
            reason += " Try again with %reserve_gpu."
    command.become(program, arguments.command, reason)
