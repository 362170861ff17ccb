"""Show how a machine stands, or several: in a shell and in a notebook."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from reserve_gpu import api
from reserve_gpu.commands import table
from reserve_gpu.commands.table import OTHERS, Others, Output, Seen, Subcommand, others
from reserve_gpu.model.errors import DriverError
from reserve_gpu.model.option import Option
from reserve_gpu.render import pictures
from reserve_gpu.render.frontends import MAGIC, SHELL, Frontend, read_here
from reserve_gpu.render.progress import Live
from reserve_gpu.reservation import status

if TYPE_CHECKING:
    from argparse import Namespace


ALL = Option("--all", "each GPU, also where many are free and alike")


def show(arguments: Namespace) -> Output:
    """Return how this machine stands, or those that were named."""
    if machines := others(arguments):
        table.end_with_ssh()
    seen = _look(machines, Live(sys.stderr), SHELL, is_all=arguments.all)
    code = 0 if seen.machines else DriverError.exit_code
    return table.answer(seen, arguments.format, "GPUs", code)


def show_in_notebook(arguments: Namespace) -> None:
    """Show how it stands; that there is no driver is an answer too, not a failure."""
    machines = others(arguments)
    try:
        _look(machines, Live(), MAGIC, is_all=arguments.all).picture().show()
    except DriverError as error:
        print(error)
        return
    if not machines and (text := api.kept()):
        pictures.tell(pictures.of_line(text))


def _look(machines: Others | None, live: Live, frontend: Frontend, *, is_all: bool) -> Seen:
    if machines:
        return machines.look(is_all=is_all)
    with live:
        return status.look(live.show)._replace(frontend=read_here(frontend), is_all=is_all)


STATUS = Subcommand(show, (*table.format_option(table.FORMS), ALL, *OTHERS))
