"""The `kernel start` command: reserve GPUs for a kernel, then become the kernel."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu import api, request_options
from reserve_gpu.commands.output import print_stderr
from reserve_gpu.commands.run import command
from reserve_gpu.model import errors
from reserve_gpu.model.option import add
from reserve_gpu.render import frontends
from reserve_gpu.system import jupyter_kernel, procfs, settings

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

split = command.split


def add_arguments(parser: ArgumentParser) -> None:
    """Add the request options."""
    add(request_options.REQUEST_KEYWORDS, parser)


def run(arguments: Namespace) -> NoReturn:
    """Reserve GPUs and become the kernel.

    The kernel starts even if no GPU can be reserved. Its first cell then shows the reason.
    """
    program, reason = command.find(arguments.command), None
    errors.shows_cell_syntax = True
    parent_marks = settings.STARTED_BY_OLDER, f"{settings.STARTED_BY}{procfs.stamp(os.getppid())}"
    if os.environ.get(settings.JOB_KERNEL) in parent_marks:
        os.environ[settings.JOB_KERNEL] = procfs.stamp(os.getpid())
    started = jupyter_kernel.remote_description()
    if started:
        pid, _, began = procfs.stamp(os.getpid()).partition(" ")
        fields = {**started, "pid": pid, "began": began}
        os.environ[settings.STARTED] = jupyter_kernel.encode_description(fields)
        with suppress(ValueError):  # an environment variable can't hold the path
            os.environ["JPY_SESSION_NAME"] = started.get("notebook", "")
    try:
        for text in api.take_over(jupyter_kernel.connection_file(arguments.command)):
            print_stderr(f"Warning: {text}")
        if not started:
            command.reserve_and_report(arguments, frontends.MAGIC)
        elif not api.current():  # the GPUs from `kernel hold` are no longer kept for this kernel
            options = filter(None, started.get("wishes", "").split("\0"))
            command.reserve_and_report(request_options.request_of([*options]), frontends.MAGIC)
    except errors.ReserveGPUError as error:
        headline = "This kernel was started without a GPU of its own."
        consequence = api.continue_after(error)
        print_stderr(f"{headline}\n{error}\n{consequence}")
        # A brief reason is enough, because the first cell also shows the status and the next steps.
        brief = error.picture.brief if error.picture else str(error)
        reason = f"{headline}\n{brief}\n{consequence}"
        if not isinstance(error, errors.NoFreeDeviceError):
            reason += " Try again with %reserve_gpu."
    command.become(program, arguments.command, reason)
