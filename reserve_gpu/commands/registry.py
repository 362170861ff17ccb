"""Every command of `reserve-gpu`: its help, and the module that has its arguments and its work."""

from typing import Any, NamedTuple

from reserve_gpu.system import loader


class Command(NamedTuple):
    """A row of the registry.

    Attributes:
        module: The module's name below `commands`. It has `add_arguments(parser)` and
            `run(arguments)`. A command that starts another program also has `split(words)`, which
            tells our words from that program's.
        help: One line for people. A command without it is for programs, and is not listed.
    """

    module: str
    help: str = ""


COMMANDS = {
    "run": Command("run.command", "Reserve GPUs, set the CUDA variables, and become the command."),
    "status": Command("status.status", "Show every GPU, who uses it and who has reserved it."),
    "top": Command("top.live", "Show the same live in a terminal, each second, until q."),
    "report": Command(
        "report.accounting", "Show who used what: GPU-hours that were reserved, used and idle."
    ),
    "join": Command(
        "reservations.join", "Start a shell or a command on the GPUs that a notebook of yours has."
    ),
    "list": Command("reservations.list", "List what you have reserved on this machine."),
    "release": Command("reservations.release", "Have a notebook of yours release its GPUs."),
    "check": Command(
        "check.frameworks", "Show whether each framework uses exactly the GPUs that are reserved."
    ),
    "kernel install": Command(
        "kernels.kernelspec",
        "Install a kernel for notebooks that has its GPU before its first line runs.",
    ),
    # Another machine starts it here to reserve for a kernel.
    "kernel hold": Command("kernels.hold"),
    # Installed kernels start with these words, so they must not change.
    "kernel start": Command("kernels.start"),
    "why": Command("agents.why", "Would I get a GPU now, and if not, why not, and when?"),
    "skill": Command(
        "agents.skill", "Print a page that teaches a coding agent to reserve its GPUs."
    ),
    # A kernel in a Slurm job starts with the first here, and with the second on its node.
    "kernel slurm": Command("slurm.relay"),
    "kernel node": Command("slurm.node"),
}


def load(name: str) -> Any:
    """Import a command's module."""
    return loader.load(f"commands.{COMMANDS[name].module}")
