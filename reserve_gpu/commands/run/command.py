"""reserve-gpu run: reserve, then become the command; the same process goes on as that program.

Also what every subcommand needs at its end: errors in the words of a shell.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from shlex import join
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu import api, request_options
from reserve_gpu.commands.run import handoff, lookup
from reserve_gpu.commands.run.lookup import CommandError
from reserve_gpu.commands.run.reporter import Reporter, say
from reserve_gpu.gpus import names
from reserve_gpu.model import errors
from reserve_gpu.model.errors import PROGRAM, own_command
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.requests import NO_LEASE
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import frontends, messages
from reserve_gpu.system import jupyter_kernel, process_identity, subprocesses, watchdog

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence


SYNOPSIS = "reserve-gpu run [options] [DEVICE ...] -- COMMAND ..."
INTERRUPTED = 130  # as shells have it


def run(arguments: Namespace) -> NoReturn:
    """Reserve what was asked for and become the command, which ends when its time is over."""
    program = find_own(arguments.command, ["run", *request_options.words(arguments)])
    is_timed = any(getattr(arguments, name, None) is not None for name in ("for_", "until"))
    if is_timed:
        _require_alarm()
    process_identity.call_it(process_identity.command(arguments.command) or "")
    is_quiet = arguments.quiet
    reporter = Reporter(is_quiet=is_quiet)
    if arguments.json or arguments.events:
        from reserve_gpu.commands.run import events

        reporter, is_quiet = events.of_arguments(arguments), True
    reserve_and_report(arguments, frontends.shell(arguments.command), reporter)
    api.forget_idleness()
    set_alarm(is_timed=is_timed, is_quiet=is_quiet)
    reporter.follow()
    become(program, arguments.command)


def _require_alarm() -> None:
    """Raise RequestError where no command can be ended at its time, before anything is reserved."""
    try:
        watchdog.require()
    except OSError as error:
        old = f"{error.strerror}; it needs Linux 5.3 or later"
        text = f"A command can't be ended here at its time: {old if error.errno else error}."
        raise errors.RequestError(f"{text} Leave out --for and --until.") from error


def set_alarm(*, is_timed: bool, is_quiet: bool) -> None:
    """Have the command ended when its reservation is over. Raises CommandError.

    is_timed: it was asked for; else only an administrator's rule can want it.
    is_quiet: nothing is said of it.
    """
    reservation = api.current()
    lease = reservation.lease if reservation else NO_LEASE
    until, until_boot = lease.own.until, lease.own.until_boot  # the batch system ends the job
    if until is None or not (is_timed or lease.end_kernel):
        return
    try:
        if until_boot is None:
            subprocesses.leave(watchdog.words(until))
        else:
            subprocesses.leave(watchdog.words(until_boot, clock=time.CLOCK_BOOTTIME))
    except OSError as error:
        reason = sanitize(str(error))
        raise CommandError(f"The command can't be ended at its time: {reason}.") from error
    if not is_quiet:
        say(messages.command_ends(lease, time.time()))


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that are ours, and the command: what follows the first `--`.

    Without `--` the first word starts the command if it is no option and names no device. Raises
    RequestError where options or devices stand before a command without `--`: which word is the
    value of an option, and which one the command, can't be told.
    words: what follows the subcommand.
    """
    if "--" in words or not words or {"-h", "--help"} & set(words):
        return split_at_sign(words)
    if words[0].startswith("-") or names.is_name(words[0]):
        raise errors.RequestError(f"Put -- before the command, as in: {_synopsis()}")
    return [], words


def split_at_sign(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that are ours, and the command behind `--`, if there is one."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _synopsis() -> str:
    return own_command() + SYNOPSIS.removeprefix(PROGRAM)


def find(command: Sequence[str], typed: Sequence[str] = ("run",)) -> str:
    """Return the path of the program, before anything is reserved.

    Args:
        command: The words to run.
        typed: Our own words in front of them.

    Raises:
        CommandError: There is no such program, or nothing here can run it.
        RequestError: The command is missing, or it sets CUDA_VISIBLE_DEVICES.
    """
    if not command:
        raise errors.RequestError(f"There is no command to run: {_synopsis()}")
    return lookup.find(command, lambda: _before(typed))


def find_own(command: Sequence[str], typed: Sequence[str]) -> str:
    """Return the path of the program of a command that keeps what is reserved for it.

    Raises as `find` does, and RequestError for a command that another process would run.
    """
    program = find(command, typed)
    handoff.require_own(command, lambda: _before(typed))
    return program


def _before(typed: Sequence[str]) -> str:
    """Return our part of the line, as it is typed here."""
    return f"{own_command()} {join(typed)} --"


def become(program: str, command: list[str], reason: str | None = None) -> NoReturn:
    """Replace this program by another one, in this process. Raises CommandError.

    reason: why there is no GPU, for that program to tell.
    """
    api.before_exec(reason, is_kernel=jupyter_kernel.connection_file(command) is not None)
    # Python ignores these two signals, and exec would leave them ignored: `yes | head` in a script
    # relies on SIGPIPE.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execv(program, command)  # noqa: S606 - no shell is what is wanted
    except OSError as error:
        text = f"{sanitize(command[0])} can't be run: {error.strerror}"
        if error.errno == errno.ENOEXEC:
            text += ". A script needs a first line such as #!/bin/sh"
        elif error.errno == errno.ENOENT:
            text += ". The file is here, so it is built for another system: its loader is missing"
        raise CommandError(f"{text}.") from error


def reserve_and_report(
    arguments: Namespace, frontend: frontends.Frontend, reporter: Reporter | None = None
) -> None:
    """Reserve, and tell what comes of it, meanwhile too."""
    reporter = reporter or Reporter()
    try:
        outcome = request_options.reserve_parsed(arguments, frontend, reporter.show)
    except BaseException as error:
        reporter.failed(error)
        raise
    reporter.came(outcome)


MORE = """\
The command has the same process id, and its own signals and exit code. The
GPUs are free when it has ended, and whatever it started and left running. At
the end of --for and --until it gets SIGTERM, and a minute later SIGKILL.

examples:
  reserve-gpu run -- python train.py             on the first idle GPU
  reserve-gpu run -n 2 --wait 1h -- python t.py  on two; wait for up to an hour
  reserve-gpu run 1,3 -- bash                    for all that this shell starts
  mpirun -n 4 reserve-gpu run -- python rank.py  a GPU for each rank

exit codes: the command's own, if it was started; else 2 for a mistake, 69 for
the driver, 75 if no GPU is free, 78 for the lock directory, 126 and 127 if
the command can't be run or found, 130 if interrupted
"""
OPTIONS = (
    *request_options.REQUEST_OF_COMMAND,
    Option("-q --quiet", "say nothing if all goes well: for make and cron"),
    Option("--json", "what we say, as lines of JSON on stderr"),
    Option("--events PLACE", "the same to a descriptor (3) or a file"),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `run`."""
    parser.usage, parser.epilog = SYNOPSIS, MORE
    add(OPTIONS, parser)
