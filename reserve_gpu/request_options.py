"""The options of a request, their parser, and the reservation that they ask for.

A new option of what is reserved is a row here and a keyword of `reserve()`. The magic, the command
line, Dask's worker and Tab completion take it from here.
"""

from __future__ import annotations

from argparse import ArgumentError, ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any, NoReturn

from reserve_gpu import api
from reserve_gpu.allocation.request import parse
from reserve_gpu.gpus import names
from reserve_gpu.model.errors import PROGRAM, RequestError, own_command
from reserve_gpu.model.option import Option, add, likely
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.reservation import feature
from reserve_gpu.system import spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.api import Outcome
    from reserve_gpu.model.progress import Progress
    from reserve_gpu.model.requests import Request
    from reserve_gpu.render.frontends import Frontend

MESSAGE_LIMIT = 200  # characters of argparse's message, which repeats what was typed


def _count(text: str) -> int:
    if not text.isdecimal():
        raise RequestError(f"{sanitize(text)!r} is no number of GPUs. Give one, as -n 2.")
    return int(text)


DEVICES = Option(
    "devices DEVICE",
    "GPUs to take: an index (2, GPU2 or cuda:2), several (1,3 or 1 3, order kept), a range "
    "(0-3), a UUID or its start (GPU-8f2a), a MIG instance (1:0), a PCI bus id (0000:03:00.0); "
    "none: the first free one",
    nargs="*",
)
COUNT = Option("-n --count COUNT", "how many, the best connected ones", "1 2 4 8", type=_count)
MIN_MEMORY = Option(
    "--min-memory SIZE",
    "total memory of each: 16GB, 16GiB, 16000 (MiB)",
    "8GiB 16GiB 24GiB 40GiB 80GiB",
)
NAME = Option("--name TEXT", "only GPUs with this text in their name")
WAIT = Option(
    "--wait DURATION",
    "wait in the queue until there is one, for DURATION (90s, 10m, 2h, 1h30m) or for ever",
    "10m 1h 8h 1d",
    nargs="?",
    const=True,
)
MEMORY = Option(
    "--memory SIZE",
    "a part of it: the most memory that you will use (10GB, or 50%% of what it has); others "
    "may have the rest",
    "4GB 10GB 20GB 40GB 50%",
)
NOTE = Option("--note TEXT", "a line for others to read beside your reservation")
OPTIONAL = Option("--optional", "if no GPU can be had, go on without one")

WHICH = (DEVICES, COUNT, MIN_MEMORY, NAME)
HOW = (MEMORY, WAIT, NOTE, OPTIONAL)
WHEN = feature.options()
REQUEST = (*WHICH, *HOW, *WHEN)
REQUEST_OF_COMMAND = tuple(option for option in REQUEST if option.suits_commands)
# These are keywords of reserve(). OPTIONAL only says what follows a refusal, so each front end that
# has it passes it on by itself; kernels and Dask's workers start in any case.
REQUEST_KEYWORDS = tuple(option for option in REQUEST if option is not OPTIONAL)


def _typed(program: str) -> str:
    """Return the words that start a parser's program here: `reserve-gpu` may need a path."""
    first, *rest = program.split()
    return " ".join([own_command() if first == PROGRAM else first, *rest])


class Parser(ArgumentParser):
    """A parser that raises RequestError where argparse would end the process."""

    def parse_known_args(  # type: ignore[override] # with these two argparse calls it
        self, args: Sequence[str], namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        """Parse the words; a subcommand's parser gets its own ones from argparse.

        Raises RequestError for a word that is unknown.
        """
        # One way to write an option: what is like one is answered with the nearest.
        self.allow_abbrev = self.exit_on_error = False
        try:
            arguments, unknown = super().parse_known_args(args, namespace)
        except ArgumentError as error:
            if isinstance(error.__context__, RequestError):  # our own text about a value
                raise error.__context__ from None
            flag = (error.argument_name or "").partition("/")[0]
            action = self._option_string_actions.get(flag)
            needs = f"needs a value: {action.help}" if action and action.nargs != 0 else ""
            self.error(f"{flag} {needs or error.message}".replace("%%", "%"))
        # Without the hyphens, which are alike in all of them.
        known = [each[2:] for each in self._option_string_actions if each.startswith("--")]
        for word in unknown:
            flag = word.partition("=")[0]
            if flag.startswith("-") and flag != "--":
                near = likely(flag.lstrip("-"), known, "--")
                raise RequestError(f"There is no option {sanitize(flag)}. {near}")
        if unknown:
            self.error(f"What is {' '.join(unknown)}? A value of several words needs quotes")
        devices = getattr(arguments, "devices", ())
        for word in {*known}.intersection(devices):
            raise RequestError(f"{word!r} names no GPU. Did you mean --{word}?")
        names.parse(devices)
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        """Raise RequestError with argparse's message, and where to read more, if there is help."""
        more = f" See {_typed(self.prog)} --help" if self.add_help else ""
        if self.prog.startswith("%"):
            more = f" See {self.prog}?"
        raise RequestError(f"{sanitize(message, MESSAGE_LIMIT)}.{more}")


def wishes(arguments: Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `reserve()` among what was parsed."""
    names = [option.attribute for option in REQUEST_KEYWORDS]
    values = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {**values, "devices": arguments.devices or None}


def to_request(arguments: Namespace) -> tuple[Request, Any]:
    """Return the request that was parsed, and how long to wait for it. Raises RequestError."""
    values = wishes(arguments)
    wait = values.pop("wait")
    return parse(**values), wait


def reserve_parsed(
    arguments: Namespace, frontend: Frontend, progress: Callable[[Progress], object] | None = None
) -> Outcome:
    """Reserve what was parsed, for a front end. Raises what `reserve()` raises."""
    request, wait = to_request(arguments)
    is_optional = getattr(arguments, "optional", False)  # not every command has the option
    return api.ask(request, wait, progress, frontend, is_optional=is_optional)


def words(arguments: Namespace) -> list[str]:
    """Return the words on a command line that mean these options of a request."""
    result: list[str] = []
    for option in REQUEST_KEYWORDS:
        value: Any = getattr(arguments, option.attribute, None)  # commands lack some
        if option is DEVICES:
            result += value
        elif value is True:
            result.append(option.flag)
        elif value not in (None, False):
            result.append(f"{option.flag}={value}")
    return result


def kernel_start(arguments: Namespace) -> list[str]:
    """Return the words before a kernel's own command that reserve its GPU at its start."""
    return spawn.python("-m", "reserve_gpu", "kernel", "start", *words(arguments), "--")


def request_of(words: Sequence[str]) -> Namespace:
    """Parse the options of a kernel's request. Raises RequestError."""
    parser = Parser("reserve-gpu kernel install", add_help=False)
    add(REQUEST_KEYWORDS, parser)
    return parser.parse_args(words)
