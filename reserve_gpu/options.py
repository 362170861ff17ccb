"""The one table of options, and the parser made of it."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from typing import Any, NamedTuple, NoReturn

from reserve_gpu.errors import RequestError
from reserve_gpu.text import shown


class Option(NamedTuple):
    """One argument, as argparse takes it."""

    flags: tuple[str, ...]
    settings: dict[str, Any]


def _option(*flags: str, **settings: Any) -> Option:
    return Option(flags, settings)


REQUEST = (
    _option(
        "devices",
        nargs="*",
        metavar="DEVICE",
        help="GPUs to take: an index (2), several (1,3 or 1 3, order kept), a UUID or its start "
        "(GPU-8f2a), a MIG instance (1:0), a PCI bus id (0000:03:00.0); none: the first free one",
    ),
    _option("-n", "--count", type=int, metavar="COUNT", help="how many, the best connected ones"),
    _option("--min-memory", metavar="SIZE", help="total memory of each: 16GB, 16GiB, 16000 (MiB)"),
    _option("--name", metavar="TEXT", help="only GPUs with this text in their name"),
    _option(
        "--exclude", nargs="+", action="extend", default=[], metavar="DEVICE", help="never these"
    ),
    _option(
        "--wait",
        nargs="?",
        const=True,
        metavar="DURATION",
        help="wait in line until there is one, for DURATION (90, 90s, 10m, 2h) or for ever",
    ),
    _option("--share", action="store_true", help="also a GPU that is in use or reserved"),
    _option("--note", metavar="TEXT", help="a line for others to read beside your reservation"),
    _option("--optional", action="store_true", help="where no GPU can be had, go on without one"),
)

JSON = _option("--json", action="store_true", help="as JSON, for programs")

PLACES = (
    _option("--user", action="store_true", help="for this user; the default"),
    _option("--sys-prefix", action="store_true", help="in this Python's environment"),
    _option("--prefix", metavar="DIR", help="in DIR/share/jupyter/kernels"),
)

KERNEL_NAME = _option(
    "--name", default="python3-gpu", metavar="NAME", help="of the kernel; python3-gpu by default"
)
KERNEL_REQUEST = tuple(option for option in REQUEST if option.flags != ("--optional",))
KERNEL = (
    *(option for option in KERNEL_REQUEST if option.flags != ("--name",)),
    _option("--gpu-name", metavar="TEXT", help="only GPUs with this text in their name"),
    KERNEL_NAME,
    _option("--display-name", metavar="TEXT", help="what notebooks show: Python 3 (GPU)"),
    *PLACES,
)

MAGIC = (
    _option("--status", action="store_true", help="show every GPU, who uses it and who has it"),
    _option(
        "--check", action="store_true", help="does each framework use exactly what is reserved?"
    ),
    _option("--json", action="store_true", help="with --status or --check: for programs"),
    _option("--release", action="store_true", help="let go of what this kernel holds"),
)

HELP = _option("-h", "--help", action="store_true", help="show this")

MAGIC_TEXT = """\
Reserve a GPU for this kernel, and set the CUDA variables for what it runs next.

  %reserve_gpu [DEVICE ...] [OPTION ...]"""

MAGIC_EXAMPLES = """\
examples:
  %reserve_gpu                           the first idle GPU
  %reserve_gpu 1,3                       GPUs 1 and 3, which CUDA then numbers 0 and 1
  %reserve_gpu -n 2 --min-memory 16GB    two of 16 GB or more, as close to each other as can be
  %reserve_gpu --wait 1h --note thesis   the first that comes free within an hour, and why
"""

# The chapters of the manual page, by the last name of each option; what is in none is in the last.
CHAPTERS = {
    "which GPU": ("devices", "--count", "--min-memory", "--name", "--exclude"),
    "how": ("--wait", "--share", "--note", "--optional"),
    "instead of reserving one": (),
}


class Parser(ArgumentParser):
    """A parser that raises RequestError where others end the process."""

    def error(self, message: str) -> NoReturn:
        """Raise what went wrong."""
        more = f"{self.prog}?" if self.prog.startswith("%") else f"{self.prog} --help"
        raise RequestError(f"{shown(message, 200)}. See {more}")


def magic_help() -> str:
    """The manual page of the magic."""
    return magic_parser().format_help()


def magic_parser() -> Parser:
    """The parser of the magic's line."""
    parser = Parser(
        prog="%reserve_gpu",
        usage=SUPPRESS,  # a list of all options, before anything is said
        description=MAGIC_TEXT,
        epilog=MAGIC_EXAMPLES,
        add_help=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    chapters = {title: parser.add_argument_group(title) for title in CHAPTERS}
    for option in (*REQUEST, *MAGIC, HELP):
        titles = [title for title, flags in CHAPTERS.items() if option.flags[-1] in flags]
        chapter = chapters[(titles or list(CHAPTERS)[-1:])[0]]
        chapter.add_argument(*option.flags, **option.settings)
    return parser
