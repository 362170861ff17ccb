# PYTHON_ARGCOMPLETE_OK
"""reserve-gpu: parse, then call; errors become one text on stderr and an exit code here, alone.

A row in COMMANDS is a subcommand. What is slow to import is imported when a subcommand needs it.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu import errors, options
from reserve_gpu.options import Option, Parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.checklist import Check
    from reserve_gpu.table import Status

LAST_STANDARD = 2
NOT_WELL = 1
INTERRUPTED = 130  # as shells say it

TEXT = "Reserve GPUs for a command, for as long as it runs."
EXIT_CODES = """\
exit codes: the command's own, if it was started; else
  2 the request makes no sense here     69 no NVIDIA driver, or it fails
  75 no GPU is free, or the wait ran out     78 the lock directory can't be used
  126 the command can't be run     127 it can't be found     130 interrupted
"""


class Command(NamedTuple):
    """A subcommand: its words, what it does, its options, and the function that does it."""

    words: str
    text: str
    options: tuple[Option, ...]
    start: Callable[[Namespace], int]
    usage: str = ""
    more: str = ""
    takes_command: bool = False


def _run(arguments: Namespace) -> int:
    from reserve_gpu.launch import run

    return run(arguments)


def _status(arguments: Namespace) -> int:
    from reserve_gpu.overview import status

    found = status()
    _tell(found, found.to_text().replace("%reserve_gpu", "reserve-gpu run"), arguments)
    return 0


def _check(arguments: Namespace) -> int:
    from reserve_gpu.frameworks import check
    from reserve_gpu.live import Live

    with Live(sys.stderr) as live:
        found = check(progress=live.show_check)
    _tell(found, str(found), arguments)
    return 0 if found.is_well else NOT_WELL


def _install(arguments: Namespace) -> int:
    from reserve_gpu.kernelspec import install

    _show(install(arguments))
    return 0


def _uninstall(arguments: Namespace) -> int:
    from reserve_gpu.kernelspec import uninstall

    _show(uninstall(arguments))
    return 0


def _start_kernel(arguments: Namespace) -> int:
    from reserve_gpu.launch import start_kernel

    return start_kernel(arguments)


COMMANDS = (
    Command(
        "run",
        "Reserve GPUs, set the CUDA variables, and become the command.",
        options.REQUEST,
        _run,
        "reserve-gpu run [options] [DEVICE ...] -- COMMAND ...",
        """\
The command has the same process id, so signals and its exit code are its own. The GPUs are free
when it has ended, and whatever it started and left running. What is said here is said on stderr.

examples:
  reserve-gpu run -- python train.py             on the first idle GPU
  reserve-gpu run -n 2 --wait 1h -- python train.py
                                                 on two; wait for them for up to an hour
  reserve-gpu run 1,3 -- bash                    GPUs 1 and 3 for all that this shell starts
  mpirun -n 4 reserve-gpu run -- python rank.py  a GPU for each rank

"""
        + EXIT_CODES,
        takes_command=True,
    ),
    Command(
        "status", "Show every GPU, who uses it and who has reserved it.", (options.JSON,), _status
    ),
    Command(
        "check",
        "Show whether each framework uses exactly the GPUs that are reserved.",
        (options.JSON,),
        _check,
        more="""\
Asks PyTorch, TensorFlow, JAX and others, each in a process of its own; run it under `reserve-gpu
run` to check what a command would get: reserve-gpu run -- reserve-gpu check. Exit code 1: not so.
""",
    ),
    Command(
        "kernel install",
        "Install a kernel for notebooks that has its GPU before its first line runs.",
        options.KERNEL,
        _install,
        more="""\
It is started with this Python. Where no GPU is free it starts all the same, sees no GPU, and its
first cell shows why. --wait may be up to 45s, as notebooks give up on a kernel after 60 s.
""",
    ),
    Command(
        "kernel uninstall",
        "Take away what `kernel install` has installed.",
        (options.KERNEL_NAME, *options.PLACES),
        _uninstall,
    ),
    # for kernelspecs, not for people: not listed
    Command("kernel start", "", options.KERNEL_REQUEST, _start_kernel, takes_command=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say, those of this process by default; returns the exit code."""
    _open_standard_descriptors()
    try:
        parser = _parser()
        if "_ARGCOMPLETE" in os.environ:
            _complete(parser)
        return _start(parser, list(sys.argv[1:] if arguments is None else arguments))
    except errors.ReserveGPUError as error:
        from reserve_gpu.launch import exit_code, say, spoken

        say(spoken(error))
        return exit_code(error)
    except KeyboardInterrupt:
        from reserve_gpu.launch import say

        say("Interrupted; nothing was reserved.")
        return INTERRUPTED


def _start(parser: Parser, words: list[str]) -> int:
    """Parse what comes before the command, if it is a subcommand that takes one, and call it."""
    from reserve_gpu.launch import split

    own, command = words, None
    if any(words[: len(c.words.split())] == c.words.split() for c in COMMANDS if c.takes_command):
        own, command = split(words)
    found = parser.parse_args(own, Namespace(command=command))
    if found.version:
        _show(_version())
        return 0
    if "start" not in found:
        parser.error("there is no command")
    code: int = found.start(found)
    return code


def _parser() -> Parser:
    parser = Parser("reserve-gpu", description=TEXT, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="store_true", help="show the version")
    groups = {"": parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)}
    for command in COMMANDS:
        group, _, name = command.words.rpartition(" ")
        if group not in groups:
            above = groups[""].add_parser(group, help=f"see reserve-gpu {group} --help")
            groups[group] = above.add_subparsers(metavar="COMMAND", required=True)
        listed: dict[str, Any] = {"help": command.text} if command.text else {}
        one = groups[group].add_parser(
            name,
            **listed,
            usage=command.usage or None,
            description=command.text,
            epilog=command.more,
            formatter_class=RawDescriptionHelpFormatter,
        )
        for option in command.options:
            one.add_argument(*option.flags, **option.settings)
        one.set_defaults(start=command.start)
    return parser


def _complete(parser: Parser) -> None:
    """Answer a shell that completes a command line, and end; argcomplete is no dependency."""
    with suppress(ImportError):
        import argcomplete

        hidden = [command.words.split()[-1] for command in COMMANDS if not command.text]
        argcomplete.autocomplete(parser, exclude=hidden)


def _tell(found: Status | Check, text: str, arguments: Namespace) -> None:
    if arguments.json:
        import json

        _show(json.dumps(found.to_dict(), indent=2))
    else:
        _show(text)


def _show(text: str) -> None:
    """Print what was asked for. A reader that goes away ends this quietly, as it does `ls`."""
    import signal

    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    print(text, flush=True)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"reserve-gpu {version('reserve_gpu')}"
    except PackageNotFoundError:
        return "reserve-gpu, not installed"


def _open_standard_descriptors() -> None:
    """Let no file that is opened here become a command's standard input, output or error.

    What was closed is closed again for the command: Python's descriptors don't outlive exec.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:  # the lowest that is free
        pass
    os.close(number)
    nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
