"""`kernel hold`: reserve for a kernel that another machine starts here."""

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
KEEP_LIMIT_S = 10.0  # for the other machine to confirm that it wants the reservation
KEPT_S = 60.0  # for the kernel to start
KEPT_FOR = (Option("--id ID", "", required=True), Option("--kernel KERNEL", "", required=True))


class GoneError(errors.ReserveGPUError):
    """The other machine no longer wants the reservation."""

    exit_code = 75  # EX_TEMPFAIL


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the request, and which kernel it is for."""
    add((*request_options.REQUEST_KEYWORDS, *KEPT_FOR), parser)


def run(arguments: Namespace) -> Output:
    """Reserve GPUs for a kernel, and leave them to it when it starts.

    If the other machine has gone, or no longer wants them, the GPUs are released.
    """
    if missing := _missing(arguments.kernel):
        _say(refused=missing)
        return Output(code=errors.RequestError.exit_code)
    process_identity.call_it("a kernel that starts")
    try:
        request_options.reserve_parsed(arguments, frontends.MAGIC, _end_if_alone)
        reservation = api.current()
    except errors.ReserveGPUError as error:
        _say(refused=error.picture.brief if error.picture else str(error).partition("\n")[0])
        return Output(code=error.exit_code)
    _say(gpus=phrases.labels(reservation.devices if reservation else ()), python=sys.executable)
    is_answered, _, _ = select.select([STDIN], [], [], KEEP_LIMIT_S)
    if not is_answered or os.read(STDIN, len(KEEP)) != KEEP:
        return Output(code=GoneError.exit_code)
    api.leave_to_kernel(arguments.id, KEPT_S)
    _say(kept=True)
    return Output()


def _missing(kernel: str) -> str:
    """Return a message about packages that the kernel needs; empty if none is missing."""
    try:
        is_there = kernel in manager().find_kernel_specs()
    except errors.RequestError as error:  # it says what to install
        return f"{error}"
    return "" if is_there else f"no kernel {kernel}. Run there: reserve-gpu kernel install"


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _end_if_alone(news: Progress) -> None:
    """Stop waiting in the queue if the other machine has gone."""
    if isinstance(news, Waiting) and select.select([STDIN], [], [], 0)[0]:
        raise GoneError("The one who asks has gone.")
