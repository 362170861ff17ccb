"""Functions for programs that show or release other processes' reservations.

The JupyterLab extension imports only this module and the names in `reserve_gpu`. To reserve GPUs
for the calling process, use `reserve_gpu.reserve()`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu.allocation import snapshot
from reserve_gpu.commands.hosts.remote_status import OtherMachines
from reserve_gpu.model import errors, untrusted
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import layout, reservation_list
from reserve_gpu.render.frontends import MAGIC
from reserve_gpu.render.status_view import Status
from reserve_gpu.reservation import remote_release
from reserve_gpu.system import procfs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reserve_gpu.commands.hosts.hosts_view import Hosts
    from reserve_gpu.model.holders import DeviceStatus, Holder


def status_without_driver() -> Status:
    """Return the status of reserved devices, using only their lock files.

    Call this function if `status()` raises DriverError.

    Returns:
        The status, with a row for each reserved device. The status does not show whether the
        devices are in use. There are no rows if the lock directory can't be used.
    """
    rows: tuple[DeviceStatus, ...] = ()
    with suppress(errors.LockError):
        rows = snapshot.reserved_without_driver()
    return Status(rows, time=time.time(), host=procfs.machine_name())


def html(status: Status) -> str:
    """Render a status as HTML for a notebook.

    Args:
        status: The status of this machine.

    Returns:
        The HTML, in which this user's reservations are marked. Suggested commands, such as
        `%reserve_gpu`, can be run in a cell. Text from other users is escaped.
    """
    rows = [row._replace(is_mine=any(map(is_own, row.holders))) for row in status.rows]
    picture = status._replace(frontend=MAGIC).picture()
    entries = layout.entries(rows, layout.View(status.time, user=status.user))
    return picture._replace(layout=picture.layout._replace(entries=entries))._repr_html_()


def other_machines() -> Hosts | None:
    """Read, over ssh, the status of the machines in the `[hosts]` table.

    If a machine does not respond within 5 s, its status is an error message.

    Returns:
        The machines' status, or None if no machines are configured. The status's `to_dict()`
        returns the same data as `reserve-gpu status --hosts --json`, and a notebook can display the
        status's `picture()`.

    Raises:
        RequestError: The table is invalid, or ssh is not installed.
    """
    machines = OtherMachines([])
    return machines.look() if machines.words else None


def printable(value: Any) -> Any:
    """Make the strings in a status safe to display.

    Args:
        value: The result of `Status.to_dict()`, which contains untrusted text from other users.

    Returns:
        The same data, with each string reduced to a single line of limited length without invisible
        characters.
    """
    if isinstance(value, str):
        return sanitize(value, untrusted.TEXT_LIMIT)
    if isinstance(value, list):
        return [printable(each) for each in value]
    if isinstance(value, dict):
        return {name: printable(each) for name, each in value.items()}
    return value


def is_own(holder: Holder) -> bool:
    """Return whether a holder or waiter is this user's process, according to the Linux kernel.

    Args:
        holder: An entry in a status row's `holders`, or the `holder` of an entry in the status's
            `waiting`.
    """
    return snapshot.is_own(holder)


def kernel_of(holder: Holder, kernels: Mapping[int | str, str]) -> str | None:
    """Return the Jupyter kernel that a holder belongs to.

    The holder is either the kernel's process or one of its descendants. While a kernel is
    restarting, its devices are kept for the next kernel with the same connection file, so kernels
    are also identified by their connection files.

    Args:
        holder: A holder that is one of this user's processes.
        kernels: The calling program's name for each kernel, keyed by pid and by the path of the
            connection file.

    Returns:
        The calling program's name for the kernel, or None if the holder does not belong to any of
        these kernels.
    """
    keys: list[int | str] = [*procfs.lineage(holder.pid)] if holder.pid else []
    if holder.record.kept_until is not None and (
        kept := remote_release.kept_reservation_of(holder)
    ):
        keys.insert(0, kept.connection_file)
    return next((kernels[each] for each in keys if each in kernels), None)


def release(
    pid: int, *, since: float | None = None, is_end: bool = False
) -> tuple[bool, str] | None:
    """Ask another process of this user to release its devices, as `reserve-gpu release` does.

    This function waits up to 5 s for a reply. Ending a process can take minutes, because the
    process's `before_end()` functions run first.

    Args:
        pid: The process's pid. For a kernel that has restarted, the old pid also works.
        since: The reservation's start time in seconds since the epoch, or None for any reservation
            that the process has.
        is_end: Whether to end the process, as `reserve-gpu release --end` does.

    Returns:
        Whether the process no longer holds the devices, and a message about the result. If the
        process has no such reservation, None is returned instead.

    Raises:
        LockError: The lock directory can't be used.
    """
    for reserved in (every := remote_release.reservations_of_user()):
        holder = reserved.holder
        if pid in remote_release.pids_of(holder) and since in (None, holder.since):
            choice = remote_release.Choice(reserved, reserved.rows)
            answer = remote_release.release(choice, is_end=is_end)
            text = reservation_list.released(reserved, answer, every, MAGIC)
            return answer in remote_release.DONE, text
    return None


def type_in_cells() -> None:
    """In this process's messages, write shell commands as cell input, such as `!ssh lab1`."""
    errors.shows_cell_syntax = True
