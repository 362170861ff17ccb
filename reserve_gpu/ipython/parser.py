"""The parser and the help text of %reserve_gpu."""

from __future__ import annotations

from argparse import SUPPRESS, RawDescriptionHelpFormatter

from reserve_gpu.model.option import Option, add
from reserve_gpu.option_parser import Parser
from reserve_gpu.request_options import HOW, WHEN, WHICH

# Options that run the command with the same name, each with the error message for a line that also
# names a GPU. {} stands for the value of --join, and {held} for the GPUs that this kernel holds.
COMMANDS = {
    "status": "--status shows every GPU and takes no GPU names.",
    "release": "--release takes no GPU names: it releases everything that this kernel holds. "
    "This kernel holds {held}.",
    "join": "--join takes only one name: --join {}",
    "check": "--check checks the GPUs of this kernel and takes no GPU names.",
}
OTHERS = (
    Option("--status", "show every GPU with its reservations and its processes"),
    Option("--all", "with --status: list each GPU, even if many free ones are alike"),
    Option("--hosts HOST", "with --status: show other machines over ssh", nargs="*"),
    Option("--release", "release everything that this kernel holds"),
    Option("--join WHICH", "use the GPUs of another notebook of yours; give one of its GPUs, "
           "its name, or its pid", nargs="?", const=""),
    Option("--check", "check that each framework uses exactly the reserved GPUs"),
)  # fmt: skip
HELP = Option("-h --help", "show this help")

TEXT = """\
Reserve a GPU for this kernel, and set the CUDA variables for later code.

  %reserve_gpu [DEVICE ...] [OPTION ...]"""
CHAPTERS = {
    "selecting GPUs": WHICH,
    "reserving": HOW,
    "ending the reservation": WHEN,
    "instead of reserving": (*OTHERS, HELP),
}
EXAMPLES = """\
examples:
  %reserve_gpu                           the first idle GPU
  %reserve_gpu 1,3                       GPUs 1 and 3; CUDA numbers them 0 and 1
  %reserve_gpu -n 2 --min-memory 16GB    two connected GPUs of 16 GB or more
  %reserve_gpu --memory 10GB             10 GB of a GPU that others share
  %reserve_gpu --wait 1h --note thesis   wait for up to an hour, with a note
"""


def magic_parser() -> Parser:
    """Return the parser of %reserve_gpu."""
    parser = Parser(
        prog="%reserve_gpu",
        usage=SUPPRESS,  # the usage line would list all options before the description
        description=TEXT,
        epilog=EXAMPLES,
        add_help=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    for title, options in CHAPTERS.items():
        add(options, parser.add_argument_group(title))
    return parser
