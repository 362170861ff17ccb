"""reserve-gpu run: reserve, then become the command; the same process goes on as that program.

Also what every subcommand needs at its end: the exit codes, and errors in the words of a shell.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import warnings
from typing import TYPE_CHECKING

from reserve_gpu import errors, options
from reserve_gpu.errors import shown
from reserve_gpu.gpus import names
from reserve_gpu.report.progress import Live
from reserve_gpu.reservation import api

if TYPE_CHECKING:
    from argparse import Namespace

    from reserve_gpu.reservation.session import Reservation

SYNOPSIS = "reserve-gpu run [options] [DEVICE ...] -- COMMAND ..."
CANNOT_RUN, NOT_FOUND, INTERRUPTED = 126, 127, 130  # as shells have it
# The last five are those of sysexits.h.
USAGE, UNAVAILABLE, SOFTWARE, CANNOT_CREATE, TRY_LATER, CONFIGURATION = 2, 69, 70, 73, 75, 78


class ExitError(errors.ReserveGPUError):
    """It can't be done. code: what the process ends with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def run(arguments: Namespace) -> int:
    """Reserve what was asked for and become the command; returns only by an exception."""
    program = find(arguments.command)
    try:
        say(str(_reserve(arguments)))
    except errors.EXCUSED as error:
        if not arguments.optional:
            raise
        say(in_a_shell(_go_on_after(error)))
    become(program, arguments.command)
    return SOFTWARE  # not reached


def start_kernel(arguments: Namespace) -> int:
    """The same for a kernel, which starts in any case; its first cell tells why it has no GPU."""
    program, reason = find(arguments.command), None
    try:
        say(str(_reserve(arguments)))
    except errors.ReserveGPUError as error:
        reason = f"This kernel was started without a GPU of its own.\n{_go_on_after(error)}"
        say(reason)
        if not isinstance(error, errors.NoFreeDeviceError):  # its text says what to do next
            reason += " Try again with %reserve_gpu."
    become(program, arguments.command, reason)
    return SOFTWARE  # not reached


def split(own: list[str], rest: list[str]) -> tuple[list[str], list[str]]:
    """The words that are ours, and the command: what follows the first `--`.

    Without `--` the first word starts the command if it is no option and names no device. Raises
    RequestError where options or devices stand before a command without `--`: which word is the
    value of an option, and which one the command, can't be told.
    own: the subcommand. rest: what follows it.
    """
    if "--" in rest:
        at = rest.index("--")
        return own + rest[:at], rest[at + 1 :]
    if not rest or {"-h", "--help"} & set(rest):
        return own + rest, []
    if rest[0].startswith("-") or _names_device(rest[0]):
        raise errors.RequestError(f"Put -- before the command, as in: {SYNOPSIS}")
    return own, rest


def find(command: list[str]) -> str:
    """The path of the program. Raises ExitError, before anything is reserved."""
    if not command:
        raise errors.RequestError(f"There is no command to run: {SYNOPSIS}")
    name = command[0]
    if path := shutil.which(name):
        return path
    if os.path.dirname(name) and os.path.isdir(name):
        raise ExitError(f"{shown(name)} is a directory.", CANNOT_RUN)
    if shutil.which(name, os.F_OK):
        raise ExitError(f"{shown(name)} may not be executed by this user.", CANNOT_RUN)
    raise ExitError(f"There is no command {shown(name)}.", NOT_FOUND)


def become(program: str, command: list[str], reason: str | None = None) -> None:
    """Replace this program by another one, in this process. Raises ExitError.

    reason: why there is no GPU, for that program to tell.
    """
    api.before_exec(reason)
    # Python ignores these two signals, and exec would leave them ignored: `yes | head` in a script
    # relies on SIGPIPE.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execv(program, command)  # noqa: S606 - no shell is what is wanted
    except OSError as error:
        text = f"{shown(command[0])} can't be run: {error.strerror}"
        if error.errno == errno.ENOEXEC:
            text += ". A script needs a first line such as #!/bin/sh"
        raise ExitError(f"{text}.", CANNOT_RUN) from error


def say(text: str) -> None:
    """Print on stderr, as stdout is the command's. That nobody can read it is no failure."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # Python would try again at its end, and end with another exit code
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def in_a_shell(text: str) -> str:
    """A text for notebooks in the words of a shell."""
    return text.replace("%reserve_gpu", "reserve-gpu run")


def error_text(error: errors.ReserveGPUError) -> str:
    """The error's text in the words of a shell."""
    # This process ends with the error, so what its variables are now matters to nobody.
    lines = [line for line in str(error).splitlines() if line != "CUDA_VISIBLE_DEVICES = ''"]
    return in_a_shell("\n".join(lines))


def exit_code(error: errors.ReserveGPUError) -> int:
    """What the process ends with."""
    match error:
        case ExitError():
            return error.code
        case errors.RequestError():
            return USAGE
        case errors.DriverError():
            return UNAVAILABLE
        case errors.NoFreeDeviceError() | errors.MutexHeldError():
            return TRY_LATER
        case errors.LockError():
            return CONFIGURATION
        case _:
            return SOFTWARE


def _reserve(arguments: Namespace) -> Reservation:
    """Reserve and show the wait; each warning of ours becomes one line."""
    with warnings.catch_warnings(record=True) as caught, Live(sys.stderr) as live:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", errors.ReserveGPUWarning)
        reservation = api.reserve(progress=live.show, **options.wishes(arguments))
    for warning in caught:
        say(f"Warning: {warning.message}")
    return reservation


def _go_on_after(error: errors.ReserveGPUError) -> str:
    """Go on without what could not be reserved; returns what to say."""
    return f"{error}\n{api.go_on_after(error)}"


def _names_device(word: str) -> bool:
    try:
        return bool(names.parse(word))
    except errors.RequestError:
        return False
