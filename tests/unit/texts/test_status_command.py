"""Texts of the status of one machine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.model.devices import Device, Fault, Process, State, Usage
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.render import frontends
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder, changed

if TYPE_CHECKING:
    from syrupy.assertion import SnapshotAssertion

NOW = 1_795_000_000.0
GPUS = [Device(index, f"GPU-{index}", "Tesla T4", memory_mib=15360) for index in range(5)]
READ = Usage(compute=0, mps=0, total_mib=15360, used_mib=5120)
ALICE = a_holder(4321000, "alice", "train.ipynb", since=NOW - 7800, seen=True)
CAROL = a_holder(99, "carol", "sweep.ipynb", since=NOW - 720, seen=True)
TICKET = Ticket(1, "queue-1-0.lock", None, CAROL, "2 GPUs")
FREE = [DeviceStatus(device, State.FREE, READ, 3) for device in GPUS]
RESERVED = [row._replace(state=State.RESERVED, holders=(ALICE,)) for row in FREE]
UNUSED = [row._replace(is_unused=True) for row in RESERVED]
MINE = [row._replace(is_mine=True) for row in RESERVED]
IN_PARTS = RESERVED[1]._replace(
    holders=(changed(ALICE, terms=ReservationTerms(Size(2048.0))),), promisable_mib=12000.0
)
INSTANCE = Device(1, "MIG-1", "Tesla T4 MIG 1g.5gb", memory_mib=4864, instance=2)
LOST = DeviceStatus(Fault(0, "GPU is lost"), State.BROKEN, reason="GPU is lost")
DARK = DeviceStatus(GPUS[0], State.UNKNOWN, Usage(compute=0, sees_all=False))
OTHER = Process(777, 120, "bob", "python3", has_reserved=False)
WITH_NOTE = changed(ALICE, terms=ReservationTerms(note="till noon"), last_cell=NOW - 3600)


def status_of(*rows: DeviceStatus, **fields: Any) -> Status:
    """Return a status as a notebook shows it."""
    shown = {"time": NOW, "host": "box", "frontend": frontends.MAGIC, "user": "dave", **fields}
    return Status(rows, **shown)


STATUSES = {
    # what is free, and how to get a GPU
    "one of three GPUs is free": status_of(FREE[0], *RESERVED[1:3]),
    "the kernel has the only GPU": status_of(MINE[0]),
    "a reserved GPU is idle": status_of(UNUSED[0], RESERVED[1]),
    "one GPU is lost and one is prohibited": status_of(
        LOST, DeviceStatus(GPUS[1], State.PROHIBITED)
    ),
    "all free GPUs are offered to the queue": status_of(
        *(row._replace(awaited_by=CAROL) for row in FREE[:2]), waiting=(TICKET,)
    ),
    "part of a GPU is available": status_of(RESERVED[0], IN_PARTS),
    "the available part is offered to the queue": status_of(
        IN_PARTS._replace(awaited_by=CAROL), waiting=(TICKET._replace(memory_limit_mib=2048.0),)
    ),
    "the only GPU's processes are invisible": status_of(DARK),
    # what limits the process, and what is not known
    "CUDA_VISIBLE_DEVICES was set elsewhere": status_of(*FREE[:2], limit="1\x1b"),
    "CUDA_VISIBLE_DEVICES hides all GPUs": status_of(*FREE[:2], limit=""),
    "a reservation of the parent": status_of(RESERVED[0], FREE[1], limit="0", is_above=True),
    "an unknown reservation of the parent": status_of(FREE[0], limit="0", is_above=True),
    "CUDA has started": status_of(*FREE[:2], is_late=True),
    "reservations could not be read": status_of(
        DeviceStatus(GPUS[0], State.UNKNOWN), RESERVED[1], problem="No access."
    ),
    # rows
    "processes": status_of(
        RESERVED[0]._replace(
            processes=(OTHER, Process(4321000, 5000, "alice", "python3", has_reserved=True)),
            utilisation=97, is_unreserved_use=True,
        ),
        DeviceStatus(GPUS[2], State.BUSY, READ, 0, (OTHER,), is_unreserved_use=True),
        DeviceStatus(GPUS[3], State.BUSY, READ, None, (Process(1, 5),), is_unreserved_use=None),
    ),
    "a note, a waiter, and faults": status_of(
        UNUSED[1]._replace(holders=(WITH_NOTE,)),
        DeviceStatus(GPUS[2], State.UNKNOWN, reason="can't be seen"),
        LOST,
        FREE[3]._replace(awaited_by=CAROL),
        waiting=(TICKET,),
    ),
    "instances of a GPU": status_of(
        FREE[0],
        DeviceStatus(INSTANCE, State.FREE, READ, 0),
        DeviceStatus(Fault(1, "x", 4), State.BROKEN),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATUSES)
def test_status(name: str, snapshot: SnapshotAssertion) -> None:
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "TIME", str(STATUSES[name])) == snapshot
