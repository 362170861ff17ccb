"""The parser of the magic's line, and its manual page."""

from __future__ import annotations

from argparse import SUPPRESS, RawDescriptionHelpFormatter

from reserve_gpu.model.option import Option, add
from reserve_gpu.request_options import HOW, WHEN, WHICH, Parser

# Each stands for the command of that name. {} is a GPU that is named besides, which is a mistake.
COMMANDS = {
    "status": "--status shows every GPU; it takes no names.",
    "release": "--release releases all that this kernel holds; it takes no names.",
    "join": "Give one name: --join {}",
    "check": "--check is about what this kernel holds; it takes no names.",
}
OTHERS = (
    Option("--status", "show every GPU, who uses it and who has it"),
    Option("--all", "with --status: each GPU, also where many are free and alike"),
    Option("--hosts HOST", "with --status: of other machines, by ssh", nargs="*"),
    Option("--release", "release what this kernel holds"),
    Option("--join WHICH", "use the GPUs that another notebook of yours has: by a GPU, "
           "its name, or its pid", nargs="?", const=""),
    Option("--check", "does each framework use exactly what is reserved?"),
)  # fmt: skip
HELP = Option("-h --help", "show this")

TEXT = """\
Reserve a GPU for this kernel, and set the CUDA variables for what it runs next.

  %reserve_gpu [DEVICE ...] [OPTION ...]"""
CHAPTERS = {
    "which GPU": WHICH,
    "how": HOW,
    "until when": WHEN,
    "instead of reserving one": (*OTHERS, HELP),
}
EXAMPLES = """\
examples:
  %reserve_gpu                           the first idle GPU
  %reserve_gpu 1,3                       GPUs 1 and 3; for CUDA they are 0 and 1
  %reserve_gpu -n 2 --min-memory 16GB    two of 16 GB or more, close together
  %reserve_gpu --memory 10GB             10 GB of a GPU that others share
  %reserve_gpu --wait 1h --note thesis   wait for an hour at most, and say why
"""


def magic_parser() -> Parser:
    """Return the parser of the magic's line."""
    parser = Parser(
        prog="%reserve_gpu",
        usage=SUPPRESS,  # it would list all options before anything is explained
        description=TEXT,
        epilog=EXAMPLES,
        add_help=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    for title, options in CHAPTERS.items():
        add(options, parser.add_argument_group(title))
    return parser
