"""Parse the `reserve-gpu` command line, and run the requested command.

Only this module turns errors into text on stderr and an exit code. The commands are listed in
commands/registry.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from argparse import Namespace, RawDescriptionHelpFormatter
from contextlib import suppress
from typing import TYPE_CHECKING

from reserve_gpu.commands import registry
from reserve_gpu.commands.output import Output, error_text, print_stderr
from reserve_gpu.commands.registry import COMMANDS
from reserve_gpu.model import errors, option, untrusted
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.option_parser import Parser
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

LAST_STANDARD = 2  # stderr's file descriptor
_RUN, _RELEASE = "Did you mean run, or %reserve_gpu in a notebook?", "Did you mean release?"
SUGGESTIONS = {  # hints for command names from similar tools
    **dict.fromkeys(("reserve", "acquire", "get", "start", "exec", "lock", "allocate"), _RUN),
    **dict.fromkeys(("kill", "stop", "unlock", "unreserve", "cancel"), _RELEASE),
    "free": "Did you mean release or status?",
    "ps": "Did you mean status or list?",
    "ls": "Did you mean list?",
    "queue": "Did you mean status?",
    "wait": "Did you mean run --wait?",
    "watch": "Did you mean top?",
    "install": "Did you mean setup or kernel install?",
    "uninstall": "Did you mean setup --undo?",
    **dict.fromkeys(
        ("extend", "renew"), "To extend a reservation, run %reserve_gpu --for 2h in its notebook."
    ),
}
OPTIONS = ("-h", "--help", "--version")

TEXT = "Reserve NVIDIA GPUs on a shared machine."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `reserve-gpu`.

    Args:
        arguments: The command-line arguments. Defaults to those of this process.

    Returns:
        The exit code.
    """
    words: list[str] = []
    try:
        _open_standard_descriptors()
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        words += _words(list(sys.argv[1:] if arguments is None else arguments))
        return _start(words)
    except errors.ReserveGPUError as error:
        print_stderr(_error_text(error, words), is_event="--json" in words)
        return error.exit_code
    except KeyboardInterrupt as error:  # its text is empty unless a wait was interrupted
        print_stderr(str(error) or "Interrupted. Nothing was reserved.")
        return errors.INTERRUPTED


def _error_text(error: errors.ReserveGPUError, words: Sequence[str]) -> str:
    """Return the error as text or, if `--json` was given, as a line of JSON."""
    if "--json" not in words:
        return error_text(error)
    return json.dumps({"event": "refused", "time": time.time(), **error.to_dict()})


def _words(typed: list[str]) -> list[str]:
    """Return the arguments, decoding them if another machine sent them as a single word."""
    if len(typed) == 1 and typed[0].startswith(settings.SENT):
        with suppress(ValueError):
            sent = untrusted.parsed(bytes.fromhex(typed[0].removeprefix(settings.SENT)))
            if isinstance(sent, list):
                return [untrusted.text(each, untrusted.SIZE_LIMIT) for each in sent]
    return typed


def _start(words: list[str]) -> int:
    """Parse the arguments, run the command, and return the exit code.

    If the arguments end with a program to run, that part is removed from `words`, because the
    program's options are not options of `reserve-gpu`.
    """
    words = [*words[1:], "--help"] if words[:1] == ["help"] else words
    typed = (name for name in COMMANDS if name.split() == words[: name.count(" ") + 1])
    if name := next(typed, None):
        return _run(name, words)
    if words:
        _require_command(words)
    arguments = _parser().parse_args(words)
    if arguments.version:
        _print(Output(_version()))
        return 0
    # Without a command, show the help for people, but return an error code for scripts.
    _print(Output(arguments.parser.format_help().rstrip()))
    return errors.RequestError.exit_code


def _run(name: str, words: list[str]) -> int:
    """Import and run only the given command, and return its exit code."""
    module, length, child = registry.load(name), len(name.split()), None
    if hasattr(module, "split"):
        words[length:], child = module.split(words[length:])
    parser = Parser(
        f"reserve-gpu {name}",
        description=COMMANDS[name].help,
        formatter_class=RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    output: Output = module.run(parser.parse_args(words[length:], Namespace(command=child)))
    if output.text:
        _print(output)
    return output.code


def _require_command(words: list[str]) -> None:
    """Raise RequestError unless the arguments start with a command group or a general option."""
    first = words[0]
    known = [name for name, command in COMMANDS.items() if command.help]
    is_group = any(each.startswith(f"{first} ") for each in known)
    if first in OPTIONS or (is_group and (len(words) == 1 or words[1].startswith("-"))):
        return
    unknown = " ".join(words[: 1 + is_group])
    suggestion = SUGGESTIONS.get(unknown) or option.likely(unknown, known)
    hint = f"{suggestion} See {errors.command_line('--help')}"
    is_similar = unknown in SUGGESTIONS or is_group or option.closest(unknown, known)
    if not is_similar and (line := registry.load("run").complete(words)):
        hint = f"To run a program on a GPU: {errors.command_line(line)}"
    raise errors.RequestError(f"Unknown command {sanitize(unknown)}. {hint}")


def _parser(*, has_arguments: bool = False) -> Parser:
    """Return the parser that lists every command.

    Args:
        has_arguments: Whether to add each command's arguments.
    """
    parser = Parser("reserve-gpu", description=TEXT, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="store_true", help="show the version")
    groups = {"": parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)}
    listed = {name: command.help for name, command in COMMANDS.items() if command.help}
    for name, text in listed.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            parent = groups[""].add_parser(group, help=text)
            parent.set_defaults(parser=parent)
            groups[group] = parent.add_subparsers(metavar="COMMAND")
        command_parser = groups[group].add_parser(word, help=text)
        if has_arguments:
            registry.load(name).add_arguments(command_parser)
    return parser


def _complete() -> None:
    """Print command-line completions and exit, if argcomplete is installed."""
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(_parser(has_arguments=True))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"reserve-gpu {version('reserve_gpu')}"
    except PackageNotFoundError:
        return "reserve-gpu, not installed"


def _print(output: Output) -> None:
    """Print a command's output, in UTF-8 unless the output is plain text.

    If the reader closes the pipe, SIGPIPE quietly terminates this process, as it would `ls`.
    """
    if hasattr(signal, "SIGPIPE"):  # missing on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    encoding = None if output.form == "text" else "utf-8"
    sys.stdout.reconfigure(encoding=encoding, errors="replace")  # type: ignore[union-attr]
    try:
        print(output.text.removesuffix("\n"), flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - otherwise Python flushes again at exit
        raise errors.CommandError(f"Can't write to stdout: {error.strerror}.", 74) from error


def _open_standard_descriptors() -> None:
    """Open /dev/null in place of stdin, stdout or stderr if any of them is closed.

    Otherwise, the next file to be opened, perhaps a lock file, would get one of the standard file
    descriptors, and the command would read from that file or write to it. Programs that this
    process executes still find the standard descriptors closed, because Python opens files with the
    close-on-exec flag.
    """
    # os.open() returns the lowest free descriptor.
    while (number := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
        pass
    os.close(number)
    if not (sys.stdout and sys.stderr):
        null = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        sys.stdout, sys.stderr = sys.stdout or null, sys.stderr or null
