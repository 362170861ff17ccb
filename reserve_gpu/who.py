"""Who has a device and what uses it, in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reserve_gpu.text import duration, gib, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reserve_gpu.device import Holder, Process

LISTED_PROCESSES = 3


def holder(who: Holder, what: str = "reserved") -> str:
    """`reserved by alice, train.ipynb (pid 4321) for 2 h 10 min`, as far as it is known."""
    parts = [f"{what} by {shown(who.user or 'somebody')}"]
    if who.notebook:
        parts.append(f", {shown(who.notebook)}")
    place = " of another container" if who.elsewhere else ""
    if who.pid:
        parts.append(f" (pid {who.pid}{place})")
    if who.since:
        parts.append(f" for {duration(max(0.0, time.time() - who.since))}")
    if who.note:
        parts.append(f": {shown(who.note)}")
    if not who.confirmed:
        parts.append(" [unconfirmed]")
    return "".join(parts)


def busy(reason: str, processes: Sequence[Process]) -> str:
    """`busy, bob: python (pid 9876) 10.2 GiB`, or the bare reason where no process can be named."""
    return f"busy, {users(processes) if processes else reason}"


def users(processes: Sequence[Process]) -> str:
    """`bob: python (pid 9876) 10.2 GiB`, for the first few of them."""
    named = [_process(process) for process in processes[:LISTED_PROCESSES]]
    if more := len(processes) - len(named):
        named.append(f"{more} more")
    return "; ".join(named)


def _process(process: Process) -> str:
    user = f"{shown(process.user)}: " if process.user else ""
    memory = "" if process.memory_mib is None else gib(process.memory_mib)
    if not process.command:
        return f"{user}pid {process.pid}{', ' if memory else ''}{memory}"
    return f"{user}{shown(process.command, 40)} (pid {process.pid}) {memory}".rstrip()
