"""The `kernel hold` command: reserve GPUs for a kernel that another machine starts here over SSH.

The command writes lines of JSON to stdout, and reads the other machine's confirmation from stdin.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import TYPE_CHECKING

from reserve_gpu import api, request_options
from reserve_gpu.commands.kernels.kernelspec import manager
from reserve_gpu.commands.output import Output
from reserve_gpu.model import errors
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.progress import Progress, Waiting
from reserve_gpu.render import frontends, phrases
from reserve_gpu.system import process_identity

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

STDIN, KEEP = 0, b"keep\n"
KEEP_LIMIT_S = 10.0  # seconds to wait for the other machine's confirmation
KEPT_S = 60.0  # seconds within which the kernel must start
KERNEL_OPTIONS = (
    Option("--id ID", "", required=True),
    Option("--kernel KERNEL", "", required=True),
)


class GoneError(errors.ReserveGPUError):
    """The other machine has disconnected, or no longer wants the reservation."""

    exit_code = 75  # EX_TEMPFAIL


def add_arguments(parser: ArgumentParser) -> None:
    """Add the request options, and the options that identify the kernel."""
    add((*request_options.REQUEST_KEYWORDS, *KERNEL_OPTIONS), parser)


def run(arguments: Namespace) -> Output:
    """Reserve GPUs, and keep them until the kernel starts and takes them over.

    The GPUs are released if the other machine disconnects or does not confirm.
    """
    if missing := _missing(arguments.kernel):
        _report(refused=missing)
        return Output(code=errors.RequestError.exit_code)
    process_identity.set_name("a starting kernel")
    try:
        request_options.reserve_parsed(arguments, frontends.MAGIC, _stop_if_disconnected)
        reservation = api.current()
    except errors.ReserveGPUError as error:
        _report(refused=error.picture.brief if error.picture else str(error).partition("\n")[0])
        return Output(code=error.exit_code)
    _report(gpus=phrases.labels(reservation.devices if reservation else ()), python=sys.executable)
    is_ready, _, _ = select.select([STDIN], [], [], KEEP_LIMIT_S)
    if not is_ready or os.read(STDIN, len(KEEP)) != KEEP:
        return Output(code=GoneError.exit_code)
    api.leave_to_kernel(arguments.id, KEPT_S)
    _report(kept=True)
    return Output()


def _missing(kernel: str) -> str:
    """Return why this machine can't start the kernel, or an empty string if it can."""
    try:
        is_installed = kernel in manager().find_kernel_specs()
    except errors.RequestError as error:  # the message names the missing packages
        return f"{error}"
    hint = "Run there: reserve-gpu kernel install"
    return "" if is_installed else f"the kernel {kernel} is not installed. {hint}"


def _report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _stop_if_disconnected(news: Progress) -> None:
    """Stop waiting in the queue if the other machine has disconnected."""
    if isinstance(news, Waiting) and select.select([STDIN], [], [], 0)[0]:
        raise GoneError("The requesting machine has disconnected.")
