"""The status of a machine, which shows itself in a terminal, in a notebook, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reserve_gpu.device import Value

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from reserve_gpu.device import Holder, Process, Row
    from reserve_gpu.layout import Layout
    from reserve_gpu.line import Ticket

VERSION = 1  # of the JSON; names are only ever added to it


class Status(Value):
    """How a machine stood at one moment; shows itself in a terminal and in a notebook.

    rows: one for each device. waiting: the line, the first one first.
    problem: why nothing, or not all, is known of reservations.
    time: in seconds since the epoch. host: the machine's name.
    limit: a CUDA_VISIBLE_DEVICES that somebody set before, which limits what this process gets.
    """

    rows: tuple[Row, ...]
    waiting: tuple[Ticket, ...] = ()
    problem: str | None = None
    time: float = 0.0
    host: str = ""
    limit: str | None = None

    def __repr__(self) -> str:
        from reserve_gpu import terminal

        return terminal.plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from reserve_gpu import terminal

        return terminal.rendered(self.layout(), console, options)

    def _repr_pretty_(self, printer: Any, _is_cycle: bool) -> None:  # noqa: FBT001 - IPython's
        printer.text(self.to_text())

    def _repr_html_(self) -> str:
        from reserve_gpu import markup

        return markup.html(self.layout())

    def to_text(self) -> str:
        """How it looks on standard output: coloured and broken to its width in a terminal."""
        from reserve_gpu import terminal

        return terminal.text(self)

    def layout(self) -> Layout:
        """What it says in words, to be laid out."""
        from reserve_gpu.layout import layout, remarks

        said = remarks(self.limit, self.problem)
        is_limited = self.limit is not None
        return layout(self.rows, self.waiting, said, self.time, self.host, is_limited=is_limited)

    def to_dict(self) -> dict[str, Any]:
        """The same for programs, as JSON takes it; docs/status.md has the shape."""
        return {
            "version": VERSION,
            "host": self.host,
            "time": self.time,
            "devices": [_row(row) for row in self.rows],
            "waiting": [_ticket(ticket) for ticket in self.waiting],
            "problem": self.problem,
            "limit": self.limit,
        }


def _row(row: Row) -> dict[str, Any]:
    device = row.device
    return {
        "label": row.label,
        "state": row.state,
        "reason": row.reason or None,
        "index": device.index if device else None,
        "instance": device.instance if device else None,
        "uuid": device.uuid if device else None,
        "gpu_uuid": (device.gpu_uuid or device.uuid) if device else None,
        "name": device.name if device else None,
        "bus_id": device.bus_id if device else None,
        "memory_total_mib": device.memory_mib if device else None,
        "memory_used_mib": row.used_mib,
        "utilisation_percent": row.utilisation,
        "processes": [_process(process) for process in row.processes],
        "holders": [_holder(holder) for holder in row.holders],
        "is_this_process": row.is_mine,
        "is_reserved_but_idle": row.is_unused,
        "is_used_without_reservation": row.is_unreserved_use,
        "next_in_line": row.next_in_line,
    }


def _process(process: Process) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "user": process.user,
        "command": process.command,
        "memory_mib": process.memory_mib,
        "has_reserved": process.has_reserved,
    }


def _holder(holder: Holder) -> dict[str, Any]:
    return {
        "pid": holder.pid,
        "user": holder.user,
        "notebook": holder.notebook,
        "note": holder.note,
        "since": holder.since,
        "last_cell": holder.last_cell,
        "confirmed": holder.confirmed,
        "elsewhere": holder.elsewhere,
    }


def _ticket(ticket: Ticket) -> dict[str, Any]:
    about = _holder(ticket.holder)
    del about["last_cell"]
    return {**about, "asks": ticket.asks, "wants": sorted(ticket.wants)}
