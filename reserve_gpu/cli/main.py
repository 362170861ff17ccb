"""reserve-gpu: parse, then call; errors become one text on stderr and an exit code here, alone.

commands/registry.py lists the commands.
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
from reserve_gpu.commands.output import Output
from reserve_gpu.commands.registry import COMMANDS
from reserve_gpu.commands.run import command, lookup, reporter
from reserve_gpu.model import errors, option, untrusted
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.request_options import Parser
from reserve_gpu.system import settings

if TYPE_CHECKING:
    from collections.abc import Sequence

LAST_STANDARD = 2  # the descriptor of stderr
MEANT = {  # by words that others have for it
    "reserve": "Did you mean run, or %reserve_gpu in a notebook?",
    "free": "Did you mean release, or status?",
    "ps": "Did you mean status, or list?",
    "kill": "Did you mean release?",
}
OPTIONS = ("-h", "--help", "--version")

TEXT = "Reserve GPUs for a command, for as long as it runs."


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say, those of this process by default; returns the exit code."""
    words: list[str] = []
    try:
        _open_standard_descriptors()
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        words += _words(list(sys.argv[1:] if arguments is None else arguments))
        return _start(words)
    except errors.ReserveGPUError as error:
        reporter.say(_error_text(error, words), is_event="--json" in words)
        return error.exit_code
    except KeyboardInterrupt:
        reporter.say("Interrupted; nothing was reserved.")
        return command.INTERRUPTED


def _error_text(error: errors.ReserveGPUError, own: Sequence[str]) -> str:
    """Return the error as it is shown: as one line of JSON where that was asked for."""
    if "--json" not in own:
        return reporter.error_text(error)
    return json.dumps({"event": "refused", "time": time.time(), **error.to_dict()})


def _words(typed: list[str]) -> list[str]:
    """Return the words that were typed, or those that another machine has sent as one."""
    if len(typed) == 1 and typed[0].startswith(settings.SENT):
        with suppress(ValueError):
            sent = untrusted.parsed(bytes.fromhex(typed[0].removeprefix(settings.SENT)))
            if isinstance(sent, list):
                return [untrusted.text(each, untrusted.SIZE_LIMIT) for each in sent]
    return typed


def _start(words: list[str]) -> int:
    """Parse the command line, and call the command.

    words: of them a command to run, which has its own options, is taken away.
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
    # The help is what was asked for, but a script has made a mistake.
    _print(Output(arguments.parser.format_help().rstrip()))
    return errors.RequestError.exit_code


def _run(name: str, words: list[str]) -> int:
    """Run a command; no other command's module is imported."""
    module, length, to_run = registry.load(name), len(name.split()), None
    if hasattr(module, "split"):
        words[length:], to_run = module.split(words[length:])
    parser = Parser(
        f"reserve-gpu {name}",
        description=COMMANDS[name].help,
        formatter_class=RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    output: Output = module.run(parser.parse_args(words[length:], Namespace(command=to_run)))
    if output.text:
        _print(output)
    return output.code


def _require_command(words: list[str]) -> None:
    """Raise RequestError unless the words are a group of commands, or options of their own."""
    first = words[0]
    known = [name for name, command in COMMANDS.items() if command.help]
    is_group = any(each.startswith(f"{first} ") for each in known)
    if first in OPTIONS or (is_group and (len(words) == 1 or words[1].startswith("-"))):
        return
    wrong = " ".join(words[: 1 + is_group])
    near = MEANT.get(wrong) or option.likely(wrong, known)
    see = errors.own_line("--help")
    text = f"There is no command {sanitize(wrong)}. {near} See {see}"
    raise errors.RequestError(text)


def _parser(*, is_whole: bool = False) -> Parser:
    """Return the parser that lists every command. is_whole: with their arguments."""
    parser = Parser("reserve-gpu", description=TEXT, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="store_true", help="show the version")
    groups = {"": parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)}
    listed = {name: command.help for name, command in COMMANDS.items() if command.help}
    for name, text in listed.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            above = groups[""].add_parser(group, help=f"see reserve-gpu {group} --help")
            above.set_defaults(parser=above)
            groups[group] = above.add_subparsers(metavar="COMMAND")
        own = groups[group].add_parser(word, help=text)
        if is_whole:
            registry.load(name).add_arguments(own)
    return parser


def _complete() -> None:
    """Answer a shell that completes a command line, and end; argcomplete is no dependency."""
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(_parser(is_whole=True))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"reserve-gpu {version('reserve_gpu')}"
    except PackageNotFoundError:
        return "reserve-gpu, not installed"


def _print(output: Output) -> None:
    """Print what was asked for. A reader that goes away ends this quietly, as it does `ls`.

    What people here read is in their encoding, what programs read in UTF-8.
    """
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    encoding = None if output.form == "text" else "utf-8"
    sys.stdout.reconfigure(encoding=encoding, errors="replace")  # type: ignore[union-attr]
    try:
        print(output.text.removesuffix("\n"), flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python tries again at its end
        raise lookup.CommandError(f"stdout can't be written: {error.strerror}.", 74) from error


def _open_standard_descriptors() -> None:
    """Fill the places of stdin, stdout and stderr where they are closed.

    Else the next file that is opened, perhaps a lock, would get such a number, and the command
    would read or write it as its standard descriptor. The command finds them closed again, as
    Python's descriptors don't outlive exec.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:  # the lowest that is free
        pass
    os.close(number)
    if not (sys.stdout and sys.stderr):
        nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
