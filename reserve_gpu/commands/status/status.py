"""Show the status of this machine or of other machines, in a shell or a notebook."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

from reserve_gpu.commands import output
from reserve_gpu.commands.hosts.hosts_option import HOSTS, other_machines
from reserve_gpu.commands.output import Output
from reserve_gpu.model.errors import DriverError
from reserve_gpu.model.option import Option, add
from reserve_gpu.render import pictures
from reserve_gpu.render.frontends import MAGIC, SHELL, Frontend, for_this_process
from reserve_gpu.reservation import status
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from reserve_gpu.commands.hosts.hosts_view import Hosts
    from reserve_gpu.commands.hosts.remote_status import OtherMachines
    from reserve_gpu.model.progress import Progress
    from reserve_gpu.render.progress import Live
    from reserve_gpu.render.status_view import Status

ALL = Option("--all", "list every GPU, even if many are free and alike")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the `status` command's arguments."""
    formats = output.format_options(prometheus="for node_exporter's textfile collector")
    add((*formats, ALL, HOSTS), parser)


def run(arguments: Namespace) -> Output:
    """Return the status of this machine, or of the machines that `--hosts` selects."""
    if machines := other_machines(arguments):
        output.end_with_ssh()
    result = _read(machines, sys.stderr, SHELL, is_all=arguments.all)
    code = 0 if result.machines else DriverError.exit_code
    if arguments.format == "prometheus":
        from reserve_gpu.commands.export import prometheus

        return Output(prometheus.text(result), code, arguments.format)
    if arguments.format == "html":
        result = result.for_any_reader()
    return output.answer(result, arguments.format, "GPUs", code)


def run_in_notebook(arguments: Namespace) -> None:
    """Show the status in a cell. A driver error is printed instead of raised."""
    machines = other_machines(arguments)
    try:
        _read(machines, None, MAGIC, is_all=arguments.all).picture().show()
    except DriverError as error:
        print(error)
        return
    if machines:
        return
    with no_fork:
        from reserve_gpu import api  # loaded here because the shell command does not need it

    if text := api.kept():
        pictures.tell(pictures.of_text(text))


def _read(
    machines: OtherMachines | None, stream: TextIO | None, frontend: Frontend, *, is_all: bool
) -> Status | Hosts:
    """Read the status. If the driver is slow, show the progress on the stream or in the cell."""
    if machines:
        return machines.look(is_all=is_all)
    with ExitStack() as stack:
        live: Live | None = None

        def show(news: Progress) -> None:
            nonlocal live
            if live is None:
                with no_fork:
                    from reserve_gpu.render.progress import Live  # most drivers answer at once

                live = stack.enter_context(Live(stream))
            live.show(news)

        return status.read_status(show)._replace(frontend=for_this_process(frontend), is_all=is_all)
