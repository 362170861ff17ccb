"""Show how a machine stands, or several: in a shell and in a notebook."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reserve_gpu import api
from reserve_gpu.commands import output
from reserve_gpu.commands.hosts.remote_status import HOSTS, OtherMachines, other_machines
from reserve_gpu.commands.output import Output
from reserve_gpu.model.errors import DriverError
from reserve_gpu.model.option import Option, add
from reserve_gpu.render import pictures
from reserve_gpu.render.frontends import MAGIC, SHELL, Frontend, read_here
from reserve_gpu.render.progress import Live
from reserve_gpu.reservation import status

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from reserve_gpu.commands.hosts.hosts_view import Hosts
    from reserve_gpu.render.status_view import Status

ALL = Option("--all", "each GPU, also where many are free and alike")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `status`."""
    formats = output.format_options(prometheus="for node_exporter's textfile collector")
    add((*formats, ALL, HOSTS), parser)


def run(arguments: Namespace) -> Output:
    """Return how this machine stands, or those that were named."""
    if machines := other_machines(arguments):
        output.end_with_ssh()
    seen = _look(machines, Live(sys.stderr), SHELL, is_all=arguments.all)
    code = 0 if seen.machines else DriverError.exit_code
    if arguments.format == "prometheus":
        from reserve_gpu.commands.export import prometheus

        return Output(prometheus.text(seen), code, arguments.format)
    return output.answer(seen, arguments.format, "GPUs", code)


def run_in_notebook(arguments: Namespace) -> None:
    """Show how it stands; that there is no driver is an answer too, not a failure."""
    machines = other_machines(arguments)
    try:
        _look(machines, Live(), MAGIC, is_all=arguments.all).picture().show()
    except DriverError as error:
        print(error)
        return
    if not machines and (text := api.kept()):
        pictures.tell(pictures.of_line(text))


def _look(
    machines: OtherMachines | None, live: Live, frontend: Frontend, *, is_all: bool
) -> Status | Hosts:
    if machines:
        return machines.look(is_all=is_all)
    with live:
        return status.look(live.show)._replace(frontend=read_here(frontend), is_all=is_all)
