"""What the browser is told of the machine, and what it may ask of the user's own reservations."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from reserve_gpu import DriverError, LockError, RequestError, machine, proc
from reserve_gpu.commands.reservations import list_join_release
from reserve_gpu.commands.table import others_of
from reserve_gpu.core import elsewhere, kept, looking
from reserve_gpu.model import Answer
from reserve_gpu.report import about_reservations as said
from reserve_gpu.report import layout
from reserve_gpu.report.faces import MAGIC
from reserve_gpu.report.layout import View
from reserve_gpu.report.status import Status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from reserve_gpu.model import Holder, Reserved, Row

EVERY_S = 2.0  # between two looks at the machine
HOSTS_EVERY_S = 10.0  # between two questions to other machines
DONE = (Answer.RELEASED, Answer.ENDED, Answer.GONE)


class Kernel(NamedTuple):
    """A kernel of this Jupyter server. pid: None where it runs on another machine."""

    id: str
    pid: int | None
    connection_file: str


class Shared:
    """One answer for all who ask meanwhile; an older one than every_s seconds is made anew."""

    def __init__(self, make: Callable[[], Awaitable[Any]], every_s: float) -> None:
        self._make, self._every_s = make, every_s
        self._answer: asyncio.Future[Any] | None = None
        self._begun = 0.0

    async def get(self, *, is_new: bool = False) -> Any:
        """Return the answer. One who goes away ends it for nobody else.

        is_new: one that is begun now: somebody is about to act by it.
        """
        is_old = time.monotonic() - self._begun >= self._every_s
        if is_new or self._answer is None or (self._answer.done() and is_old):
            self._begun = time.monotonic()
            self._answer = asyncio.ensure_future(self._make())
        return await asyncio.shield(self._answer)


def look(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """Return the JSON of `reserve-gpu status`, and what only the browser needs.

    `html` is the picture, `failure` why the driver does not answer. Each holder and each waiter has
    `kernel`, the id of this server's kernel that it belongs to, and `is_own`.
    """
    failure = None
    try:
        status = looking.status()._replace(face=MAGIC)
    except DriverError as error:
        failure = str(error)
        status = Status(_reserved(), time=time.time(), host=proc.machine_name(), face=MAGIC)
    find = _Finder(kernels)
    answer = status.to_dict()
    for row, device in zip(status.rows, answer["devices"], strict=True):
        for holder, fields in zip(row.holders, device["holders"], strict=True):
            fields.update(find.about(holder))
    for ticket, fields in zip(status.waiting, answer["waiting"], strict=True):
        fields.update(find.about(ticket.holder))
    return {**answer, "failure": failure, "html": "" if failure else _html(status)}


def _html(status: Status) -> str:
    """Return the picture, in which every row with a reservation of this user's is marked."""
    rows = [row._replace(is_mine=any(map(machine.is_own, row.holders))) for row in status.rows]
    picture = status.picture()
    entries = layout.entries(rows, View(status.time))
    return picture._replace(layout=picture.layout._replace(entries=entries))._repr_html_()


def look_elsewhere() -> dict[str, Any]:
    """Return the machines of the table [hosts], as `reserve-gpu status --hosts`; empty without."""
    machines = others_of([])
    try:
        if not (machines and machines.words):
            return {"hosts": [], "html": ""}
        seen = machines.look()
    except RequestError as error:
        return {"hosts": [], "html": "", "failure": str(error)}
    return {**seen.to_dict(), "html": seen.picture()._repr_html_()}


def release(pid: int, *, since: float | None = None, is_end: bool) -> dict[str, Any]:
    """Have a process of this user's release what it holds, or end it; as `reserve-gpu release`.

    since: of the reservation that is meant; None for whatever that process holds.
    """
    every: list[Reserved] = []
    with suppress(LockError):
        every = list_join_release.of_user()
    for reserved in every:
        holder = reserved.holder
        if pid in elsewhere.pids_of(holder) and since in (None, holder.since):
            answer = elsewhere.end(reserved) if is_end else elsewhere.release(reserved)
            text, *_ = said.released(reserved, answer, every).split(" To end ")  # a button does
            return {"is_done": answer in DONE, "text": text}
    return {"is_done": False, "text": f"You hold no GPU in a process of the number {pid}."}


class _Finder:
    """Tells which kernel of this server a process belongs to."""

    def __init__(self, kernels: Iterable[Kernel]) -> None:
        self._ids = {kernel.pid: kernel.id for kernel in kernels if kernel.pid}
        self._files = {kernel.connection_file: kernel.id for kernel in kernels}

    def about(self, holder: Holder) -> dict[str, Any]:
        is_own = machine.is_own(holder)
        return {
            "is_own": is_own,
            "kernel": self._kernel(holder) if is_own else None,
        }

    def _kernel(self, holder: Holder) -> str | None:
        if holder.record.kept_until is not None:  # the kernel that had it has ended
            for file, kernel in self._files.items():
                for left in kept.all_left(file):
                    if holder.pid in (left.heir, left.kernel):
                        return kernel
        line = proc.lineage(holder.pid) if holder.pid else []
        return next((self._ids[pid] for pid in line if pid in self._ids), None)


def _reserved() -> tuple[Row, ...]:
    with suppress(LockError):
        return machine.reserved_without_driver()
    return ()
