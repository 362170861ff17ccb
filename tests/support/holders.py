"""Holders of devices, made from the fields of their records."""

from __future__ import annotations

from typing import Any

from reserve_gpu.model.holders import Holder, ProcessInfo, Record
from reserve_gpu.model.requests import ReservationTerms


def a_holder(
    pid: int | None = None,
    user: str | None = None,
    notebook: str | None = None,
    *,
    seen: bool = False,
    **fields: Any,
) -> Holder:
    """Return a holder with these fields in its record.

    Args:
        pid: The process ID.
        user: The user's name.
        notebook: The notebook's file name.
        seen: Whether /proc/locks lists the process.
        fields: More fields of the holder, its record, its process and its terms.
    """
    holder = Holder(listed_pid=pid if seen else None)
    return changed(holder, pid=pid, user=user, notebook=notebook, **fields)


def changed(holder: Holder, **fields: Any) -> Holder:
    """Return the holder with other values for these fields."""

    def fields_of(kind: type[ProcessInfo | ReservationTerms | Record]) -> dict[str, Any]:
        return {name: fields.pop(name) for name in kind._fields if name in fields}

    if holder.seen and "pid" in fields:
        holder = holder._replace(listed_pid=fields["pid"])
    record = holder.record
    record = record._replace(
        who=record.who._replace(**fields_of(ProcessInfo)),
        terms=record.terms._replace(**fields_of(ReservationTerms)),
    )
    return holder._replace(record=record._replace(**fields_of(Record)), **fields)
