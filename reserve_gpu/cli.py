"""reserve-gpu: parse, then call; errors become one text on stderr and an exit code here, alone.

A row in COMMANDS is a subcommand.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu import command, errors, foreign, option, options, settings
from reserve_gpu.calls import Late
from reserve_gpu.core import looking
from reserve_gpu.options import Parser
from reserve_gpu.report import page, prometheus
from reserve_gpu.report.faces import SHELL, shell
from reserve_gpu.report.progress import Live

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu import accounting, hosts, list_join_release, top
    from reserve_gpu.frameworks import check as checks
    from reserve_gpu.jupyter import kernelspec, remote
    from reserve_gpu.report.about_history import Report
    from reserve_gpu.report.about_hosts import Hosts
    from reserve_gpu.report.status import Status
else:
    top, checks, kernelspec = Late("top"), Late("frameworks.check"), Late("jupyter.kernelspec")
    list_join_release, accounting = Late("list_join_release"), Late("accounting")
    hosts, remote = Late("hosts"), Late("jupyter.remote")


LAST_STANDARD = 2  # the descriptor of stderr
DOES_NOT_FIT = 1  # exit code of `check`
MEANT = {  # by words that others have for it
    "reserve": "Type reserve-gpu run, or in a notebook %reserve_gpu.",
    "free": "Did you mean release, or status?",
    "ps": "Did you mean status, or list?",
}
OPTIONS = ("-h", "--help", "--version")

TEXT = "Reserve GPUs for a command, for as long as it runs."
RUN_TEXT = """\
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
REPORT_TEXT = """\
It shows what was logged where `history = true` is set: your own reservations,
and for root those of all. A part of a GPU counts by its share of the memory.

examples:
  reserve-gpu report                            each user, in the last 7 days
  reserve-gpu report --since Mon --by notebook  each notebook, since Monday
  reserve-gpu report --hosts lab                all machines of the group lab
  reserve-gpu report --since 2026-11-01 --format html > november.html
"""
CHECK_TEXT = """\
It asks PyTorch, TensorFlow, JAX and others of this Python, each in a process
of its own. The exit code is 1 if one of them uses other GPUs. To check what a
command would get: reserve-gpu run -- reserve-gpu check
"""
JOIN_TEXT = """\
Without a name your only reservation is joined, without a command your shell
is started. It has the same GPUs, the same part and the same variables. The
GPUs are taken as long as the notebook or the command lives.
"""
RELEASE_TEXT = """\
Without a name your only reservation is released. A notebook that has started
CUDA, a script and a command hold a GPU as long as they live: --end ends them.
The exit code is 75 if something is still held, or in use.
On another machine: ssh lab1 reserve-gpu release train.ipynb
"""
KERNEL_TEXT = """\
It is started with this Python. Where no GPU is free it starts anyway, sees no
GPU, and its first cell shows why. --wait may be up to 45s, as notebooks give
up on a kernel after 60 s. With --hosts it runs on the machine that has a free
GPU; where none is free it does not start.
"""


class Command(NamedTuple):
    """A subcommand."""

    words: str  # what people type for it
    text: str  # what it does; without one help does not list it
    options: tuple[option.Option, ...]
    start: Callable[[Namespace], int | str]  # does it; returns the exit code, or what to print
    usage: str = ""
    more: str = ""  # for its own help
    # Tells our words from a command to run behind them; None if there is none.
    split: Callable[[list[str]], tuple[list[str], list[str]]] | None = None


def _status(arguments: Namespace) -> int:
    if arguments.hosts is None:
        with Live(sys.stderr) as live:
            seen: Status | Hosts = looking.look(live.show)._replace(face=SHELL)
    else:
        _end_with_ssh()
        seen = hosts.look_at(arguments.hosts)
    _print(FORMATS[arguments.format](seen._replace(is_all=arguments.all)), arguments.format)
    return 0 if seen.machines else errors.DriverError.exit_code


def _end_with_ssh() -> None:
    """Let what would end this at once end ssh as well, which may wait for a host that hangs."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _report(arguments: Namespace) -> int:
    if arguments.hosts is not None:
        _end_with_ssh()
    report = accounting.report(arguments)
    form = arguments.format
    _print(report.to_page() if form == "html" else FORMATS[form](report), form)
    return 0 if report.has_answers else errors.DriverError.exit_code


def _check(arguments: Namespace) -> int:
    with Live(sys.stderr) as live:
        face = shell(["reserve-gpu", "check"])
        result = checks.check(progress=live.show_check, slow=live.show, face=face)
    _print(_json(result) if arguments.json else str(result))
    return 0 if result.is_well else DOES_NOT_FIT


def _release(arguments: Namespace) -> int:
    text, code = list_join_release.release(arguments)
    _print(text)
    return code


COMMANDS = (
    Command(
        "run",
        "Reserve GPUs, set the CUDA variables, and become the command.",
        (*options.REQUEST_OF_COMMAND, options.QUIET),
        command.run,
        command.SYNOPSIS,
        RUN_TEXT,
        command.split,
    ),
    Command(
        "status",
        "Show every GPU, who uses it and who has reserved it.",
        (options.FORMAT, options.FORMAT_JSON, options.ALL, options.HOSTS),
        _status,
    ),
    Command(
        "top",
        "Show the same live in a terminal, each second, until q.",
        (),
        lambda arguments: top.run(arguments),
    ),
    Command(
        "report",
        "Show who used what: GPU-hours that were reserved, used and idle.",
        (options.SINCE, options.BY, options.REPORT_FORMAT, options.FORMAT_JSON, options.HOSTS),
        _report,
        more=REPORT_TEXT,
    ),
    Command(
        "join",
        "Start a shell or a command on the GPUs that a notebook of yours has.",
        (options.RESERVATIONS,),
        lambda arguments: list_join_release.join(arguments),
        "reserve-gpu join [WHICH] [-- COMMAND ...]",
        JOIN_TEXT,
        command.split_at_sign,
    ),
    Command(
        "list",
        "List what you have reserved on this machine.",
        (),
        lambda arguments: list_join_release.listed(arguments),
    ),
    Command(
        "release",
        "Have a notebook of yours release its GPUs.",
        (options.RESERVATIONS, options.ALL_HELD, options.END_IT),
        _release,
        more=RELEASE_TEXT,
    ),
    Command(
        "check",
        "Show whether each framework uses exactly the GPUs that are reserved.",
        (options.JSON,),
        _check,
        more=CHECK_TEXT,
    ),
    Command(
        "kernel install",
        "Install a kernel for notebooks that has its GPU before its first line runs.",
        options.KERNEL,
        lambda arguments: kernelspec.install(arguments),
        more=KERNEL_TEXT,
    ),
    # What a kernel on another machine is prepared with. Not for people.
    Command("kernel hold", "", options.HOLD, lambda arguments: remote.hold(arguments)),
    # What installed kernels are started with, so these words must stay as they are. Not for people.
    Command(
        "kernel start", "", options.REQUEST_THAT_GOES_ON, command.start_kernel, split=command.split
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say, those of this process by default; returns the exit code."""
    try:
        _open_standard_descriptors()
        if "_ARGCOMPLETE" in os.environ:
            _complete(_parser(COMMANDS))
        return _start(_words(list(sys.argv[1:] if arguments is None else arguments)))
    except errors.ReserveGPUError as error:
        command.say(command.error_text(error))
        return error.exit_code
    except KeyboardInterrupt:
        command.say("Interrupted; nothing was reserved.")
        return command.INTERRUPTED


def _words(typed: list[str]) -> list[str]:
    """Return the words that were typed, or those that another machine has sent as one."""
    if len(typed) == 1 and typed[0].startswith(settings.SENT):
        with suppress(ValueError):
            sent = foreign.parsed(bytes.fromhex(typed[0].removeprefix(settings.SENT)))
            if isinstance(sent, list):
                return [foreign.text(each, foreign.SIZE_LIMIT) for each in sent]
    return typed


def _start(words: list[str]) -> int:
    """Parse the words that are ours, and call the subcommand."""
    words = [*words[1:], "--help"] if words[:1] == ["help"] else words
    typed = [each for each in COMMANDS if each.words.split() == words[: each.words.count(" ") + 1]]
    if words and not typed:
        _require_command(words)
    own, to_run = words, None
    for subcommand in typed:
        if subcommand.split:
            length = len(subcommand.words.split())
            ours, to_run = subcommand.split(words[length:])
            own = words[:length] + ours
    arguments = _parser(typed or COMMANDS).parse_args(own, Namespace(command=to_run))
    if arguments.version:
        _print(_version())
        return 0
    if "start" not in arguments:  # the help is what was asked for, but a script has made a mistake
        _print(arguments.parser.format_help().rstrip())
        return errors.RequestError.exit_code
    answer: int | str = arguments.start(arguments)
    if isinstance(answer, int):
        return answer
    _print(answer)
    return 0


def _require_command(words: list[str]) -> None:
    """Raise RequestError for words that begin no subcommand, and are no options of their own."""
    first = words[0]
    known = [each.words for each in COMMANDS if each.text]
    is_group = any(each.startswith(f"{first} ") for each in known)
    if first in OPTIONS or (is_group and (len(words) == 1 or words[1].startswith("-"))):
        return
    wrong = " ".join(words[: 1 + is_group])
    if wrong in options.REMOVED:
        raise errors.RequestError(options.gone(wrong))
    near = MEANT.get(wrong) or option.likely(wrong, known)
    text = f"There is no command {errors.shown(wrong)}. {near} See reserve-gpu --help"
    raise errors.RequestError(text)


def _parser(commands: Sequence[Command]) -> Parser:
    parser = Parser("reserve-gpu", description=TEXT, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="store_true", help="show the version")
    groups = {"": parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)}
    for subcommand in commands:
        group, _, name = subcommand.words.rpartition(" ")
        if group not in groups:
            above = groups[""].add_parser(group, help=f"see reserve-gpu {group} --help")
            above.set_defaults(parser=above)
            groups[group] = above.add_subparsers(metavar="COMMAND")
        listed: dict[str, Any] = {"help": subcommand.text} if subcommand.text else {}
        own_parser = groups[group].add_parser(
            name,
            **listed,
            usage=subcommand.usage or None,
            description=subcommand.text,
            epilog=subcommand.more,
            formatter_class=RawDescriptionHelpFormatter,
        )
        option.add(subcommand.options, own_parser)
        own_parser.set_defaults(start=subcommand.start)
    return parser


def _complete(parser: Parser) -> None:
    """Answer a shell that completes a command line, and end; argcomplete is no dependency."""
    with suppress(ImportError):
        import argcomplete

        hidden = [subcommand.words.split()[-1] for subcommand in COMMANDS if not subcommand.text]
        argcomplete.autocomplete(parser, exclude=hidden)


def _json(result: Status | Hosts | Report | checks.Check) -> str:
    import json

    return json.dumps(result.to_dict(), indent=2)


# What a status is given out as; a report has a page of its own, and no metrics.
FORMATS: dict[str, Callable[[Any], str]] = {
    "text": lambda seen: seen.picture().to_text(),
    "json": _json,
    "html": page.page,
    "prometheus": lambda seen: prometheus.text(*seen.machines),
}


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"reserve-gpu {version('reserve_gpu')}"
    except PackageNotFoundError:
        return "reserve-gpu, not installed"


def _print(text: str, form: str = "text") -> None:
    """Print what was asked for. A reader that goes away ends this quietly, as it does `ls`.

    form: text for what people here read, in their encoding; all others are in UTF-8.
    """
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    encoding = None if form == "text" else "utf-8"
    sys.stdout.reconfigure(encoding=encoding, errors="replace")  # type: ignore[union-attr]
    try:
        print(text.removesuffix("\n"), flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python tries again at its end
        raise command.CommandError(f"stdout can't be written: {error.strerror}.", 74) from error


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
