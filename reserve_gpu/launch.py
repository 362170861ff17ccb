"""Reserve, then become the command: the same process goes on as another program, by exec."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import errors, names
from reserve_gpu.options import REQUEST
from reserve_gpu.text import shown

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

    from reserve_gpu.holding import Reservation
    from reserve_gpu.options import Option

SYNOPSIS = "reserve-gpu run [options] [DEVICE ...] -- COMMAND ..."
CANNOT_RUN, NOT_FOUND = 126, 127  # as shells say it
USAGE, UNAVAILABLE, SOFTWARE, TRY_LATER, CONFIGURATION = 2, 69, 70, 75, 78  # the last: sysexits.h


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
        say(_in_a_shell(_going_on(error)))
    become(program, arguments.command)
    return SOFTWARE  # not reached


def start_kernel(arguments: Namespace) -> int:
    """The same for a kernel, which starts in any case; its first cell tells why it has no GPU."""
    program, reason = find(arguments.command), None
    try:
        say(str(_reserve(arguments)))
    except errors.ReserveGPUError as error:
        reason = f"This kernel was started without a GPU of its own.\n{_going_on(error)}"
        say(reason)
        if not isinstance(error, errors.NoFreeDeviceError):  # which says it already
            reason += " Try again with %reserve_gpu."
    become(program, arguments.command, reason)
    return SOFTWARE  # not reached


def become(program: str, command: list[str], reason: str | None = None) -> None:
    """Replace this program by another one, in this process. Raises ExitError.

    reason: why there is no GPU, for that program to tell.
    """
    from reserve_gpu.reservation import before_exec

    before_exec(reason)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; a command expects them to end it
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execv(program, command)  # noqa: S606 - no shell is what is wanted
    except OSError as error:
        why = f"{shown(command[0])} can't be run: {error.strerror}"
        if error.errno == errno.ENOEXEC:
            why += ". A script needs a first line such as #!/bin/sh"
        raise ExitError(f"{why}.", CANNOT_RUN) from error


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


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before the command, and the command: what follows the first `--`.

    Without a `--` it starts where it can; raises RequestError if that may be a GPU or a value too.
    """
    if "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    settings = {flag: option.settings for option in REQUEST for flag in option.flags}
    at = 1  # after the subcommand
    while at < len(words) and words[at].startswith("-"):
        option = settings.get(words[at], {"action": None})  # also --note=TEXT, -n2, --help
        if "nargs" in option:
            break
        at += 1 if "action" in option else 2
    rest = [word for word in words[at:] if not word.startswith("-")]
    if not rest:
        return words, []
    if words[at].startswith("-") or _may_be_device(words[at]):
        raise errors.RequestError(f"Put -- before the command, as in: {SYNOPSIS}")
    return words[:at], words[at:]


def _name(option: Option) -> str:
    return option.flags[-1].lstrip("-").replace("-", "_")


def _in_a_shell(text: str) -> str:
    return text.replace("%reserve_gpu", "reserve-gpu run")


def _may_be_device(word: str) -> bool:
    try:
        return bool(names.parse(word))
    except errors.RequestError:
        return False


def words(wanted: Mapping[str, Any]) -> list[str]:
    """The words that mean these options, by the names that the parser gives them."""
    found: list[str] = []
    for option in REQUEST:
        value, flag = wanted.get(_name(option)), option.flags[-1]
        if not flag.startswith("-"):
            found += value or []
        elif value is True:
            found.append(flag)
        elif value not in (None, False):
            found += [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
    return found


def say(text: str) -> None:
    """Print on stderr: stdout is the command's. Where nobody can read it, that is no failure."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def spoken(error: errors.ReserveGPUError) -> str:
    """The error's text in the words of a shell: reserve() speaks to notebooks."""
    # It ends this process, whose variables are nobody else's.
    lines = [line for line in str(error).splitlines() if line != "CUDA_VISIBLE_DEVICES = ''"]
    return _in_a_shell("\n".join(lines))


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
    """Reserve and show the wait; our own warnings become one line each."""
    from reserve_gpu.live import Live
    from reserve_gpu.reservation import reserve

    known = {_name(option) for option in REQUEST} - {"optional"}
    wanted = {key: value for key, value in vars(arguments).items() if key in known}
    devices = wanted.pop("devices") or None
    with warnings.catch_warnings(record=True) as caught, Live(sys.stderr) as live:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", errors.ReserveGPUWarning)
        held = reserve(devices, progress=live.show, **wanted)
    for one in caught:
        say(f"Warning: {one.message}")
    return held


def _going_on(error: errors.ReserveGPUError) -> str:
    """Go on without what could not be reserved; returns what to say."""
    from reserve_gpu.reservation import go_on_after

    return f"{error}\n{go_on_after(error)}"
