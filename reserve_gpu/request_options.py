"""The options for requesting GPUs.

Each option is a constant in this module. Most options are also keyword arguments of `reserve()`.
The magic, the command line, the Dask plugin and Tab completion share these constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reserve_gpu import api
from reserve_gpu.allocation.request import parse
from reserve_gpu.model.errors import RequestError
from reserve_gpu.model.option import Option, add
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.option_parser import Parser
from reserve_gpu.reservation import feature
from reserve_gpu.system import spawn

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from reserve_gpu.api import Outcome
    from reserve_gpu.model.progress import Progress
    from reserve_gpu.model.requests import Request
    from reserve_gpu.render.frontends import Frontend


def _count(text: str) -> int:
    if not text.isdecimal():
        raise RequestError(f"{sanitize(text)!r} is not a valid number of GPUs. Example: -n 2.")
    return int(text)


DEVICES = Option(
    "devices DEVICE",
    "GPUs to reserve: an index (2, GPU2 or cuda:2), several (1,3 or 1 3, in this order), a range "
    "(0-3), a UUID or its beginning (GPU-8f2a), a MIG instance (1:0), or a PCI bus ID "
    "(0000:03:00.0); default: the first free GPU",
    nargs="*",
)
COUNT = Option(
    "-n --count COUNT", "number of GPUs; the best-connected ones are chosen", "1 2 4 8", type=_count
)
MIN_MEMORY = Option(
    "--min-memory SIZE",
    "minimum total memory of each GPU: 16GB, 16GiB, 16000 (MiB)",
    "8GiB 16GiB 24GiB 40GiB 80GiB",
)
NAME = Option("--name TEXT", "only GPUs whose name contains this text")
WAIT = Option(
    "--wait DURATION",
    "wait in the queue until a GPU is available, for up to DURATION if given (90s, 10m, 2h, 1h30m)",
    "10m 1h 8h 1d",
    nargs="?",
    const=True,
)
MEMORY = Option(
    "--memory SIZE",
    "reserve only a part of each GPU: the most memory that you will use (10GB, or 50%% of the "
    "GPU); others can reserve the rest",
    "4GB 10GB 20GB 40GB 50%",
)
NOTE = Option("--note TEXT", "a note that others see next to your reservation")
OPTIONAL = Option("--optional", "continue without a GPU if none is available")

WHICH = (DEVICES, COUNT, MIN_MEMORY, NAME)
HOW = (MEMORY, WAIT, NOTE, OPTIONAL)
WHEN = feature.options()
REQUEST = (*WHICH, *HOW, *WHEN)
REQUEST_OF_COMMAND = tuple(option for option in REQUEST if option.suits_commands)
# The options that are keyword arguments of reserve(). OPTIONAL is not included, because it controls
# what a frontend does after a refusal. Kernels and Dask workers start even after a refusal.
REQUEST_KEYWORDS = tuple(option for option in REQUEST if option is not OPTIONAL)


def reserve_keywords(arguments: Namespace) -> dict[str, Any]:
    """Convert parsed arguments to keyword arguments for `reserve()`."""
    names = [option.attribute for option in REQUEST_KEYWORDS]
    values = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    return {**values, "devices": arguments.devices or None}


def to_request(arguments: Namespace) -> tuple[Request, Any]:
    """Convert parsed arguments to a request.

    Args:
        arguments: The parsed arguments.

    Returns:
        The request and the maximum time to wait, as in `reserve()`.

    Raises:
        RequestError: The request is invalid.
    """
    values = reserve_keywords(arguments)
    wait = values.pop("wait")
    return parse(**values), wait


def reserve_parsed(
    arguments: Namespace, frontend: Frontend, progress: Callable[[Progress], object] | None = None
) -> Outcome:
    """Reserve devices according to parsed arguments.

    Args:
        arguments: The parsed arguments.
        frontend: The frontend, which determines the command syntax in error messages.
        progress: A function to call during a wait, as in `api.ask()`.

    Returns:
        The outcome of the request.

    Raises:
        ReserveGPUError: Any error that `reserve()` can raise.
    """
    request, wait = to_request(arguments)
    is_optional = getattr(arguments, "optional", False)  # some commands lack this option
    return api.ask(request, wait, progress, frontend, is_optional=is_optional)


def words(arguments: Namespace) -> list[str]:
    """Return the command-line arguments that are equivalent to parsed request options."""
    result: list[str] = []
    for option in REQUEST_KEYWORDS:
        value: Any = getattr(arguments, option.attribute, None)  # some commands lack this option
        if option is DEVICES:
            result += value
        elif value is True:
            result.append(option.flag)
        elif value not in (None, False):
            result.append(f"{option.flag}={value}")
    return result


def kernel_start(arguments: Namespace) -> list[str]:
    """Return a prefix for a kernel's command that makes the kernel reserve a GPU at startup."""
    return spawn.python("-m", "reserve_gpu", "kernel", "start", *words(arguments), "--")


def request_of(words: Sequence[str]) -> Namespace:
    """Parse a kernel's request options, or raise RequestError if they are invalid."""
    parser = Parser("reserve-gpu kernel install", add_help=False)
    add(REQUEST_KEYWORDS, parser)
    return parser.parse_args(words)
