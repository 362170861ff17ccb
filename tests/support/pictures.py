"""Devices, holders, processes and rows of tables, and the pictures that show them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from reserve_gpu.model.devices import ComputeMode, Device, Fault, Process, State, Unfit, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Request, ReservationTerms, Rule, Size
from reserve_gpu.render import phrases, pictures, terminal
from reserve_gpu.render.frontends import MAGIC, SHELL, Frontend
from reserve_gpu.render.notices import Refused
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder, changed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reserve_gpu.render.pictures import Picture

NOW = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))  # a Friday, at noon in every time zone

# -- GPUs of different kinds -----------------------------------------------------------------------

A100 = Device(0, "GPU-a", "NVIDIA A100", "0000:01:00.0", 40960, "92.00.45.00.03", 16)
T4 = Device(1, "GPU-b", "Tesla T4", memory_mib=15360)
UNNAMED = Device(2, "GPU-c")
INSTANCE = Device(3, "MIG-d", "NVIDIA A100 MIG 1g.5gb", memory_mib=4864, instance=0)
LOST = Fault(4, "GPU is lost")

PROGRAM = MAGIC._replace(is_for_program=True)
PAST = time.mktime((2001, 11, 20, 18, 0, 0, 0, 0, -1))  # shown with its date

ALICE = a_holder(4321000, "alice", "train.ipynb", seen=True)
BOB = a_holder(9876, "bob", "/home/bob", seen=True)
EVAL = a_holder(4322, "alice", "eval.ipynb", seen=True)

EMPTY = Usage(compute=0, mps=0, total_mib=40960, used_mib=0)
COMPUTED_ON = EMPTY._replace(compute=1, used_mib=3500)
FULL = EMPTY._replace(used_mib=10444.8)
PROHIBITED = EMPTY._replace(mode=ComputeMode.PROHIBITED)
EXCLUSIVE = COMPUTED_ON._replace(mode=ComputeMode.EXCLUSIVE_PROCESS)

PYTHON = Process(4321000, 3500, "alice", "python")
STRANGER = Process(77, 9000, "mallory", "python", has_reserved=False)

RESERVED = DeviceStatus(A100, State.RESERVED, COMPUTED_ON, holders=(ALICE,))
BUSY = DeviceStatus(UNNAMED, State.BUSY, COMPUTED_ON, processes=(PYTHON,), is_unreserved_use=True)

# -- rules of an administrator ---------------------------------------------------------------------

RULES_FILE = "/etc/reserve_gpu.toml"
TIME_RULE = Rule('time = "24h"', "[limits]", RULES_FILE, 86_400.0)
GPU_RULE = Rule("gpus = 1", "[groups.students]", RULES_FILE, 1.0)
LIMITED = DeviceStatus(
    T4, State.LIMITED, EMPTY, rule=GPU_RULE, counted=(changed(ALICE, label="GPU0"),)
)

# -- parts of a GPU --------------------------------------------------------------------------------

TEN_GB = Request(terms=ReservationTerms(Size(1e10 / 2**20, "GB")))
PART_HOLDER = changed(ALICE, terms=ReservationTerms(Size(4e10 / 2**20, "GB")))
FULL_ROW = DeviceStatus(
    A100, State.FULL, COMPUTED_ON, holders=(PART_HOLDER, BOB), promisable_mib=5999.0
)


def idle(
    device: Device, holder: Holder, *, since: float | None = None, cell: float | None = None
) -> DeviceStatus:
    """Return the row of a device that is reserved but unused."""
    holder = changed(holder, since=since, last_cell=cell)
    return DeviceStatus(device, State.RESERVED, EMPTY, holders=(holder,), is_unused=True)


IDLE_FOR_2H = idle(A100, ALICE, since=NOW - 7200)


# -- a machine of equal GPUs -----------------------------------------------------------------------


def device(index: int, name: str = "NVIDIA A100-SXM4-80GB") -> Device:
    """Return a GPU of 80 GiB."""
    return Device(index, f"GPU-{index}", name, memory_mib=81920)


def usage(used_mib: float) -> Usage:
    """Return the usage of a GPU of 80 GiB on which no process runs."""
    return Usage(compute=0, mps=0, total_mib=81920, used_mib=used_mib)


def free(index: int, name: str = "NVIDIA A100-SXM4-80GB") -> DeviceStatus:
    """Return the row of a free GPU, with its temperature and power draw."""
    return DeviceStatus(
        device(index, name), State.FREE, usage(0), 0, temperature_c=30 + index, power_w=55.0
    )


def held(
    index: int, user: str, notebook: str = "train.ipynb", note: str | None = None
) -> DeviceStatus:
    """Return the row of a GPU that a user has held for as many hours as its number."""
    since = NOW - 3600.0 * index
    holder = a_holder(4000 + index, user, notebook, since=since, note=note, seen=True)
    row = DeviceStatus(device(index), State.RESERVED, usage(41000), 97, holders=(holder,))
    return row._replace(temperature_c=60 + index, power_w=240.0)


def unfit(device: Device | Fault, reason: Unfit) -> DeviceStatus:
    """Return the row of a device that can't match the request."""
    return DeviceStatus(device, State.UNFIT, unfit=reason)


def with_part(holder: Holder, memory_limit_mib: float, used_mib: float | None) -> Holder:
    """Return the holder with a part of a GPU instead of a whole one."""
    terms = holder.record.terms._replace(size=Size(memory_limit_mib))
    return changed(holder, terms=terms, used_mib=used_mib)


# The first user uses more than its part; the use of the second one is unknown.
SHARERS = (
    with_part(held(1, "alice", note="until Friday").holders[0], 10240.0, 12390.4),
    with_part(held(2, "bob").holders[0], 30720.0, None),
)
IN_PARTS = held(1, "alice")._replace(holders=SHARERS, promisable_mib=38000.0)

# Six of eight GPUs are reserved, and one is used without a reservation.
EIGHT = (
    held(0, "alice", "python train.py"),
    held(1, "bob")._replace(is_unused=True),
    held(2, "carol", "sweep.ipynb", "until Friday"),
    *(held(index, "dave", "python train.py") for index in (3, 4, 5)),
    free(6),
    DeviceStatus(
        device(7), State.BUSY, usage(70000), 99,
        (STRANGER._replace(memory_mib=70000),), is_unreserved_use=True,
    ),
)  # fmt: skip

# -- pictures --------------------------------------------------------------------------------------

ANY = Request()  # for any one GPU


def refused(
    *rows: DeviceStatus,
    request: Request = ANY,
    frontend: Frontend = MAGIC,
    **fields: Any,
) -> Picture:
    """Return the picture of a refusal."""
    return pictures.refusal(Refused(request, rows, **fields), frontend)


def status(*rows: DeviceStatus, waiting: tuple[Ticket, ...] = (), **fields: Any) -> Picture:
    """Return the picture of a status in a notebook."""
    fields = {"time": NOW, "host": "dgx", "frontend": MAGIC, **fields}
    return Status(rows, waiting, **fields).picture()


def lines_at(picture: Picture, width: int) -> list[str]:
    """Return the lines of a picture in a terminal of this width, without colors."""
    return terminal.lines(picture.layout, width, is_colored=False)


def headline(picture: Picture) -> str:
    """Return the first line of a picture."""
    return str(picture).splitlines()[0]


def hints(picture: Picture) -> list[str]:
    """Return the lines around the table, except the headline and the line about what is left."""
    lines = map(phrases.plain, (*picture.layout.head[1:], *picture.layout.foot))
    return [line for line in lines if not line.startswith(("No GPU is visible", "This "))]


# A refusal or a wait is drawn at the present time, and shows two days for an hour.
TWO_DAYS_AGO = time.time() - 2 * 86400.0
TICKET = Ticket(
    1, "queue-1-0.lock", None, a_holder(99, "erin", since=NOW - 720), "2 GPUs of 16 GiB"
)
WAITING_FOR_DAYS = TICKET._replace(holder=changed(TICKET.holder, since=TWO_DAYS_AGO))
SPLIT = Device(8, "MIG-1", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", memory_mib=9728, instance=3)
# Rows that take much space: instances, a lost GPU, a queue, a long note, and two sharers.
WIDE = (
    held(0, "alice", note="a very long story, told in so many words that no line has room for it"),
    held(1, "bob")._replace(holders=(*held(1, "bob").holders, *held(2, "carol").holders)),
    DeviceStatus(SPLIT, State.FREE, usage(0)),
    DeviceStatus(Fault(9, "x"), State.DENIED, reason="the driver does not let this user use it"),
    DeviceStatus(Fault(10, "x"), State.EMPTY, reason="MIG is on, but the GPU has no MIG instances"),
    free(11, "NVIDIA Quadro RTX 8000 with Max-Q Design"),
)
LEFT_ALONE = idle(device(0), ALICE, since=TWO_DAYS_AGO)
PICTURES = {
    "eight GPUs": status(*EIGHT),
    "parts": status(held(0, "carol"), IN_PARTS),
    "wide rows": status(*WIDE, waiting=(TICKET,), problem="the lock directory can't be read"),
    "refusal": refused(
        LEFT_ALONE,
        DeviceStatus(device(1), State.AWAITED, usage(0), awaited_by=BOB),
        DeviceStatus(device(2), State.FREE, usage(0), would_be_taken=True),
        request=Request(count=2, terms=ReservationTerms(note="a b")),
        frontend=SHELL,
    ),
    "wait": pictures.wait(Waiting(ANY, 3, 61.0, (LEFT_ALONE,), 600.0, WAITING_FOR_DAYS)),
}


def table(cases: Mapping[str, str]) -> str:
    """Return a line for each named case."""
    return "\n".join(f"{name}: {text}" for name, text in cases.items())
