"""The `--hosts` option. Several commands have it, and few users give it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reserve_gpu.model.option import Option
from reserve_gpu.system.forks import no_fork

if TYPE_CHECKING:
    from argparse import Namespace

    from reserve_gpu.commands.hosts.remote_status import OtherMachines

HOSTS = Option(
    "--hosts HOST",
    "use other machines over ssh: groups from [hosts] in /etc/reserve_gpu.toml or "
    "~/.config/reserve_gpu.toml, or host names (lab1 gpu[01-04]); default: all groups",
    nargs="*",
)


def other_machines(arguments: Namespace) -> OtherMachines | None:
    """Return the machines that `--hosts` selects, or None without `--hosts`."""
    if arguments.hosts is None:
        return None
    with no_fork:
        from reserve_gpu.commands.hosts.remote_status import OtherMachines

    return OtherMachines(arguments.hosts)
