"""What people can type besides a request: a row in COMMANDS for each folder beside this file.

The command line, the magic, their help and what Tab offers follow from it: what has no row is
unknown to all of them. Nothing of a command is loaded before it is used. So a row names it, as
`top.live.TOP`, which is TOP in `top/live.py`.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from reserve_gpu.model.option import Option
from reserve_gpu.system import loader

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Sequence

    from reserve_gpu.render.pictures import Picture
    from reserve_gpu.render.status_view import Status

    T = TypeVar("T")


class Output(NamedTuple):
    """What a command of the shell comes to: a text for stdout, and the exit code.

    form: of the text, as people name it behind --format.
    """

    text: str = ""
    code: int = 0
    form: str = "text"


class Subcommand(NamedTuple):
    """What words of the command line do: it stands in the folder, and `Words` in the table."""

    start: Callable[[Namespace], Output]
    options: tuple[Option, ...] = ()
    usage: str = ""
    more: str = ""  # for its own help
    # Tells our words from a command to run behind them; None if there is none.
    split: Callable[[list[str]], tuple[list[str], list[str]]] | None = None


class Words(NamedTuple):
    """What people type in a shell, and what it does; without a text help does not list it.

    home: of the Subcommand.
    """

    typed: str
    text: str
    home: str


class OptionOfCommand(Option):
    """An option that a command brings.

    home: of what it stands for. no_names: what the magic says where a GPU is named, too; {} is what
    was named.
    """

    def __init__(
        self, usage: str, text: str, home: str = "", no_names: str = "", **settings: Any
    ) -> None:
        super().__init__(usage, text, **settings)
        self.home, self.no_names = home, no_names


class OptionOfMagic(OptionOfCommand):
    """An option of the magic. Without a home it goes with --status.

    home: of a function that is called with what was parsed, in place of a reservation; returns what
    the cell displays, if anything is left.
    """


class OptionOfOthers(OptionOfCommand):
    """The option of the command line that means other machines; there is one at most.

    home: of what makes Others of its words.
    """


class OptionOfRun(OptionOfCommand):
    """An option of `run` that tells programs what becomes of the reservation.

    home: of a function that gets what was parsed, and returns a Teller, if that asks for one.
    """


class OptionOfKernel(OptionOfCommand):
    """An option of `kernel install` that has a batch system start the kernel.

    home: of a function that gets the kernelspec, what was parsed, and the words behind `--`. It
    returns the kernelspec for that. name: of the batch system, for people.
    """

    def __init__(self, usage: str, text: str, home: str, name: str) -> None:
        super().__init__(usage, text, home)
        self.name = name


class Form(NamedTuple):
    """What a status is given out as. text: what it is for. is_general: a report has it, too.

    home: of the function that gets what was seen, and what that is about.
    """

    name: str
    text: str
    home: str = ""
    is_general: bool = True


class Shown(Protocol):
    """What a command has found out."""

    @property
    def host(self) -> str:
        """Return the name of the machine, or of several."""

    def picture(self) -> Picture:
        """Return what it looks like."""

    def to_dict(self) -> dict[str, Any]:
        """Return what programs read."""


class Seen(Shown, Protocol):
    """How a machine stands, or several."""

    @property
    def machines(self) -> tuple[Status, ...]:
        """Return the status of each machine that answers."""


class Others(Protocol):
    """Other machines: what `--hosts` means. All that asks them raises RequestError.

    words: what was typed for them, by default every group; it is checked when it is used.
    """

    words: Sequence[str]

    def look(self, *, is_all: bool = False) -> Seen:
        """Ask them how they stand. is_all: each device gets a line."""

    def ask(self, words: Sequence[str], read: Callable[[object], T]) -> dict[str, T | str]:
        """Run a command of ours on each; returns what it has said, or a line that says why not.

        read: returns what the JSON means that the command prints, or raises FormatError.
        """

    def kernel(self, spec: dict[str, Any], wishes: Namespace, name: str) -> dict[str, Any]:
        """Return a kernelspec that starts the kernel there. name: of the kernel."""

    def lacks(self) -> list[str]:
        """Return the packages that are missing here for such a kernel, as a shell takes them."""


class Command:
    """What a folder brings: words of the command line, options of the magic, formats."""

    def __init__(self, name: str, *parts: Words | OptionOfCommand | Form) -> None:
        self.name, self.parts = name, parts


COMMANDS = (
    Command("run",
        Words("run", "Reserve GPUs, set the CUDA variables, and become the command.",
              "run.command.RUN")),
    Command("status",
        Words("status", "Show every GPU, who uses it and who has reserved it.",
              "status.status.STATUS"),
        OptionOfMagic("--status", "show every GPU, who uses it and who has it",
                      "status.status.show_in_notebook",
                      "--status shows every GPU; it takes no names."),
        OptionOfMagic("--all", "with --status: each GPU, also where many are free and alike"),
        Form("text", "the default"), Form("json", "for programs")),
    Command("hosts",
        OptionOfMagic("--hosts HOST", "with --status: of other machines, by ssh", nargs="*"),
        OptionOfOthers("--hosts HOST", "of other machines, by ssh: groups of [hosts] in "
                       "/etc/reserve_gpu.toml or ~/.config/reserve_gpu.toml, or names "
                       "(lab1 gpu[01-04]); without a name all groups",
                       "hosts.remote_status.OtherMachines", nargs="*")),
    Command("top",
        Words("top", "Show the same live in a terminal, each second, until q.", "top.live.TOP")),
    Command("report",
        Words("report", "Show who used what: GPU-hours that were reserved, used and idle.",
              "report.accounting.REPORT")),
    Command("reservations",
        Words("join", "Start a shell or a command on the GPUs that a notebook of yours has.",
              "reservations.list_join_release.JOIN"),
        Words("list", "List what you have reserved on this machine.",
              "reservations.list_join_release.LIST"),
        Words("release", "Have a notebook of yours release its GPUs.",
              "reservations.list_join_release.RELEASE"),
        OptionOfMagic("--release", "release what this kernel holds",
                      "reservations.list_join_release.release_own",
                      "--release releases all that this kernel holds; it takes no names."),
        OptionOfMagic("--join WHICH", "use the GPUs that another notebook of yours has: by a GPU, "
                      "its name, or its pid",
                      "reservations.list_join_release.join_from_notebook",
                      "Give one name: --join {}", nargs="?", const="")),
    Command("check",
        Words("check", "Show whether each framework uses exactly the GPUs that are reserved.",
              "check.frameworks.CHECK"),
        OptionOfMagic("--check", "does each framework use exactly what is reserved?",
                      "check.frameworks.check_in_notebook",
                      "--check is about what this kernel holds; it takes no names.")),
    Command("kernels",
        Words("kernel install",
              "Install a kernel for notebooks that has its GPU before its first line runs.",
              "kernels.kernelspec.INSTALL"),
        # What a kernel is prepared with that another machine starts here. Not for people.
        Words("kernel hold", "", "kernels.kernelspec.HOLD"),
        # What installed kernels are started with, so these words must stay as they are.
        Words("kernel start", "", "kernels.kernelspec.START")),
    Command("agents",
        Words("why", "Would I get a GPU now, and if not, why not, and when?",
              "agents.why.WHY"),
        Words("skill", "Print a page that teaches a coding agent to reserve its GPUs.",
              "agents.skill.SKILL"),
        OptionOfRun("--json", "what we say, as lines of JSON on stderr",
                    "agents.events.of_arguments"),
        OptionOfRun("--events PLACE", "the same to a descriptor (3) or a file")),
    Command("slurm",
        OptionOfKernel("--slurm", "in a job of Slurm's; behind -- what srun takes",
                       "slurm.srun.kernel", "Slurm"),
        # What such a kernel is started with here, and on its node. Not for people.
        Words("kernel slurm", "", "slurm.srun.SLURM"),
        Words("kernel node", "", "slurm.srun.NODE")),
    Command("export",
        Form("html", "a page", "export.html_page.page"),
        Form("prometheus", "for node_exporter's textfile collector", "export.prometheus.text",
             is_general=False)),
)  # fmt: skip

NAMES = {command.name for command in COMMANDS}
PARTS = [part for command in COMMANDS for part in command.parts]
WORDS = tuple(part for part in PARTS if isinstance(part, Words))
MAGIC_OPTIONS = tuple(part for part in PARTS if isinstance(part, OptionOfMagic))
OTHERS = tuple(part for part in PARTS if isinstance(part, OptionOfOthers))
RUN_OPTIONS = tuple(part for part in PARTS if isinstance(part, OptionOfRun))
KERNEL_OPTIONS = tuple(part for part in PARTS if isinstance(part, OptionOfKernel))
FORMS = tuple(part for part in PARTS if isinstance(part, Form))


def load(home: str) -> Any:
    """Load what a row names."""
    module, _, name = home.rpartition(".")
    return getattr(loader.load(f"commands.{module}"), name)


def others(arguments: Namespace) -> Others | None:
    """Return the other machines that a line is about; None if it is about this one."""
    words = [getattr(arguments, option.attribute) for option in OTHERS]
    return None if words in ([], [None]) else others_of(words[0])


def others_of(words: Sequence[str]) -> Others | None:
    """Return the other machines that these words mean, without any all that are known here."""
    machines: list[Others] = [load(option.home)(words) for option in OTHERS]
    return machines[0] if machines else None


# -- what an answer is given out as --------------------------------------------------------------


def format_option(forms: tuple[Form, ...]) -> tuple[Option, ...]:
    """Return --format with these choices; and --json, which is one of them in short."""
    words = ", ".join(f"{each.name} ({each.text})" for each in forms)
    names = tuple(each.name for each in forms)
    return (
        Option("--format", words, choices=names, default="text"),
        Option("--json", "--format json", dest="format", action="store_const", const="json"),
    )


def answer(seen: Shown, form: str, about: str, code: int = 0) -> Output:
    """Return what was seen in a form. about: what it shows, for a title, as `GPUs`."""
    if form == "text":
        return Output(seen.picture().to_text(), code)
    if form == "json":
        return Output(json.dumps(seen.to_dict(), indent=2), code, form)
    home = next(each.home for each in FORMS if each.name == form)
    return Output(load(home)(seen, about), code, form)


def end_with_ssh() -> None:
    """Let what would end this at once end ssh as well, which may wait for a host that hangs."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
