"""%reserve_gpu --status: every device, who uses it, who has it, and who waits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from reserve_gpu.model.devices import Device, Fault, Process, State, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import ReservationTerms, Size
from reserve_gpu.render import frontends, phrases, reasons
from reserve_gpu.render.frontends import MAGIC
from reserve_gpu.render.status_view import Status
from tests.support.holders import a_holder, changed

# -- the picture -----------------------------------------------------------------------------------

NOW = 1_795_000_000.0
GPUS = [Device(index, f"GPU-{index}", "Tesla T4", memory_mib=15360) for index in range(3)]
READ = Usage(compute=0, mps=0, total_mib=15360, used_mib=5120)
ALICE = a_holder(4321000, "alice", "train.ipynb", since=NOW - 7800, seen=True)
CAROL = a_holder(99, "carol", "sweep.ipynb", since=NOW - 720, seen=True)
TICKET = Ticket(1, "queue-1-0.lock", None, CAROL, "2 GPUs")
FREE = [DeviceStatus(device, State.FREE, READ, 3) for device in GPUS]
RESERVED = [row._replace(state=State.RESERVED, holders=(ALICE,)) for row in FREE]
AWAITED = [row._replace(awaited_by=CAROL) for row in FREE]
UNUSED = [row._replace(is_unused=True) for row in RESERVED]
IN_PARTS = RESERVED[1]._replace(
    holders=(changed(ALICE, terms=ReservationTerms(Size(2048.0))),), promisable_mib=12000.0
)
PART = Device(1, "MIG-1", "Tesla T4 MIG 1g.5gb", memory_mib=4864, instance=2)


def picture(*rows: DeviceStatus, waiting: tuple[Ticket, ...] = (), **about: Any) -> list[str]:
    """Return the lines of a status with these rows, without the bars and the time of the day."""
    text = repr(Status(rows, waiting, time=NOW, host="box", frontend=MAGIC, **about))
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "NOW", text)
    return [re.sub("[\u2588\u2591]", "", line) for line in text.splitlines()]


DARK = DeviceStatus(GPUS[0], State.UNKNOWN, Usage(compute=0, sees_all=False))
UNREAD = "GPU0's usage can't be read. If you know it is unused: %reserve_gpu 0"
GET, QUEUE = "Get one with %reserve_gpu", "Wait in the queue: %reserve_gpu --wait"
HEADS: dict[str, tuple[tuple[DeviceStatus, ...], str, list[str]]] = {
    "nothing": ((), "No GPU found.", []),
    "one of three": (
        (FREE[0], RESERVED[1], RESERVED[2]), "1 of 3 GPUs is free: GPU0.", [GET]
    ),
    "two of three": (
        (FREE[0], RESERVED[1], FREE[2]), "2 of 3 GPUs are free: GPU0 and GPU2.", [GET]
    ),
    "instances": (
        (FREE[0], DeviceStatus(PART, State.BUSY)), "1 of 2 devices is free: GPU0.", [GET]
    ),
    "both": ((FREE[0], FREE[1]), "Both GPUs are free.", [GET]),
    "all": (tuple(FREE), "All 3 GPUs are free.", [GET]),
    "in a row": (
        (RESERVED[0], *(each._replace(device=each.device._replace(index=n)) for n, each in
         enumerate((FREE[0],) * 4, 1)), DeviceStatus(PART, State.FREE)),
        "5 of 6 devices are free: GPU1 to GPU4 and GPU1:2.", [GET],
    ),
    "the only one, free": ((FREE[0],), "GPU0 is free.", [GET]),
    "the only one, mine": ((RESERVED[0]._replace(is_mine=True),), "GPU0 is the only GPU here.", []),
    "none": (tuple(RESERVED), "None of 3 GPUs is free.", [QUEUE]),
    "the only one": ((RESERVED[0],), "GPU0 is not free.", [QUEUE]),
    "reserved but idle": (
        (UNUSED[0], RESERVED[1]),
        "None of 2 GPUs is free.",
        ["Ask alice (train.ipynb) for GPU0, idle for 2 h 10 min.", f"Or w{QUEUE[1:]}"],
    ),
    "lost": (
        (DeviceStatus(Fault(0, "lost"), State.BROKEN), DeviceStatus(GPUS[1], State.PROHIBITED)),
        "None of 2 GPUs is free.",
        [reasons.trouble([State.BROKEN])],
    ),
    "one of two lost": (
        (DeviceStatus(Fault(0, "lost"), State.BROKEN), RESERVED[1]),
        "None of 2 GPUs is free.",
        [QUEUE],
    ),
    "awaited": (
        tuple(AWAITED),
        "None of 3 GPUs is free.",
        ["The free GPUs are offered to the queue first.", QUEUE],
    ),
    "room for a part": (
        (RESERVED[0], IN_PARTS),
        "None of 2 GPUs is free.",
        ["11.7 GiB of GPU1 is available now: %reserve_gpu --memory 12GB", QUEUE],
    ),
    "room for a smaller part": (
        (IN_PARTS._replace(promisable_mib=6666.0),),
        "GPU1 is not free.",
        ["6.5 GiB of GPU1 is available now: %reserve_gpu --memory 6GB", QUEUE],
    ),
    "too little room for a part": (
        (IN_PARTS._replace(promisable_mib=1000.0),), "GPU1 is not free.", [QUEUE]
    ),
    "room that somebody waits for": (
        (IN_PARTS._replace(awaited_by=CAROL),), "GPU1 is not free.", [QUEUE]
    ),
    "room beside strangers": (
        (FREE[0]._replace(state=State.BUSY, promisable_mib=9000.0),),
        "GPU0 is not free.",
        [
            "As root, find the processes that may hold that memory: fuser -v /dev/nvidia*",
            f"Or w{QUEUE[1:]}",
        ],
    ),
    "what can't be seen": ((DARK,), "GPU0 is not free.", [UNREAD]),
    "what can't be seen beside what comes free": (
        (DARK, RESERVED[1]), "None of 2 GPUs is free.", [UNREAD, f"Or w{QUEUE[1:]}"]
    ),
    "ours": (
        (RESERVED[0]._replace(is_mine=True), FREE[1]), "1 of 2 GPUs is free: GPU1.", []
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "head", "advice"), HEADS.values(), ids=HEADS.keys())
def test_what_to_do(rows: tuple[DeviceStatus, ...], head: str, advice: list[str]) -> None:
    """The first line counts what is free, the last says what one who has nothing should do."""
    is_awaited = any(row.awaited_by for row in rows)
    waiting = (TICKET._replace(memory_limit_mib=2048.0),) if is_awaited else ()
    lines = picture(*rows, waiting=waiting)
    assert re.sub(r", \d x Tesla T4$", "", lines[0]) == f"{head}  box, NOW"
    layout = Status(rows, waiting, time=NOW, frontend=MAGIC).picture().layout
    assert list(map(phrases.plain, layout.foot)) == advice
    assert lines[len(lines) - len(advice) :] == advice


def test_what_one_has_is_said_first() -> None:
    """Who has a GPU reads that before the table, as it is called there."""
    row = RESERVED[0]._replace(is_mine=True)
    for frontend, expected in [
        (MAGIC, "This kernel has GPU0."),
        (frontends.PYTHON, "This process has GPU0."),
        (frontends.SHELL, "This process has GPU0."),
    ]:
        assert str(Status((row,), frontend=frontend)).splitlines()[1] == expected


def test_what_the_rows_say() -> None:
    """A line has state, name, memory and use, then who; below it what more there is to say."""
    mine = Process(4321000, 5000, "alice", "python3", has_reserved=True)
    other = Process(777, 120, "bob", "python3", has_reserved=False)
    unseen = Process(1, 5)
    lines = picture(
        RESERVED[0]._replace(processes=(other, mine), utilisation=97, is_unreserved_use=True),
        UNUSED[1]._replace(
            holders=(
                changed(ALICE, terms=ReservationTerms(note="till noon"), last_cell=NOW - 3600),
            )
        ),
        DeviceStatus(GPUS[2], State.BUSY, READ, 0, (other,), is_unreserved_use=True),
        DeviceStatus(GPUS[0], State.BUSY, READ, None, (unseen,), is_unreserved_use=None),
        DeviceStatus(GPUS[1], State.UNKNOWN, reason="can't be seen"),
        DeviceStatus(Fault(7, "GPU is lost"), State.BROKEN, reason="GPU is lost"),
        AWAITED[2],
        waiting=(TICKET,),
    )
    alice = "alice, train.ipynb (pid 4321000) for 2 h 10 min"
    assert [" ".join(line.split()) for line in lines[2:-3]] == [
        f"0 reserved 5.0 of 15.0 GiB 97 % {alice}",
        "without a reservation: bob, python3 (pid 777)",
        f'1 reserved 5.0 of 15.0 GiB 3 % {alice}, idle for 1 h: "till noon"',
        "2 busy 5.0 of 15.0 GiB 0 % no reservation: bob, python3 (pid 777)",
        "0 busy 5.0 of 15.0 GiB used by pid 1",
        "1 unknown ? of 15.0 GiB can't be seen",
        "7 broken GPU is lost",
        "2 awaited 5.0 of 15.0 GiB 3 % by carol (sweep.ipynb)",
        "waiting in the queue",
        "1. carol, sweep.ipynb (pid 99) has waited 12 min for 2 GPUs",
    ]


def test_a_split_gpu_stands_above_its_instances() -> None:
    """The instances of a GPU stand under a row with its model, each with its profile."""
    lines = picture(
        FREE[0],
        DeviceStatus(PART, State.FREE, READ, 0),
        DeviceStatus(Fault(1, "x", 4), State.BROKEN),
    )
    rows = [line for line in lines[2:] if re.match(r" *\d", line)]
    assert [line[: len("  1:2  free")] for line in rows] == [
        "0      free", "1          ", "  1:2  free", "  1:4  brok",
    ]  # fmt: skip
    assert "Tesla T4" in rows[1]
    assert "split by MIG" in rows[1]
    assert " 1g.5gb " in rows[2]


def test_who_is_only_half_known() -> None:
    """Of a holder whose pid only the record names it is said that all is unverified."""
    unknown, elsewhere = Holder(), ALICE._replace(is_other_namespace=True, listed_pid=None)
    first, second = picture(RESERVED[0]._replace(holders=(unknown, elsewhere)))[2:4]
    assert first.endswith(" %  unknown user")
    assert second.endswith("(pid 4321000 in another container, unverified) for 2 h 10 min")
