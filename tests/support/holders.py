"""Holders for tests, by what they say of themselves."""

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
    **facts: Any,
) -> Holder:
    """Return a holder whose record says so. seen: the kernel's list names that pid, too."""
    holder = Holder(listed_pid=pid if seen else None)
    return changed(holder, pid=pid, user=user, notebook=notebook, **facts)


def changed(holder: Holder, **facts: Any) -> Holder:
    """Return the holder with these facts, each of them where it belongs."""

    def of(kind: type[ProcessInfo | ReservationTerms | Record]) -> dict[str, Any]:
        return {name: facts.pop(name) for name in kind._fields if name in facts}

    if holder.seen and "pid" in facts:
        holder = holder._replace(listed_pid=facts["pid"])
    record = holder.record
    record = record._replace(
        who=record.who._replace(**of(ProcessInfo)),
        terms=record.terms._replace(**of(ReservationTerms)),
    )
    return holder._replace(record=record._replace(**of(Record)), **facts)
