"""The table of `reserve-gpu` commands, with each command's module and help text."""

from typing import Any, NamedTuple

from reserve_gpu.system import loader


class Command(NamedTuple):
    """A `reserve-gpu` command.

    Attributes:
        module: The module's name, relative to the `commands` package. The module defines
            `add_arguments(parser)` and `run(arguments)`. If the command starts another program, the
            module also defines `split(words)`, which separates `reserve-gpu`'s own arguments from
            that program's command line.
        help: One line of help text. Internal commands have none, so `--help` omits them.
    """

    module: str
    help: str = ""


COMMANDS = {
    "run": Command("run.command", "Reserve GPUs, set the CUDA variables, and run a command."),
    "status": Command("status.status", "Show every GPU, its users and its reservations."),
    "top": Command("top.live", "Show the status live in a terminal; press q to quit."),
    "report": Command(
        "report.accounting", "Report the GPU-hours that users reserved, used and left idle."
    ),
    "join": Command(
        "reservations.join", "Start a shell or a command on the GPUs of one of your notebooks."
    ),
    "list": Command("reservations.list", "List your reservations on this machine."),
    "release": Command("reservations.release", "Release GPUs that another process of yours holds."),
    "check": Command(
        "check.frameworks", "Check whether each framework uses exactly the reserved GPUs."
    ),
    "setup": Command(
        "setup.setup", "Make IPython and Jupyter kernels load the extension at startup."
    ),
    "kernel install": Command(
        "kernels.kernelspec", "Install a Jupyter kernel that starts with its own GPU."
    ),
    # Kernels installed with --hosts run this command over SSH to reserve a GPU on another machine.
    "kernel hold": Command("kernels.hold"),
    # Installed kernelspecs contain the words `kernel start`, so this name must not change.
    "kernel start": Command("kernels.start"),
    "why": Command("agents.why", "Show whether you would get a GPU now, and if not, why."),
    "skill": Command("agents.skill", "Print instructions for coding agents that need GPUs."),
    # For a Slurm kernel, `kernel slurm` runs on the Jupyter client's machine, and `kernel node`
    # runs in the job.
    "kernel slurm": Command("slurm.relay"),
    "kernel node": Command("slurm.node"),
}


def load(name: str) -> Any:
    """Import a command's module."""
    return loader.load(f"commands.{COMMANDS[name].module}")
