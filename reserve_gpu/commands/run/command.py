"""The `reserve-gpu run` command: reserve GPUs, then replace this process with a program.

Other commands that start a program also use the functions in this module.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from shlex import join
from typing import TYPE_CHECKING, NoReturn

from reserve_gpu import api, request_options
from reserve_gpu.commands.output import print_stderr
from reserve_gpu.commands.run import handoff, lookup
from reserve_gpu.commands.run.reporter import Reporter
from reserve_gpu.gpus import names
from reserve_gpu.model import errors
from reserve_gpu.model.errors import COMMAND_LIMIT, PROGRAM, CommandError, program_command
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.requests import NO_LEASE
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import frontends, messages
from reserve_gpu.system import jupyter_kernel, process_identity, subprocesses, watchdog

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence


SYNOPSIS = "reserve-gpu run [options] [DEVICE ...] -- COMMAND ..."


def run(arguments: Namespace) -> NoReturn:
    """Reserve the requested GPUs, then become the command.

    If the user or an administrator has set a time limit, a watchdog process enforces it.
    """
    program = find_own(arguments.command, ["run", *request_options.words(arguments)])
    is_timed = any(getattr(arguments, name, None) is not None for name in ("for_", "until"))
    if is_timed:
        _require_watchdog()
    process_identity.set_name(process_identity.command(arguments.command) or "")
    is_quiet = arguments.quiet
    reporter = Reporter(is_quiet=is_quiet)
    if arguments.json or arguments.events:
        from reserve_gpu.commands.run import events

        reporter, is_quiet = events.of_arguments(arguments), True
    reserve_and_report(arguments, frontends.shell(arguments.command), reporter)
    api.disable_idle_limit()
    start_watchdog(is_timed=is_timed, is_quiet=is_quiet)
    reporter.follow()
    become(program, arguments.command)


def _require_watchdog() -> None:
    """Raise RequestError if this system can't end a command at a given time."""
    try:
        watchdog.require()
    except OSError as error:
        reason = f"{error.strerror}; it needs Linux 5.3 or later" if error.errno else f"{error}"
        text = f"This system can't end a command at a given time: {reason}."
        raise errors.RequestError(f"{text} Omit --for and --until.") from error


def start_watchdog(*, is_timed: bool, is_quiet: bool) -> None:
    """Start the process that ends the command when its reservation ends.

    Args:
        is_timed: Whether the user set an end time. If not, the command is ended only if the
            reservation has an end time and also requires the holding process to be ended at that
            time.
        is_quiet: Whether to suppress the message that announces the end time.

    Raises:
        CommandError: The process can't be started.
    """
    reservation = api.current()
    lease = reservation.lease if reservation else NO_LEASE
    # A batch job's end time needs no watchdog, because the batch system enforces it.
    until, until_boot = lease.own.until, lease.own.until_boot
    if until is None or not (is_timed or lease.end_kernel):
        return
    try:
        if until_boot is None:
            subprocesses.start_background(watchdog.words(until))
        else:
            subprocesses.start_background(watchdog.words(until_boot, clock=time.CLOCK_BOOTTIME))
    except OSError as error:
        text = f"Can't start the process that enforces the command's time limit: {error.strerror}."
        raise CommandError(text) from error
    if not is_quiet:
        print_stderr(messages.command_ends(lease, time.time()))


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words after `run` into the arguments of `run` and the command.

    The command follows the first `--`. Without `--`, all words belong to the command, but then the
    first word must be neither an option nor a device.

    Args:
        words: The words after the subcommand.

    Returns:
        The arguments of `run`, and the command.

    Raises:
        RequestError: Options or devices precede the command, but `--` is missing. Without `--`, an
            option's value can't be distinguished from the command.
    """
    if "--" in words or not words or {"-h", "--help"} & set(words):
        return split_at_sign(words)
    own, command = _separate(words) or (words, [])
    if own and command:
        line = f"{program_command()} run {join(own)} -- {join(command)}"
        text = f"Put -- before the command: {sanitize(line, COMMAND_LIMIT)}"
        raise errors.RequestError(text)
    return own, command


def complete(words: list[str]) -> str:
    """Return a `run` command for words that were typed without `run`, or an empty string.

    Args:
        words: The typed words, such as `["0", "python", "train.py"]`. The result is empty unless
            they are GPUs or options of `run`, perhaps with a program, or only a program.
    """
    own, command = _separate(words) or ([], [])
    if "--" in words:
        own, command = split_at_sign(words)
        if _separate(own) != (own, []):
            return ""
    elif not own and not (command and _is_program(command[0])):
        return ""
    child = join(command) or frontends.COMMAND
    return sanitize(" ".join(filter(None, ["run", join(own), "--", child])), COMMAND_LIMIT)


def _separate(words: list[str]) -> tuple[list[str], list[str]] | None:
    """Split the arguments of `run` before the first word that is probably part of the command.

    Args:
        words: The arguments, without a `--`.

    Returns:
        The options and GPUs, and the command. Either may be empty. None if an option is unknown, or
        if the first word of a command after options or GPUs is not a program.
    """
    options = {flag: option.settings for option in OPTIONS for flag in option.flags}
    takes_value = False
    for position, word in enumerate(words):
        is_option = word.startswith("-")
        if not (is_option or takes_value or names.is_name(word)):
            if position and not _is_program(word):
                return None
            return words[:position], words[position:]
        if is_option and not {word.partition("=")[0], word[:2]} & options.keys():
            return None
        settings = options.get(word, {}) if is_option else {}
        is_digit = "".join(words[position + 1 : position + 2])[:1].isdigit()
        takes_value = "metavar" in settings and (settings.get("nargs") != "?" or is_digit)
    return words, []


def _is_program(word: str) -> bool:
    return bool(shutil.which(word) or os.path.isfile(word))


def split_at_sign(words: list[str]) -> tuple[list[str], list[str]]:
    """Split words at the first `--`, and return the words before and after it."""
    index = words.index("--") if "--" in words else len(words)
    return words[:index], words[index + 1 :]


def _synopsis() -> str:
    return program_command() + SYNOPSIS.removeprefix(PROGRAM)


def find(command: Sequence[str], typed: Sequence[str] = ("run",)) -> str:
    """Return the path of a command's program. Call this before reserving anything.

    Args:
        command: The program and its arguments.
        typed: The `reserve-gpu` arguments that precede the command, for error messages.

    Raises:
        CommandError: The program does not exist, or this machine can't run it.
        RequestError: The command is empty, or it sets CUDA_VISIBLE_DEVICES.
    """
    if not command:
        raise errors.RequestError(f"The command is missing. Usage: {_synopsis()}")
    return lookup.find(command, lambda: _own_words(typed))


def find_own(command: Sequence[str], typed: Sequence[str]) -> str:
    """Return the path of a command's program, and check that the command keeps the reservation.

    Args:
        command: The program and its arguments.
        typed: The `reserve-gpu` arguments that precede the command, for error messages.

    Raises:
        CommandError: The program does not exist, or this machine can't run it.
        RequestError: The command is empty, sets CUDA_VISIBLE_DEVICES, or would not keep the
            reservation.
    """
    program = find(command, typed)
    handoff.require_kept_reservation(command, lambda: _own_words(typed))
    return program


def _own_words(typed: Sequence[str]) -> str:
    """Return the part of the command line before the command, including `--`."""
    return f"{program_command()} {join(typed)} --"


def become(program: str, command: list[str], reason: str | None = None) -> NoReturn:
    """Replace this process with a program.

    Args:
        program: The path of the program.
        command: The program's name and its arguments.
        reason: Why there is no reservation. A kernel reports this reason in its first cell.

    Raises:
        CommandError: The system can't execute the program.
    """
    api.before_exec(reason, is_kernel=jupyter_kernel.connection_file(command) is not None)
    # Python ignores these two signals, and ignored signals stay ignored after exec. But pipelines
    # in scripts, such as `yes | head`, rely on SIGPIPE.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execv(program, command)  # noqa: S606 - no shell is wanted
    except OSError as error:
        text = f"{sanitize(command[0])} can't be run: {error.strerror}"
        if error.errno == errno.ENOEXEC:
            text += ". A script needs a first line such as #!/bin/sh"
        elif error.errno == errno.ENOENT:
            text += ". The file exists, but its loader is missing: it is built for another system"
        raise CommandError(f"{text}.") from error


def reserve_and_report(
    arguments: Namespace, frontend: frontends.Frontend, reporter: Reporter | None = None
) -> None:
    """Reserve GPUs, and report the progress and the outcome."""
    reporter = reporter or Reporter()
    try:
        outcome = request_options.reserve_parsed(arguments, frontend, reporter.show)
    except BaseException as error:
        reporter.failed(error)
        raise
    reporter.finish(outcome)


MORE = """\
The command replaces this process: it keeps the process ID, receives signals
directly and sets the exit code. The GPUs are freed once it, and everything it
left running, has ended. When --for or --until expires, the command gets
SIGTERM, and a minute later SIGKILL.

examples:
  reserve-gpu run -- python train.py             on the first idle GPU
  reserve-gpu run -n 2 --wait 1h -- python t.py  on two; wait for up to an hour
  reserve-gpu run 1,3 -- bash                    for everything in this shell
  mpirun -n 4 reserve-gpu run -- python rank.py  one GPU for each rank

exit codes: the command's own exit code if it was started; otherwise 2 for a
usage error, 69 for a driver error, 75 if no GPU is free, 78 if the lock
directory can't be used, 126 if the command can't be run, 127 if it is not
found, and 130 if interrupted
"""
OPTIONS = (
    *request_options.REQUEST_OF_COMMAND,
    Option("-q --quiet", "print only warnings and errors, for example under make or cron"),
    Option("--json", "write events to stderr as lines of JSON instead of messages"),
    Option(
        "--events PLACE", "write the events of --json to a file or a file descriptor (3) instead"
    ),
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the `run` command's arguments."""
    parser.usage, parser.epilog = SYNOPSIS, MORE
    add(OPTIONS, parser)
