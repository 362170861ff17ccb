"""What other programs may import of this package, beside the names that it has itself.

The extension for JupyterLab imports nothing else. All of it looks at this machine, or asks other
processes of this user; what the calling process itself holds is the package's own affair.
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
    """Return what is reserved, by the lock files alone, for where `status()` raises DriverError.

    Each device is a row that can't be read. Where the lock directory can't be used there are none.
    """
    rows: tuple[DeviceStatus, ...] = ()
    with suppress(errors.LockError):
        rows = snapshot.reserved_without_driver()
    return Status(rows, time=time.time(), host=procfs.machine_name())


def html(status: Status) -> str:
    """Return the picture of this machine as a notebook shows it; what this user has is marked.

    What it says to type is typed in a cell, as `%reserve_gpu`. All foreign text is escaped.
    """
    rows = [row._replace(is_mine=any(map(is_own, row.holders))) for row in status.rows]
    picture = status._replace(frontend=MAGIC).picture()
    entries = layout.entries(rows, layout.View(status.time))
    return picture._replace(layout=picture.layout._replace(entries=entries))._repr_html_()


def other_machines() -> Hosts | None:
    """Ask the machines of the table [hosts] how they stand, by ssh; None where there are none.

    A machine that does not answer within 5 s has said so. The answer has `to_dict()`, the JSON of
    `reserve-gpu status --hosts`, and `picture()`, which shows itself in a notebook.
    Raises RequestError for a table that makes no sense, and where there is no ssh.
    """
    machines = OtherMachines([])
    return machines.look() if machines.words else None


def printable(value: Any) -> Any:
    """Return JSON whose texts are fit to be shown: one line each, bounded, with nothing invisible.

    value: what `to_dict()` of a status returns, in which texts are as other users wrote them.
    """
    if isinstance(value, str):
        return sanitize(value, untrusted.TEXT_LIMIT)
    if isinstance(value, list):
        return [printable(each) for each in value]
    if isinstance(value, dict):
        return {name: printable(each) for name, each in value.items()}
    return value


def is_own(holder: Holder) -> bool:
    """Tell whether a holder, or who waits, is a process of this user's, by the kernel's word.

    holder: one of `row.holders` of a status, or the `ticket.holder` of one of its `waiting`.
    """
    return snapshot.is_own(holder)


def kernel_of(holder: Holder, kernels: Mapping[int | str, str]) -> str | None:
    """Return which of a program's kernels a holder is, or has been started by; None for no one.

    holder: a process of this user's.
    kernels: what that program calls each of them, by its pid and by its connection file. What a
        kernel holds is kept over its restart for the next one with that file.
    """
    known: list[int | str] = [*procfs.lineage(holder.pid)] if holder.pid else []
    if holder.record.kept_until is not None and (left := remote_release.left_of(holder)):
        known.insert(0, left.connection_file)
    return next((kernels[each] for each in known if each in kernels), None)


def release(
    pid: int, *, since: float | None = None, is_end: bool = False
) -> tuple[bool, str] | None:
    """Have a process of this user's release what it holds, as `reserve-gpu release` does.

    pid: also that of a kernel which has restarted since it was shown.
    since: when the reservation that is meant began, in seconds since the epoch; None for any.
    is_end: end the process, as `reserve-gpu release --end`.
    Returns whether it holds nothing any more, and what came of it in words; None where it has no
    such reservation. Waits 5 s for an answer; for an end as long as what comes before it may take.
    Raises LockError.
    """
    for reserved in (every := remote_release.of_user()):
        holder = reserved.holder
        if pid in remote_release.pids_of(holder) and since in (None, holder.since):
            choice = remote_release.Choice(reserved, reserved.rows)
            answer = remote_release.release(choice, is_end=is_end)
            text = reservation_list.released(reserved, answer, every, MAGIC)
            return answer in remote_release.DONE, text
    return None


def type_in_cells() -> None:
    """Have whatever this process says to type in a shell be typed in a cell: `!ssh lab1`."""
    errors.is_beside_cells = True
