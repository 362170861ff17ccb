"""Every sentence about a reservation, from values: what is refused, awaited, warned of and done."""

from __future__ import annotations

import math
import re
import time
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.allocation import snapshot
from reserve_gpu.features.over_limit.over_limit import exceeded
from reserve_gpu.model.devices import ComputeMode, Device, Fault, Process, State, Unfit, Usage
from reserve_gpu.model.holders import DeviceStatus, Holder, LastHolder
from reserve_gpu.model.progress import Waiting
from reserve_gpu.model.queue import Ticket
from reserve_gpu.model.requests import Lease, Request, ReservationTerms, Size
from reserve_gpu.render import (
    contacts,
    durations,
    frontends,
    messages,
    notices,
    phrases,
    pictures,
    reasons,
)
from reserve_gpu.render.frontends import MAGIC, SHELL
from reserve_gpu.render.notices import HidesAll, Refused, ReservedAbove, TooLate, impossible, lost
from reserve_gpu.render.status_view import Status
from reserve_gpu.reservation.holding import Holding
from reserve_gpu.reservation.session import Reservation
from reserve_gpu.system.executor import NESTED
from tests.support.holders import a_holder, changed
from tests.support.processes import own_name

if TYPE_CHECKING:
    from reserve_gpu.render.frontends import Frontend
    from reserve_gpu.render.pictures import Picture

GPU0 = Device(0, "GPU-a", "NVIDIA A100", "0000:01:00.0", 40960, "92.00.45.00.03", 16)
GPU1 = Device(1, "GPU-b", "Tesla T4", memory_mib=15360)
GPU2 = Device(2, "GPU-c")
PART = Device(3, "MIG-d", "NVIDIA A100 MIG 1g.5gb", memory_mib=4864, instance=0)
LOST = Fault(4, "GPU is lost")

ALICE = a_holder(4321000, "alice", "train.ipynb", seen=True)
BOB = a_holder(9876, "bob", "/home/bob", seen=True)
NOTED = changed(ALICE, terms=ReservationTerms(note="till noon, call 123"))

EMPTY = Usage(compute=0, mps=0, total_mib=40960, used_mib=0)
COMPUTED_ON = EMPTY._replace(compute=1, used_mib=3500)
FULL = EMPTY._replace(used_mib=10444.8)
PROHIBITED = EMPTY._replace(mode=ComputeMode.PROHIBITED)
EXCLUSIVE = COMPUTED_ON._replace(mode=ComputeMode.EXCLUSIVE_PROCESS)
PYTHON = Process(4321000, 3500, "alice", "python")
STRANGER = Process(77, 9000, "mallory", "python", has_reserved=False)

ANY = Request()
PYTHON_CODE = frontends.PYTHON

HOSTILE = "\x1b[31mred\n  GPU1: free\u202e"
HARMLESS = "\ufffd[31mred\ufffd  GPU1: free\ufffd"
LONG = "x" * 5000

# -- single values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (0, "0.0 GiB"),
        (5, "<0.1 GiB"),
        (300, "0.3 GiB"),
        (1024, "1.0 GiB"),
        (10444.8, "10.2 GiB"),
        (81920, "80.0 GiB"),
    ],
)
def test_memory(mib: float, expected: str) -> None:
    """Memory is shown in GiB, with one digit behind the point; a little is not nothing."""
    assert phrases.gib(mib) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (7800, "2 h 10 min"),
        (86400, "1 d"),
        (100800, "1 d 4 h"),
        (864000, "10 d"),
    ],
)
def test_duration(seconds: float, expected: str) -> None:
    """A duration is shown in its two largest units, rounded down."""
    assert durations.duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.2, "0.2 s"),
        (1 / 3, "0.33 s"),
        (1, "1 s"),
        (1.5, "1.5 s"),
        (60, "1 min"),
        (90, "90 s"),
        (120, "2 min"),
        (150, "2 min 30 s"),
        (5400, "1 h 30 min"),
    ],
)
def test_time_limit(seconds: float, expected: str) -> None:
    """A limit below a second is not shown as none."""
    assert durations.time_limit(seconds) == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([], ""),
        ([GPU1], "GPU1"),
        ([GPU1, PART], "GPU1 and GPU3:0"),
        ([GPU2, GPU0, LOST], "GPU2, GPU0 and GPU4"),
    ],
)
def test_labels(devices: list[Device | Fault], expected: str) -> None:
    """Devices are named as people call them, in their order."""
    assert phrases.labels(devices) == expected


# -- what was done ---------------------------------------------------------------------------------

ENVIRON = {
    "CUDA_VISIBLE_DEVICES": "2",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "CUDA_DEVICE_MEMORY": "4038",
}


def test_reserved() -> None:
    """Success prints what the first release printed, to the letter."""
    device = Device(
        2, "GPU-c", "GeForce GTX 1050 Ti", "0000:03:00.0", 4038, "86.07.22.00.A8", link_width=16
    )
    assert str(Reservation([device], ENVIRON)) == (
        "Reserving GPU2: 0000:03:00.0 16x GeForce GTX 1050 Ti (VBIOS 86.07.22.00.A8)\n"
        "CUDA_DEVICE_MEMORY = '4038'\n"
        "CUDA_DEVICE_ORDER = 'PCI_BUS_ID'\n"
        "CUDA_VISIBLE_DEVICES = '2'"
    )


def test_reserved_without_what_is_not_reported() -> None:
    """What the driver does not say is left out; each device has a line."""
    assert str(Reservation([GPU2, PART], {"CUDA_VISIBLE_DEVICES": "2,MIG-d"})) == (
        "Reserving GPU2: \n"
        "Reserving GPU3:0: NVIDIA A100 MIG 1g.5gb\n"
        "CUDA_VISIBLE_DEVICES = '2,MIG-d'"
    )
    assert repr(Reservation([GPU1, GPU2], {})) == "<Reservation of GPU1 and GPU2>"


NOTHING_SET: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": None}


@pytest.mark.parametrize(
    ("devices", "environ", "started", "expected"),
    [
        ([GPU0], NOTHING_SET, False, "Released GPU0.\nCUDA_VISIBLE_DEVICES is not set"),
        (
            [GPU0, GPU1],
            {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": None},
            False,
            "Released GPU0 and GPU1.\nCUDA_DEVICE_ORDER is not set\nCUDA_VISIBLE_DEVICES = '0,1'",
        ),
        (
            [GPU0],
            NOTHING_SET,
            True,
            (
                "Released GPU0.\n"
                "CUDA is still running in this kernel. Restart it to free the GPU's memory as "
                "well.\n"
                "CUDA_VISIBLE_DEVICES is not set"
            ),
        ),
        ([], NOTHING_SET, False, "This kernel holds no GPU.\nCUDA_VISIBLE_DEVICES is not set"),
        ([], NOTHING_SET, True, "This kernel holds no GPU.\nCUDA_VISIBLE_DEVICES is not set"),
    ],
)
def test_released(
    devices: list[Device], environ: dict[str, str | None], expected: str, *, started: bool
) -> None:
    """A release says what is free again, that CUDA goes on, and how the variables are now."""
    assert messages.released(devices, environ, started=started) == expected


@pytest.mark.parametrize(
    ("held", "visible", "expected"),
    [
        ([], None, "Continuing without a GPU."),
        ([GPU0, GPU1], None, "Continuing with GPU0 and GPU1, as before."),
        ([], "0,1", "Continuing with CUDA_VISIBLE_DEVICES = '0,1', as before."),
        ([], "", "Continuing without a GPU."),
    ],
)
def test_going_on(held: list[Device], visible: str | None, expected: str) -> None:
    """Who goes on without what was asked for is told with what."""
    assert messages.continuing(held, visible) == expected


# -- what is said of one device --------------------------------------------------------------------


def said(row: DeviceStatus) -> str:
    """Return what a refusal says of a device: `busy: no reservation: bob, python (pid 9876)`."""
    (entry,) = refused(row).layout.entries[-1:]
    assert entry.state
    words_ = [phrases.plain(line) for line in (entry.who, *entry.more) if line]
    return f"{entry.state.value}: {'; '.join(words_)}"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            DeviceStatus(GPU0, State.RESERVED, holders=(ALICE,)),
            "reserved: alice, train.ipynb (pid 4321000)",
        ),
        (DeviceStatus(GPU0, State.RESERVED, holders=(Holder(),)), "reserved: unknown user"),
        (
            DeviceStatus(GPU0, State.RESERVED, holders=(a_holder(17, "bob"),)),
            "reserved: bob (pid 17, unverified)",
        ),
        (
            DeviceStatus(
                GPU0, State.RESERVED, holders=(a_holder(17, "bob", is_other_namespace=True),)
            ),
            "reserved: bob (pid 17 in another container, unverified)",
        ),
        (
            DeviceStatus(GPU0, State.RESERVED, holders=(NOTED,)),
            'reserved: alice, train.ipynb (pid 4321000): "till noon, call 123"',
        ),
        (
            DeviceStatus(GPU0, State.RESERVED, holders=(a_holder(notebook=HOSTILE, user=""),)),
            f"reserved: unknown user, {HARMLESS} (unverified)",
        ),
        (
            DeviceStatus(GPU0, State.RESERVED, COMPUTED_ON, holders=(BOB,), processes=(STRANGER,)),
            "reserved: bob, /home/bob (pid 9876); without a reservation: mallory, python (pid 77)",
        ),
        (
            DeviceStatus(GPU0, State.RESERVED, holders=(ALICE,), reason="Unknown Error"),
            "reserved: alice, train.ipynb (pid 4321000); Unknown Error",
        ),
        (DeviceStatus(GPU0, State.AWAITED, EMPTY, awaited_by=BOB), "awaited: by bob (/home/bob)"),
        (
            DeviceStatus(GPU0, State.AWAITED, EMPTY, awaited_by=NOTED),
            'awaited: by alice (train.ipynb): "till noon, call 123"',
        ),
        (
            DeviceStatus(GPU0, State.AWAITED, EMPTY, holders=(ALICE,), awaited_by=BOB),
            "awaited: alice, train.ipynb (pid 4321000); by bob (/home/bob)",
        ),
        (
            DeviceStatus(
                GPU0, State.BUSY, COMPUTED_ON, processes=(PYTHON,), is_unreserved_use=True
            ),
            "busy: no reservation: alice, python (pid 4321000)",
        ),
        (
            DeviceStatus(GPU0, State.BUSY, COMPUTED_ON, awaited_by=BOB),
            "busy: 1 compute process",
        ),
        (
            DeviceStatus(GPU0, State.BUSY, EXCLUSIVE, processes=(PYTHON,), is_unreserved_use=True),
            (
                "busy: no reservation: alice, python (pid 4321000); "
                "compute mode is exclusive: one process at a time"
            ),
        ),
        (
            DeviceStatus(GPU0, State.BUSY, EXCLUSIVE),
            "busy: 1 compute process; compute mode is exclusive: one process at a time",
        ),
        (DeviceStatus(GPU0, State.BUSY, EMPTY._replace(compute=2)), "busy: 2 compute processes"),
        (DeviceStatus(GPU0, State.BUSY, EMPTY._replace(mps=1)), "busy: 1 MPS client"),
        (DeviceStatus(GPU0, State.BUSY, EMPTY._replace(mps=3)), "busy: 3 MPS clients"),
        (DeviceStatus(GPU0, State.BUSY, FULL), "busy: 10.2 GiB in use by no visible process"),
        (DeviceStatus(GPU0, State.BUSY), "busy: "),
        (
            DeviceStatus(GPU0, State.PROHIBITED, PROHIBITED),
            "prohibited: its compute mode is prohibited: no process can use this GPU",
        ),
        (
            DeviceStatus(GPU0, State.UNKNOWN, Usage()),
            "unknown: neither its processes nor its memory can be read",
        ),
        (
            DeviceStatus(GPU0, State.UNKNOWN, reason="/run/lock/x is a link."),
            "unknown: /run/lock/x is a link.",
        ),
        (DeviceStatus(GPU0, State.BROKEN, reason="Unknown Error"), "broken: Unknown Error"),
        (DeviceStatus(LOST, State.BROKEN, reason=HOSTILE), f"broken: {HARMLESS}"),
        (
            DeviceStatus(LOST, State.UNFIT, unfit=Unfit.UNREADABLE),
            "unfit: can't be read: GPU is lost",
        ),
        (DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.MODEL), "unfit: is called Tesla T4"),
        (DeviceStatus(GPU2, State.UNFIT, unfit=Unfit.MODEL), "unfit: has no name"),
        (DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.MEMORY), "unfit: has 15.0 GiB"),
        (DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.PART), "unfit: has 15.0 GiB to share"),
        (
            DeviceStatus(GPU2, State.UNFIT, unfit=Unfit.MEMORY_UNKNOWN),
            "unfit: does not report its memory size",
        ),
        (
            DeviceStatus(PART, State.UNFIT, unfit=Unfit.SECOND_INSTANCE),
            "unfit: is a MIG instance; with this driver, a process can use only one",
        ),
        (DeviceStatus(GPU0, State.FREE, EMPTY, would_be_taken=True), "free: "),
        (
            DeviceStatus(GPU0, State.BUSY, COMPUTED_ON, would_be_taken=True),
            "busy: you would get it because you named it",
        ),
        (
            DeviceStatus(GPU0, State.RESERVED, holders=(ALICE,), is_mine=True, would_be_taken=True),
            "reserved: this kernel: alice, train.ipynb (pid 4321000)",
        ),
    ],
)
def test_a_row(row: DeviceStatus, expected: str) -> None:
    """Of each device it is said who has it, what uses it or what is wrong."""
    assert said(row) == expected


@pytest.mark.parametrize(
    ("seconds_ago", "expected"),
    [(0, " for 0 s"), (7800, " for 2 h 10 min"), (-50, " for 0 s"), (-100, "")],
)
def test_for_how_long(seconds_ago: float, expected: str) -> None:
    """It is said for how long somebody has had a device; what lies in the future is not shown.

    Less than a minute ahead is a clock that is set a little differently.
    """
    holder = changed(ALICE, since=time.time() - seconds_ago, terms=ReservationTerms(note="x"))
    assert phrases.holder(holder) == f'reserved by alice, train.ipynb (pid 4321000){expected}: "x"'


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        (PYTHON, "alice, python (pid 4321000) 3.4 GiB"),
        (Process(17), "pid 17"),
        (Process(17, 512), "pid 17, 0.5 GiB"),
        (Process(17, user="bob"), "bob, pid 17"),
        (Process(17, command="java"), "java (pid 17)"),
        (Process(17, command=LONG), f"{'x' * 39}\u2026 (pid 17)"),
        (
            Process(17, 5, HOSTILE, "a\nb"),
            f"{HARMLESS}, a\ufffdb (pid 17) <0.1 GiB",
        ),
    ],
)
def test_process(process: Process, expected: str) -> None:
    """A process is described as far as it is known, in letters that do no harm."""
    assert phrases.users([process, Process(1)]) == f"{expected}; pid 1"


@pytest.mark.parametrize(
    ("process", "expected"), [(PYTHON, "alice, python (pid 4321000)"), (Process(17, 512), "pid 17")]
)
def test_one_process(process: Process, expected: str) -> None:
    """The memory of one process alone is not said: the device says it already."""
    assert phrases.users([process]) == expected


def test_many_processes() -> None:
    """Of many processes a few are described, the others counted."""
    processes = [Process(pid) for pid in range(1, 6)]
    assert phrases.users(processes) == "pid 1; pid 2; pid 3; 2 more"


@pytest.mark.parametrize("device", [GPU0, GPU2, PART, LOST], ids=str)
def test_whatever_others_wrote_is_fit_to_print(device: Device | Fault) -> None:
    """Whatever the state, and however long and hostile the foreign text, each line is short."""
    holder = a_holder(1, HOSTILE, LONG, since=0.0, terms=ReservationTerms(note=LONG), last_cell=1.0)
    processes = tuple(Process(pid, 1, LONG, HOSTILE) for pid in range(1, 9))
    readings = (None, EMPTY, COMPUTED_ON, FULL, PROHIBITED, Usage())
    for state, reading, reason in product(State, readings, (None, LONG, HOSTILE)):
        row = DeviceStatus(
            device, state, reading, None, processes, (holder,), reason, awaited_by=holder
        )
        for line in str(refused(row)).splitlines():
            assert line.isprintable()
            assert len(line) < 800


# -- nothing free ----------------------------------------------------------------------------------


def refused(
    *rows: DeviceStatus, request: Request = ANY, frontend: Frontend = MAGIC, **more: Any
) -> Picture:
    return pictures.refusal(Refused(request, rows, **more), frontend)


def headline(picture: Picture) -> str:
    return str(picture).splitlines()[0]


def ways_out(picture: Picture) -> list[str]:
    """Return the lines around the devices, except the headline and what `left` returns."""
    lines = map(phrases.plain, (*picture.layout.head[1:], *picture.layout.foot))
    return [line for line in lines if line != left(picture)]


def left(picture: Picture) -> str:
    """Return the line that says which GPUs remain visible, or an empty string."""
    last = phrases.plain(picture.layout.head[-1])
    return last if last.startswith(("No GPU is visible", "This ")) else ""


RESERVED = DeviceStatus(GPU0, State.RESERVED, COMPUTED_ON, holders=(ALICE,))
QUEUE = "Wait in the queue: %reserve_gpu --wait"
NONE_FREE = "No free GPU: GPU0 is reserved by alice."


def test_nothing_free() -> None:
    """A headline comes first, then what to type, then the devices and their holders."""
    picture = refused(
        RESERVED,
        DeviceStatus(GPU1, State.BUSY, COMPUTED_ON, processes=(PYTHON,), is_unreserved_use=True),
    )
    head = "No free GPU: 1 reserved, 1 busy."
    text = re.sub("[\u2588\u2591]", "", str(picture))
    assert [" ".join(line.split()) for line in text.splitlines()] == [
        head,
        QUEUE,
        "No GPU is visible to this notebook.",
        "GPU state name memory who",
        "0 reserved A100 3.4 of 40.0 GiB alice, train.ipynb (pid 4321000)",
        "1 busy Tesla T4 3.4 of 15.0 GiB no reservation: alice, python (pid 4321000)",
    ]
    assert (picture.brief, left(picture)) == (head, "No GPU is visible to this notebook.")


@pytest.mark.parametrize(
    ("states", "count", "expected"),
    [
        ([State.RESERVED], 1, "No free GPU: GPU0 is reserved."),
        ([State.RESERVED] * 2, 1, "No free GPU: 2 reserved."),
        (
            [State.RESERVED, State.AWAITED],
            1,
            "No free GPU: 1 reserved, 1 awaited.",
        ),
        (
            [State.BROKEN, State.BUSY, State.DENIED, State.BUSY],
            1,
            "No free GPU: 2 busy, 1 broken, 1 no permission.",
        ),
        ([State.UNKNOWN], 1, "No free GPU: GPU0 is unknown."),
        ([State.EMPTY], 1, "No free GPU: GPU0 has no instance."),
        ([State.RESERVED, State.UNFIT], 1, "No free GPU: GPU0 is reserved."),
        (
            [State.FREE, State.BUSY],
            2,
            "Not enough free GPUs: 1 of 2 is free, but 2 are needed.",
        ),
        (
            [State.FREE, State.FREE, State.BUSY, State.UNFIT],
            3,
            "Not enough free GPUs: 2 of 3 are free, but 3 are needed.",
        ),
        ([], 1, "No free GPU."),
        ([State.UNFIT], 1, "No free GPU."),
    ],
)
def test_headline(states: list[State], count: int, expected: str) -> None:
    """The headline says in the words of the rows why those that would do are not free."""
    rows = [DeviceStatus(Device(i, f"GPU-{i}"), state) for i, state in enumerate(states)]
    assert headline(refused(*rows, request=Request(count=count))) == expected


def test_what_would_be_taken_is_no_advice() -> None:
    """Of a device that would be taken nobody is told to ask for it, or to name it."""
    shared = DeviceStatus(
        GPU1, State.RESERVED, EMPTY, holders=(ALICE,), is_unused=True, would_be_taken=True
    )
    named = DeviceStatus(
        GPU2,
        State.BUSY,
        COMPUTED_ON,
        processes=(PYTHON,),
        is_unreserved_use=True,
        would_be_taken=True,
    )
    picture = refused(RESERVED, shared, named, request=Request(("0", "1", "2")), user="alice")
    assert headline(picture) == "None of GPU0 to GPU2 is free: 2 reserved, 1 busy."
    held = "You hold GPU0 in train.ipynb (pid 4321000). To release it: "
    assert ways_out(picture) == [
        f"{held}reserve-gpu release 4321000",
        "Or wait in the queue: %reserve_gpu 0 1 2 --wait",
    ]


@pytest.mark.parametrize(
    ("waited_s", "expected"), [(0.2, "0.2 s"), (90.0, "90 s"), (7200.0, "2 h")]
)
def test_nothing_free_after_a_wait(waited_s: float, expected: str) -> None:
    """Who has waited is told for how long, and not to wait."""
    picture = refused(RESERVED, waited_s=waited_s)
    assert headline(picture) == f"Timed out after {expected}. {NONE_FREE}"
    assert picture.brief.startswith(headline(picture))
    assert QUEUE not in ways_out(picture)


@pytest.mark.parametrize("waited_s", [None, 0.0])
def test_nothing_free_without_a_wait(waited_s: float | None) -> None:
    """A wait of no time is none: the queue is offered."""
    picture = refused(RESERVED, waited_s=waited_s)
    assert headline(picture) == NONE_FREE
    assert ways_out(picture) == [QUEUE]


@pytest.mark.parametrize(
    ("state", "is_offered"),
    [
        (State.RESERVED, True),
        (State.BUSY, True),
        (State.AWAITED, True),
        (State.UNKNOWN, False),  # nothing is seen to run that could end
        (State.BROKEN, False),
        (State.PROHIBITED, False),
        (State.DENIED, False),
        (State.EMPTY, False),
        (State.UNFIT, False),
    ],
)
def test_the_queue_is_offered(state: State, *, is_offered: bool) -> None:
    """The queue is offered where waiting may help."""
    assert (QUEUE in ways_out(refused(DeviceStatus(GPU0, state)))) is is_offered


TROUBLE = (
    "Waiting alone won't help: check the output of nvidia-smi, and ask the administrator (a lost "
    "GPU needs a reset or a reboot)."
)
BROKEN = DeviceStatus(LOST, State.BROKEN)
BARRED = DeviceStatus(GPU0, State.PROHIBITED, PROHIBITED)


@pytest.mark.parametrize(
    ("rows", "request_", "is_told"),
    [
        ([BROKEN], Request(), True),
        ([BROKEN, BARRED, DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.MODEL)], Request(), True),
        ([BROKEN, RESERVED], Request(), False),
        ([BROKEN, RESERVED], Request(count=2), True),
        ([BROKEN, RESERVED], Request(("4", "0")), True),
        ([BROKEN, DeviceStatus(GPU1, State.FREE, would_be_taken=True)], Request(count=2), True),
        ([BROKEN, RESERVED, DeviceStatus(GPU1, State.BUSY)], Request(count=2), False),
        (
            [BARRED, DeviceStatus(GPU1, State.UNKNOWN, reason="its lock is a link")],
            Request(),
            False,
        ),
        ([DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.MODEL)], Request(), False),
        ([RESERVED], Request(count=2), False),
        ([], Request(), False),
    ],
)
def test_trouble_that_waiting_does_not_end(
    rows: list[DeviceStatus], request_: Request, *, is_told: bool
) -> None:
    """Where too few of what would do can come free by themselves it is said what to do."""
    for waited_s in (None, 5.0):
        lines = ways_out(refused(*rows, request=request_, waited_s=waited_s))
        assert (TROUBLE in lines) is is_told
        assert not (is_told and any("in the queue" in line for line in lines))


@pytest.mark.parametrize(
    ("frontend", "kept", "expected"),
    [
        (MAGIC, [GPU1, PART], "This kernel keeps GPU1 and GPU3:0; nothing was changed."),
        (MAGIC, [], "No GPU is visible to this notebook."),
        (PYTHON_CODE, [GPU1], "This process keeps GPU1; nothing was changed."),
        (PYTHON_CODE, [], "No GPU is visible to this process."),
        (SHELL, [GPU1], "This process keeps GPU1; nothing was changed."),
    ],
)
def test_what_is_left(frontend: Frontend, kept: list[Device], expected: str) -> None:
    """The one line says what is kept, or that no GPU can be seen, as one says it there."""
    picture = refused(RESERVED, frontend=frontend, kept=kept)
    assert (picture.brief, left(picture)) == (NONE_FREE, expected)


@pytest.mark.parametrize(
    ("states", "head", "offered"),
    [
        ([], "No other free GPU.", None),
        ([State.BUSY], "No other free GPU: GPU1 is busy.", None),
        (
            [State.FREE, State.BUSY],
            "You have GPU0 and asked for 3: 2 more are needed, but only 1 is free.",
            "2 are available now: %reserve_gpu -n 2",
        ),
    ],
)
def test_what_one_has_is_not_free(states: list[State], head: str, offered: str | None) -> None:
    """Who wants more beside a GPU sees it as their own, and is offered only what is more."""
    others = [
        DeviceStatus(Device(i, f"GPU-{i}"), state, EMPTY, would_be_taken=state is State.FREE)
        for i, state in enumerate(states, 1)
    ]
    own = DeviceStatus(GPU0, State.RESERVED, holders=(ALICE,), is_mine=True, would_be_taken=True)
    picture = refused(own, *others, request=Request(count=3), kept=[GPU0])
    assert headline(picture) == head
    first = picture.layout.entries[0]
    assert (first.state, first.is_mine) == (State.RESERVED, True)
    assert phrases.plain(first.who) == "this kernel: alice, train.ipynb (pid 4321000)"
    offers = [line for line in ways_out(picture) if "available now" in line]
    assert offers == ([offered] if offered else [])


def test_who_is_in_the_way_of_what_one_shares() -> None:
    """Who shares a GPU and asks for it whole is told of the others who share it."""
    picture = refused(RESERVED, request=Request(("0",)), kept=[GPU0])
    assert headline(picture) == "GPU0 is reserved by alice."
    assert phrases.plain(picture.layout.entries[0].who) == "alice, train.ipynb (pid 4321000)"


def test_a_command_that_does_not_run_sees_nothing() -> None:
    """A command that gets no GPU is not started, so there is nothing to say of what it sees."""
    assert left(refused(RESERVED, frontend=SHELL)) == ""


@pytest.mark.parametrize(
    ("limit", "count", "inside"),
    [("0", 1, "1 device."), ("0,1", 2, "2 devices."), ("0\x1b", 1, "1 device.")],
)
def test_limit(limit: str, count: int, inside: str) -> None:
    """A refusal names the inherited limit and how many GPUs it leaves."""
    rows = [RESERVED] * count
    shown = limit.replace("\x1b", "\ufffd")
    expected = (
        f"CUDA_VISIBLE_DEVICES={shown!r} was set elsewhere. It limits this process to {inside}"
    )
    assert ways_out(refused(*rows, limit=limit))[-1] == expected


UNKNOWN_VALUE = "hides every GPU, because CUDA does not recognize this value."
TWICE = "hides every GPU, because it names a GPU twice"
NOT_HERE = "hides every GPU, because its first entry matches no GPU here. This machine has"
NO_UUID = NOT_HERE.replace("no GPU", "no single GPU")


@pytest.mark.parametrize(
    ("limit", "count", "why"),
    [
        ("", 2, "hides every GPU."),
        (" ", 2, "hides every GPU."),
        ("-1", 2, "hides every GPU."),
        ("NoDevFiles", 2, "hides every GPU."),
        *((value, 2, f"{TWICE}.") for value in ("0,0", "1,0,1", "GPU-a,GPU-a")),
        ("7,0,0", 2, f"{NOT_HERE} GPU0 to GPU1."),
        ("1", 1, f"{NOT_HERE} only GPU0."),
        ("GPU-cccc", 4, f"{NO_UUID} GPU0 to GPU3."),
        *((value, 2, UNKNOWN_VALUE) for value in ("all", "None", "cuda:1", "[0]", "\x1b[1m")),
    ],
)
def test_a_variable_that_hides_every_gpu(limit: str, count: int, why: str) -> None:
    """If the variable hides every GPU, the message says why that value does."""
    said = str(HidesAll(Request(), limit, count).error(SHELL))
    value = limit.replace("\x1b", "\ufffd")
    assert said.startswith(
        f"CUDA_VISIBLE_DEVICES={value!r} {why} The variable was set outside reserve_gpu."
    )


@pytest.mark.parametrize(
    ("frontend", "end"),
    [
        (
            MAGIC,
            (
                "To use a GPU, unset it, and run %reserve_gpu 1 again:\n"
                'import os; os.environ.pop("CUDA_VISIBLE_DEVICES", None)'
            ),
        ),
        (
            frontends.PYTHON,
            (
                "To use a GPU, unset it before CUDA starts, and run reserve_gpu.reserve('1') "
                "again:\n"
                'import os; os.environ.pop("CUDA_VISIBLE_DEVICES", None)'
            ),
        ),
        (
            frontends.shell(["true"]),
            (
                "To use a GPU, unset it, or leave it out for this command:\n"
                "env -u CUDA_VISIBLE_DEVICES reserve-gpu run 1 -- true"
            ),
        ),
    ],
)
def test_how_to_lift_a_limit(frontend: Frontend, end: str) -> None:
    """People read the line that lifts the limit; a program is not told to lift it."""
    reason = HidesAll(Request(devices=("1",)), "-1", 2)
    assert str(reason.error(frontend)).endswith(end)
    for_program = str(reason.error(frontend._replace(is_for_program=True)))
    assert for_program.endswith("Trying again won't help. Ask the person who set it to unset it.")


def test_a_limit_of_a_process_with_a_reservation() -> None:
    """A process that holds a GPU reads that it keeps it."""
    reason = HidesAll(Request(count=2), "-1", 2, kept=(GPU0,))
    assert "This kernel keeps GPU0; nothing was changed." in str(reason.error(MAGIC))


# -- whom to ask -----------------------------------------------------------------------------------


def idle(
    device: Device, holder: Holder, *, since: float | None = None, cell: float | None = None
) -> DeviceStatus:
    """Return a device that is reserved though nothing runs on it."""
    return DeviceStatus(
        device,
        State.RESERVED,
        EMPTY,
        holders=(changed(holder, since=since, last_cell=cell),),
        is_unused=True,
    )


def test_the_longest_idle_is_asked_first() -> None:
    """Whom to ask is said for what is reserved but idle, by its last sign of life, oldest first."""
    now = time.time()
    carol = a_holder(5, "carol", seen=True)
    picture = refused(
        idle(GPU0, ALICE, since=now - 9000, cell=now - 1800),
        idle(GPU1, BOB, since=now - 7200),
        idle(GPU2, carol, since=now - 9000, cell=now - 3600),
        DeviceStatus(PART, State.RESERVED, COMPUTED_ON, holders=(BOB,)),
    )
    assert ways_out(picture) == [
        (
            "Ask bob (/home/bob) for GPU1, idle for 2 h. "
            "Ask carol for GPU2, idle for 1 h. "
            "Ask alice (train.ipynb) for GPU0, idle for 30 min."
        ),
        "Or wait in the queue: %reserve_gpu --wait",
    ]


def test_only_a_few_are_asked() -> None:
    """Of many people with idle reservations the three whose are so for longest are named."""
    rows = [idle(Device(i, f"GPU-{i}"), a_holder(i, f"u{i}"), since=100.0 - i) for i in range(6)]
    line, _ = ways_out(refused(*rows))
    assert [f"Ask u{i} for GPU{i}, idle" in line for i in range(6)] == [
        *[False] * 3,
        *[True] * 3,
    ]
    assert line.index("GPU5") < line.index("GPU4") < line.index("GPU3")


def test_each_is_asked_once() -> None:
    """Who could help is named once, with all that they have in their notebooks, and since when."""
    now = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))
    other = a_holder(4322, "alice", "eval.ipynb", seen=True)
    mine = [idle(Device(i, f"GPU-{i}"), ALICE, since=now - 7200) for i in (0, 1, 2)]
    eval_ = [idle(Device(i, f"GPU-{i}"), other, since=now - 3600) for i in (3, 5)]
    late = changed(other, lease=Lease(until=now - 60), since=now - 7200)
    used = DeviceStatus(Device(7, "GPU-7"), State.RESERVED, COMPUTED_ON, holders=(late,))
    new = idle(Device(4, "GPU-4"), BOB, since=now - 60)
    both = "Ask alice (train.ipynb and eval.ipynb) for"
    for rows, expected in (
        (mine, "Ask alice (train.ipynb) for GPU0 to GPU2, idle for 2 h."),
        (
            [*mine, new, *eval_],
            f"{both} GPU0 to GPU2, idle for 2 h, and GPU3 and GPU5, idle for 1 h.",
        ),
        (
            [mine[0], used],
            f"{both} GPU0, idle for 2 h, and GPU7, overdue since 11:59.",
        ),
        ([new], ""),  # in its first ten minutes
        ([idle(GPU0, BOB, since=now - 601)], "Ask bob (/home/bob) for GPU0, idle for 10 min."),
    ):
        assert phrases.plain(contacts.users_to_ask(rows, now)) == expected


def test_own_idle_gpus_come_first() -> None:
    """A refusal names the user's own idle GPUs first, and nothing as idle for ten minutes."""
    now = time.time()
    other = a_holder(4322, "alice", "eval.ipynb", seen=True)
    idle_for = "GPU0 has been idle for 2 h in your train.ipynb (pid 4321000)"
    picture = refused(
        idle(GPU1, BOB, since=now - 9000),
        idle(GPU2, other, since=now - 590),
        idle(GPU0, ALICE, since=now - 9000, cell=now - 7200),
        user="alice",
    )
    assert ways_out(picture) == [
        f"{idle_for}. To release it: reserve-gpu release 4321000",
        "You hold GPU2 in eval.ipynb (pid 4322). To release it: reserve-gpu release 4322",
        "Ask bob (/home/bob) for GPU1, idle for 2 h 30 min.",
        QUEUE.replace("Wait", "Or wait"),
    ]


def test_all_who_share_are_asked() -> None:
    """Of those who share an idle device the first three are named; since when is not clear."""
    holders = tuple(a_holder(i, name, since=1.0) for i, name in enumerate("abcd", 1))
    row = DeviceStatus(GPU0, State.RESERVED, EMPTY, holders=holders, is_unused=True)
    line, _ = Status((row,), time=3600.0, frontend=MAGIC).picture().layout.foot
    assert phrases.plain(line) == "Ask a, b and c for GPU0, idle."


IN_CONTAINER = EMPTY._replace(sees_all=False)
SELF = Process(4321000, 100, has_reserved=True)
OTHER = Process(17, 100, has_reserved=False)
UNCLEAR = Process(17, 100)


@pytest.mark.parametrize(
    ("reading", "processes", "expected"),
    [
        (EMPTY, [], True),
        (COMPUTED_ON, [SELF], False),
        (COMPUTED_ON, [OTHER], True),
        (COMPUTED_ON, [UNCLEAR], None),
        (COMPUTED_ON, [], None),  # one that can't be listed
        (EMPTY._replace(compute=2), [OTHER], None),
        (EMPTY._replace(compute=2), [OTHER, SELF], False),
        (EMPTY._replace(mps=1), [], None),
        (EMPTY._replace(compute=None), [], True),
        (Usage(), [], None),
        (IN_CONTAINER, [], True),
        (IN_CONTAINER._replace(used_mib=63), [], True),
        (IN_CONTAINER._replace(used_mib=64), [], None),
        (IN_CONTAINER._replace(reserve_known=False), [], None),
        (IN_CONTAINER._replace(compute=1), [], None),
        (IN_CONTAINER._replace(used_mib=None), [], None),
    ],
)
def test_is_unused(reading: Usage, processes: list[Process], *, expected: bool | None) -> None:
    """A reserved device is unused where that can be seen: by processes, else by memory alone."""
    assert snapshot.is_unused(reading, processes) is expected


# -- what may be taken by name ---------------------------------------------------------------------

OWN = PYTHON._replace(pid=17)


@pytest.mark.parametrize(
    ("row", "is_advised"),
    [
        (
            DeviceStatus(
                GPU1, State.BUSY, COMPUTED_ON, processes=(PYTHON,), is_unreserved_use=True
            ),
            True,
        ),
        (
            DeviceStatus(
                GPU1,
                State.BUSY,
                EMPTY._replace(compute=2),
                processes=(PYTHON, OWN),
                is_unreserved_use=True,
            ),
            True,
        ),
        # Another person's, or perhaps.
        (DeviceStatus(GPU1, State.UNKNOWN, Usage()), False),
        (
            DeviceStatus(
                GPU1,
                State.BUSY,
                COMPUTED_ON,
                processes=(PYTHON._replace(user="bob"),),
                is_unreserved_use=True,
            ),
            False,
        ),
        (
            DeviceStatus(
                GPU1,
                State.BUSY,
                EMPTY._replace(compute=2),
                processes=(PYTHON,),
                is_unreserved_use=True,
            ),
            False,
        ),
        (
            DeviceStatus(
                GPU1, State.BUSY, COMPUTED_ON, processes=(Process(4321000),), is_unreserved_use=True
            ),
            False,
        ),
        (DeviceStatus(GPU1, State.BUSY, COMPUTED_ON), False),
        (DeviceStatus(GPU1, State.BUSY, FULL), False),
        (
            DeviceStatus(GPU1, State.RESERVED, COMPUTED_ON, processes=(PYTHON,), holders=(ALICE,)),
            False,
        ),
        (DeviceStatus(GPU1, State.RESERVED, EMPTY, holders=(ALICE,), is_unused=True), False),
        (DeviceStatus(GPU1, State.AWAITED, EMPTY, awaited_by=ALICE), False),
        (DeviceStatus(GPU1, State.BUSY, COMPUTED_ON, processes=(PYTHON,), awaited_by=ALICE), False),
        # Naming it would not help.
        (DeviceStatus(GPU1, State.PROHIBITED, PROHIBITED), False),
        (
            DeviceStatus(GPU1, State.BUSY, EXCLUSIVE, processes=(PYTHON,), is_unreserved_use=True),
            False,
        ),
        (DeviceStatus(GPU1, State.UNKNOWN, reason="its lock is a link"), False),
        (DeviceStatus(GPU1, State.BROKEN, reason="Unknown Error"), False),
        (DeviceStatus(LOST, State.BROKEN), False),
    ],
)
def test_naming_is_advised(row: DeviceStatus, *, is_advised: bool) -> None:
    """To name a device is advised only where it helps and takes nothing from another person."""
    advice = "To use GPU1 anyway, name it: %reserve_gpu 1"
    assert (advice in ways_out(refused(row, user="alice"))) is is_advised


def test_naming_is_advised_once() -> None:
    """One device is enough to name; without knowing who asks, none that is in use."""
    rows = [
        DeviceStatus(device, State.BUSY, COMPUTED_ON, processes=(PYTHON,), is_unreserved_use=True)
        for device in (PART, GPU1)
    ]
    lines = ways_out(refused(*rows, user="alice"))
    assert lines == [QUEUE, "To use GPU3:0 anyway, name it: %reserve_gpu 3:0"]
    assert ways_out(refused(*rows)) == [QUEUE]


STATES = [state for state in State if state is not State.FREE]


@pytest.mark.parametrize("reading", [None, EMPTY, COMPUTED_ON, FULL, EXCLUSIVE], ids=str)
def test_no_refusal_advises_to_take_what_others_have(reading: Usage | None) -> None:
    """Nothing that is said of another person's GPU tells to share, to name or to take it."""
    bobs = PYTHON._replace(user="bob")
    for frontend, state, processes, waited_s, count in product(
        [MAGIC, SHELL, PYTHON_CODE], STATES, [None, (bobs,), (PYTHON, bobs)], [None, 5.0], [1, 2]
    ):
        if state is State.UNKNOWN or (state is State.BUSY and processes is None):
            continue  # nobody is known to have it
        row = DeviceStatus(
            GPU0, state, reading, None, processes or (), (BOB,), is_unreserved_use=True
        )
        request = Request(count=count)
        picture = refused(row, request=request, frontend=frontend, waited_s=waited_s, user="alice")
        text = str(picture).lower()
        assert "share" not in text
        assert "anyway" not in text
        assert frontend.typed(Request(("0",))) not in text


# -- what can't be had -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "request_", "limit", "expected"),
    [
        (
            [DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.MODEL)],
            Request(model="H100"),
            None,
            ("Of 1 GPU, none has 'H100' in its name; there is 1 Tesla T4."),
        ),
        (
            [
                DeviceStatus(GPU0._replace(index=n), State.UNFIT, unfit=Unfit.MEMORY)
                for n in range(8)
            ],
            Request(min_memory_mib=190734.86328125, memory_unit="GB"),
            None,
            "Of 8 GPUs, none has 200GB (186.3 GiB); the largest has 40.0 GiB.",
        ),
        (
            [DeviceStatus(GPU, State.UNFIT, unfit=Unfit.MODEL) for GPU in (GPU0, GPU0, GPU1, GPU2)],
            Request(model="H100"),
            None,
            (
                "Of 4 GPUs, none has 'H100' in its name; there are 2 A100, 1 Tesla T4 and 1 "
                "without a name."
            ),
        ),
        (
            [
                DeviceStatus(GPU0, State.UNFIT, unfit=Unfit.MEMORY),
                DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.MODEL),
            ],
            Request(model="A100", min_memory_mib=81920),
            None,
            (
                "1 GPU of 80.0 GiB or more with 'A100' in the name can't be reserved here. Of 2 "
                "GPUs, none is suitable; GPU1 is called Tesla T4; GPU0 has 40.0 GiB."
            ),
        ),
        (
            [
                DeviceStatus(GPU0, State.FREE),
                DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.MEMORY),
                DeviceStatus(GPU2, State.UNFIT, unfit=Unfit.MEMORY_UNKNOWN),
            ],
            Request(count=2, min_memory_mib=20480),
            None,
            (
                "2 GPUs of 20.0 GiB or more can't be reserved here. Of 3 GPUs, GPU0 is suitable; "
                "GPU1 has 15.0 GiB; GPU2 does not report its memory size."
            ),
        ),
        (
            [DeviceStatus(GPU0, State.BUSY), DeviceStatus(GPU1, State.BUSY)],
            Request(count=9),
            "0,1",
            (
                "There are 2 GPUs here; you asked for 9. "
                "CUDA_VISIBLE_DEVICES='0,1' was set elsewhere. It limits this process to 2 devices."
            ),
        ),
        (
            [DeviceStatus(GPU0, State.FREE), DeviceStatus(PART, State.FREE)],
            Request(count=2),
            None,
            (
                "2 GPUs can't be reserved here. Of 2 GPUs, GPU0 and GPU3:0 are suitable; CUDA "
                "gives a process whole GPUs or MIG instances, not both."
            ),
        ),
        (
            [DeviceStatus(GPU0._replace(reserve_mib=600), State.UNFIT, unfit=Unfit.PART)],
            Request(terms=ReservationTerms(Size(40959.0, "MiB")), min_memory_mib=1024.0),
            None,
            "Of 1 GPU, none has 40959MiB (40.0 GiB); the largest has 39.4 GiB.",
        ),
        (
            [DeviceStatus(GPU, State.UNFIT, unfit=Unfit.PART) for GPU in (GPU0, GPU1)],
            Request(terms=ReservationTerms(Size(95367.431640625, "GB"))),
            None,
            "Of 2 GPUs, none has 100GB (93.1 GiB); the largest has 40.0 GiB.",
        ),
        (
            [
                DeviceStatus(GPU0, State.FREE),
                DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.PART),
                DeviceStatus(GPU2, State.UNFIT, unfit=Unfit.MEMORY_UNKNOWN),
            ],
            Request(count=2, terms=ReservationTerms(Size(20480.0))),
            None,
            (
                "20.0 GiB of each of 2 GPUs can't be reserved here. Of 3 GPUs, GPU0 is suitable; "
                "GPU1 has 15.0 GiB; GPU2 does not report its memory size."
            ),
        ),
        (
            [
                DeviceStatus(GPU0, State.UNFIT, unfit=Unfit.PART),
                DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.PART),
                DeviceStatus(LOST, State.BROKEN),
            ],
            Request(terms=ReservationTerms(Size(95367.431640625, "GB"))),
            None,
            (
                "Of 3 GPUs, none has 100GB (93.1 GiB); the largest has 40.0 GiB; GPU4 can't be "
                "read: GPU is lost."
            ),
        ),
    ],
)
def test_impossible(
    rows: list[DeviceStatus], request_: Request, limit: str | None, expected: str
) -> None:
    """What no state of the machine could satisfy is said with what there is."""
    assert str(impossible(request_, rows, limit)) == expected


@pytest.mark.parametrize(
    ("devices", "head"),
    [([GPU0], "GPU0"), ([GPU0, GPU1], "GPU0 and GPU1")],
)
def test_above(devices: list[Device], head: str) -> None:
    """Below a process that holds all there is it is said that nothing has to be reserved."""
    rows = [DeviceStatus(device, State.RESERVED, holders=(ALICE,)) for device in devices]
    rows.append(DeviceStatus(GPU2, State.UNFIT, unfit=Unfit.MEMORY_UNKNOWN))
    visible = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": None}
    lines = str(ReservedAbove(rows, visible).error(MAGIC)).splitlines()
    assert lines == [
        f"The process that started this one has already reserved {head} for both:",
        *(f"  {device.label}: reserved by alice, train.ipynb (pid 4321000)" for device in devices),
        "  GPU2: does not report its memory size",
        "The variables are already set, so leave out %reserve_gpu here.",
        "CUDA_VISIBLE_DEVICES = '0'",
    ]


TOO_LATE = (
    "Too late: CUDA has already started in this kernel, and it reads CUDA_VISIBLE_DEVICES only "
    "when it starts. "
)
RESTART = "estart the kernel and run %reserve_gpu before anything that uses a GPU."


@pytest.mark.parametrize(
    ("held", "seen", "can_reserve", "expected"),
    [
        ([], [], False, f"Nothing was reserved or changed. R{RESTART}"),
        ([GPU0], [], False, f"This kernel keeps GPU0. R{RESTART}"),
        (
            [GPU0],
            [GPU0],
            False,
            (
                "This kernel keeps GPU0. CUDA sees GPU0 here, and nothing else can be reserved. "
                f"R{RESTART}"
            ),
        ),
        (
            [],
            [GPU0, GPU1],
            False,
            (
                "Nothing was reserved or changed. CUDA sees GPU0 and GPU1 here: a reservation can "
                f"no longer limit it to some of them. R{RESTART}"
            ),
        ),
        (
            [],
            [GPU1],
            True,
            (
                "Nothing was reserved or changed. CUDA sees GPU1 here: it can still be reserved, "
                f"with %reserve_gpu 1. For another GPU, r{RESTART}"
            ),
        ),
        (
            [],
            [PART, GPU1],
            True,
            (
                "Nothing was reserved or changed. CUDA sees GPU3:0 and GPU1 here: these can still "
                f"be reserved, with %reserve_gpu 3:0,1. For another GPU, r{RESTART}"
            ),
        ),
    ],
)
def test_too_late(
    held: list[Device], seen: list[Device], *, can_reserve: bool, expected: str
) -> None:
    """After CUDA has started, the error lists the GPUs that it sees, and those still available."""
    assert str(TooLate(held, seen, can_reserve).error(MAGIC)) == TOO_LATE + expected


def test_too_late_in_python() -> None:
    """A program is told the call that takes its GPU back, and to start again itself."""
    text = str(TooLate([], [PART, GPU1], can_reserve=True).error(PYTHON_CODE))
    assert "started in this process" in text
    assert (
        "with reserve_gpu.reserve('3:0,1'). For another GPU, restart the process and run " in text
    )


def test_programs_are_told_in_their_words() -> None:
    """What only programs get to know is said in one sentence each."""
    assert "This process is already reserving, releasing or querying GPUs" in NESTED
    assert notices.ALREADY_RELEASED == "This reservation has been released. Make a new one."
    assert "waiting in the queue" in notices.ANOTHER_THREAD_WAITS


# -- warnings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caution", "request_", "expected"),
    [
        (
            DeviceStatus(GPU0, State.BUSY, COMPUTED_ON, processes=(PYTHON,), use_state=State.BUSY),
            Request(("0",)),
            "You asked for GPU0: it is busy, alice, python (pid 4321000)",
        ),
        (
            DeviceStatus(GPU0, State.UNKNOWN, Usage(), use_state=State.UNKNOWN),
            Request(("0",)),
            "You asked for GPU0: it is unknown: neither its processes nor its memory can be read",
        ),
        (
            DeviceStatus(GPU0, State.BUSY, FULL, use_state=State.BUSY),
            Request(("0",)),
            "You asked for GPU0: it is busy, 10.2 GiB in use by no visible process",
        ),
    ],
)
def test_caution(caution: DeviceStatus, request_: Request, expected: str) -> None:
    """A warning says what was asked for, and who uses it."""
    assert notices.caution(caution, request_) == expected


GOES_ON = "CUDA has started in this kernel and keeps using the GPUs that it saw then, so "
VISIBLE = "CUDA_VISIBLE_DEVICES"
CHANGED = f"{VISIBLE} was"


@pytest.mark.parametrize(
    ("warning", "expected"),
    [
        (notices.devices_stay([GPU0], is_late=True), f"{GOES_ON}GPU0 stays reserved as well."),
        (
            notices.early_count(1),
            (
                "PyTorch counted 1 GPU before the reservation, and keeps that number in this "
                "process. Restart and reserve before PyTorch counts the GPUs, or make it count "
                "again:\ntorch.cuda.device_count.cache_clear()"
            ),
        ),
        (
            notices.devices_stay([GPU0, GPU1], is_late=False),
            ("The enclosing `with` block asked for more, so GPU0 and GPU1 stay reserved as well."),
        ),
        (
            notices.relocked(GPU0, None),
            (
                "Other code in this process closed the lock file of GPU0. GPU0 has been locked "
                "again, and is still reserved for this kernel."
            ),
        ),
        (
            notices.changed({VISIBLE: None}, [GPU0], is_late=False, is_restored=True),
            f"{CHANGED} unset after the reservation; the variables are set for GPU0 again",
        ),
        (
            notices.changed(
                {VISIBLE: "7\n", "CUDA_DEVICE_ORDER": None},
                [GPU0, GPU1],
                is_late=False,
                is_restored=True,
            ),
            (
                f"{CHANGED} set to '7\ufffd' and CUDA_DEVICE_ORDER was unset after the "
                "reservation; the variables are set for GPU0 and GPU1 again"
            ),
        ),
        (
            notices.changed({VISIBLE: "7"}, [GPU0], is_late=False, is_restored=False),
            (
                f"{CHANGED} set to '7' after the reservation of GPU0. Undo the change, or run "
                "the %reserve_gpu cell again, before CUDA starts"
            ),
        ),
        (
            notices.changed({VISIBLE: ""}, [GPU0], is_late=True, is_restored=True),
            (
                f"{CHANGED} set to '' after the reservation, so CUDA is not using exactly "
                "GPU0: restart, and reserve again"
            ),
        ),
        (
            notices.relocked(GPU0, "/run/lock/a.lock"),
            (
                "The lock file of GPU0 (/run/lock/a.lock) was deleted or replaced. GPU0 has been "
                "locked again, and is still reserved for this kernel."
            ),
        ),
        (
            str(lost(GPU0, "/run/lock/a.lock", [BOB])),
            (
                "The lock file of GPU0 (/run/lock/a.lock) was deleted, and the device is now "
                "reserved by bob, /home/bob (pid 9876). Nothing was changed. Talk to its owner, or "
                "restart this kernel."
            ),
        ),
        (
            notices.private_directory("/run/lock/reserve_gpu", "start it with --bind /run/lock"),
            (
                "this container sees only the reservations made inside it (in "
                "/run/lock/reserve_gpu). To share them with all users of this machine, start it "
                "with --bind /run/lock."
            ),
        ),
        (
            notices.unsigned([GPU0], "/run/lock/reserve_gpu", "No space left", is_part=True),
            (
                "GPU0 is reserved, but other users can't see the reservation's end time, note or "
                "notebook: /run/lock/reserve_gpu can't be written (No space left). Other users "
                "see the whole GPU as reserved. Free some space there, or tell the "
                "administrator."
            ),
        ),
    ],
)
def test_warnings(warning: str, expected: str) -> None:
    """What a person has to know of a reservation that stands is one line."""
    assert warning == expected


# -- parts -----------------------------------------------------------------------------------------

TEN_GB = Request(terms=ReservationTerms(Size(1e10 / 2**20, "GB")))
A_PART = changed(ALICE, terms=ReservationTerms(Size(4e10 / 2**20, "GB")))
FULL_GPU = DeviceStatus(GPU0, State.FULL, COMPUTED_ON, holders=(A_PART, BOB), promisable_mib=5999.0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (FULL_GPU, "5.8 GiB still available"),
        (FULL_GPU._replace(promisable_mib=0.0), "no memory available"),
        (FULL_GPU._replace(promisable_mib=0.2, holders=(A_PART,)), "no memory available"),
        (FULL_GPU._replace(promisable_mib=110.0), "0.1 GiB still available"),
        (FULL_GPU._replace(is_mine=True), "your part can grow to 5.8 GiB"),
    ],
)
def test_full(row: DeviceStatus, expected: str) -> None:
    """Of a GPU with too little room a line says how much there is, below those who have it."""
    (entry,) = refused(row, request=TEN_GB).layout.entries
    assert expected in list(map(phrases.plain, entry.more))


@pytest.mark.parametrize(
    ("rows", "request_", "expected"),
    [
        (
            [FULL_GPU, FULL_GPU._replace(device=GPU2, promisable_mib=7000.0)],
            TEN_GB,
            "No GPU has room for 9.3 GiB: the most is 6.8 GiB on GPU2.",
        ),
        (
            [FULL_GPU],
            TEN_GB._replace(devices=("0",)),
            "GPU0 has no room for 9.3 GiB, only for 5.8 GiB.",
        ),
        (
            [FULL_GPU, DeviceStatus(GPU1, State.FREE, would_be_taken=True), RESERVED],
            TEN_GB._replace(count=2),
            "Not enough GPU devices have room for 9.3 GiB: 1 of 3 does, but 2 are needed.",
        ),
        (
            [FULL_GPU, DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.PART), RESERVED],
            TEN_GB._replace(count=2),
            "Not enough GPU devices have room for 9.3 GiB: none of 2 does, but 2 are needed.",
        ),
        ([RESERVED], TEN_GB, NONE_FREE),
        ([FULL_GPU], ANY, "No free GPU: GPU0 is full."),
    ],
)
def test_headline_of_parts(rows: list[DeviceStatus], request_: Request, expected: str) -> None:
    """Where it is room that is missing, the headline says how much there is, and where."""
    assert headline(refused(*rows, request=request_)) == expected


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [
        ([FULL_GPU], 1, "5.8GiB"),
        ([FULL_GPU, FULL_GPU._replace(promisable_mib=8000.0)], 1, "7.8GiB"),
        ([FULL_GPU, FULL_GPU._replace(promisable_mib=8000.0)], 2, "5.8GiB"),
        ([FULL_GPU, DeviceStatus(GPU1, State.FREE, would_be_taken=True)], 2, "5.8GiB"),
        ([FULL_GPU, FULL_GPU._replace(device=PART)], 2, None),  # not together
        ([FULL_GPU, RESERVED], 2, None),
        ([FULL_GPU._replace(promisable_mib=1000.0)], 1, None),  # no program starts in that
        ([RESERVED], 1, None),
    ],
)
def test_a_smaller_part_is_offered(
    rows: list[DeviceStatus], count: int, expected: str | None
) -> None:
    """What is offered is the largest part that all of the devices that are needed have room for."""
    lines = ways_out(refused(*rows, request=TEN_GB._replace(count=count)))
    offers = [line for line in lines if "GiB is available now: " in line]
    assert [line.split("--memory ")[1] for line in offers] == ([expected] if expected else [])


WHOLE = Ticket(1, "queue-1-0.lock", None, BOB)  # waits for a whole GPU
SHARED = RESERVED._replace(holders=(A_PART,), promisable_mib=33600.0)  # 35.2 GB


@pytest.mark.parametrize(
    ("rows", "request_", "more", "offered"),
    [
        ([SHARED], ANY, {}, "--memory 30GB"),
        ([SHARED._replace(promisable_mib=18600.0), RESERVED], ANY, {}, "--memory 19GB"),
        ([SHARED], Request(("0",)), {}, "0 --memory 30GB"),
        ([SHARED], Request(min_memory_mib=20000.0), {}, "--min-memory 19.53125GiB --memory 30GB"),
        ([SHARED], Request(min_memory_mib=40000.0), {}, None),  # less than was asked for
        ([SHARED._replace(promisable_mib=1000.0)], ANY, {}, None),  # no program starts in that
        ([RESERVED._replace(promisable_mib=0.0)], ANY, {}, None),  # held as a whole
        ([SHARED._replace(state=State.LIMITED)], ANY, {}, None),  # by a rule
        ([SHARED, SHARED], Request(count=2), {}, None),
        ([SHARED._replace(is_mine=True)], ANY, {}, None),
        ([SHARED], ANY, {"ahead": [WHOLE]}, "--memory 30GB"),  # that waiter can't use a part
        ([SHARED], ANY, {"ahead": [WHOLE._replace(memory_limit_mib=2048.0)]}, None),
    ],
)
def test_a_part_is_offered(
    rows: list[DeviceStatus], request_: Request, more: dict[str, Any], offered: str | None
) -> None:
    """Instead of a whole GPU, a refusal offers the free part of a shared one in round GB."""
    lines = ways_out(refused(*rows, request=request_, **more))
    offers = [line.split("%reserve_gpu ")[1] for line in lines if " of GPU0 is available" in line]
    assert offers == ([offered] if offered else [])


def test_a_larger_part_beside_the_own_one() -> None:
    """Who has a part and wants a larger one is told how much there would be in all."""
    own = changed(A_PART, pid=17)
    row = FULL_GPU._replace(holders=(own, BOB), is_mine=True)
    picture = refused(row, request=TEN_GB, kept=[GPU0])
    assert "this kernel: alice, train.ipynb (pid 17) up to 37.3 GiB\n" in str(picture)
    assert str(picture).endswith("\n     your part can grow to 5.8 GiB")
    assert "still available" not in str(picture)
    assert left(picture) == "This kernel keeps GPU0; nothing was changed."


def test_who_is_idle_on_a_full_gpu_is_asked() -> None:
    """Of a GPU that is full, and on which nothing runs, those are asked who have it."""
    way, *_ = ways_out(refused(FULL_GPU._replace(is_unused=True), request=TEN_GB))
    assert way == "Ask alice (train.ipynb) and bob (/home/bob) for GPU0, idle."
    assert ways_out(refused(FULL_GPU, request=TEN_GB))[0].startswith("Wait in the queue: ")


@pytest.mark.parametrize("used_mib", [None, 11000.0])
def test_strangers_on_a_full_gpu(used_mib: float | None) -> None:
    """On a GPU that is full those are shown who use it without a reservation, sharers once."""
    own = Process(4321000, 3500, "alice", "python", has_reserved=True)
    sharers = (A_PART._replace(used_mib=used_mib),)
    full = FULL_GPU._replace(holders=sharers, processes=(STRANGER, own), is_unreserved_use=True)
    text = str(refused(full, request=TEN_GB))
    assert "without a reservation: mallory, python (pid 77)" in text
    assert text.count("alice") == 1
    alone = str(refused(full._replace(holders=(), processes=(STRANGER,)), request=TEN_GB))
    assert "no reservation: mallory, python (pid 77)" in alone


def test_a_warning_of_strangers_beside_a_part() -> None:
    """Who gets a part where others compute without a reservation is told that they may use more."""
    caution = DeviceStatus(GPU0, State.BUSY, COMPUTED_ON, processes=(PYTHON,), use_state=State.BUSY)
    assert notices.caution(caution, TEN_GB) == (
        "You have 9.3 GiB of GPU0, which other processes are using without a reservation: busy, "
        "alice, python (pid 4321000). The memory that they are using now is not in your part, but "
        "they may use more"
    )


@pytest.mark.parametrize(
    ("uses", "before", "expected"),
    [
        ({GPU0: 10.0}, (), ()),
        ({GPU0: 10.1, GPU1: 3.0}, (), (GPU0,)),
        ({GPU0: 9.0}, (GPU0,), ()),
        ({GPU0: None}, (), ()),
        ({GPU0: None, GPU1: 11.0}, (GPU0,), (GPU0, GPU1)),
        ({}, (GPU0,), ()),
    ],
)
def test_who_is_over(
    uses: dict[Device, float | None], before: tuple[Device, ...], expected: tuple[Device, ...]
) -> None:
    """A device is over with more than its part; where that can't be read it is as it was before."""
    held = Holding((GPU0, GPU1), {}, ReservationTerms(Size(10.0)))
    over, _ = exceeded(held, {}, uses, frozenset(before))
    assert over == set(expected)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), ""),
        (
            ("CUPY_GPU_MEMORY_LIMIT",),
            " It is limited by CUPY_GPU_MEMORY_LIMIT, which not every program reads.",
        ),
        (("A", "B", "C"), " It is limited by A, B and C, which not every program reads."),
    ],
)
def test_what_is_said_to_who_is_over(names: tuple[str, ...], expected: str) -> None:
    """Who is over reads how much, what caps it if that is known, and the line to type."""
    request = TEN_GB._replace(devices=("0",), terms=TEN_GB.terms._replace(note="x"))
    assert notices.exceeded(GPU0, 11540.0, request, names) == (
        "This kernel is using 11.3 GiB of GPU0, 2.0 GiB more than it has reserved: other users may "
        f"run out of memory.{expected} Free some memory (a restart frees all of it), or ask for "
        "more:\n"
        "%reserve_gpu 0 --memory 12GiB"
    )


# -- a wait ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Request(), "a GPU"),
        (Request(count=1), "a GPU"),
        (Request(count=2), "2 GPUs"),
        (Request(("0", "gpu1:0", "GPU2")), "GPU0, GPU1:0 and GPU2"),
        (Request(("GPU-8f2a", "03:00.0")), "GPU-8f2a and 03:00.0"),
        (Request(min_memory_mib=16384), "a GPU of 16.0 GiB or more"),
        (Request(min_memory_mib=15258.789, memory_unit="GB"), "a GPU of 14.9 GiB or more"),
        (Request(min_memory_mib=16000, memory_unit="MiB"), "a GPU of 15.6 GiB or more"),
        (Request(("cuda:1", "3")), "GPU1 and GPU3"),
        (Request(model="a100\x07"), "a GPU with 'a100\ufffd' in the name"),
        (Request(terms=ReservationTerms(Size(10240))), "10.0 GiB of a GPU"),
        (Request(("0",), terms=ReservationTerms(Size(0, percent=50))), "50% of GPU0"),
        (
            Request(terms=ReservationTerms(Size(9536.743, "GB")), count=2),
            "9.3 GiB of each of 2 GPUs",
        ),
        (
            Request(("0",), terms=ReservationTerms(Size(2048)), min_memory_mib=4096),
            "2.0 GiB of GPU0 of 4.0 GiB or more",
        ),
        (
            Request(count=2, min_memory_mib=16384, model="T4"),
            "2 GPUs of 16.0 GiB or more with 'T4' in the name",
        ),
    ],
)
def test_asked(request_: Request, expected: str) -> None:
    """A request is said in words that one who waits, and others, can read."""
    assert messages.request_text(request_) == expected


UNUSABLE = DeviceStatus(GPU1, State.UNFIT, unfit=Unfit.MODEL)
BUSY = DeviceStatus(GPU2, State.BUSY, COMPUTED_ON, processes=(PYTHON,), is_unreserved_use=True)


@pytest.mark.parametrize(
    ("place", "limit_s", "expected"),
    [
        (1, math.inf, "Waiting for a GPU: next in the queue, 1 min so far."),
        (3, math.inf, "Waiting for a GPU: number 3 in the queue, 1 min so far."),
        (1, 600.0, "Waiting for a GPU: next in the queue, 1 min so far (10 min at most)."),
        (2, 0.5, "Waiting for a GPU: number 2 in the queue, 1 min so far (0.5 s at most)."),
    ],
)
def test_waiting(place: int, limit_s: float, expected: str) -> None:
    """A wait shows what for, the place in the queue and how long; then what is in the way."""
    picture = pictures.wait(Waiting(Request(), place, 61.0, (RESERVED, UNUSABLE, BUSY), limit_s))
    lines = str(picture).splitlines()
    assert lines[0] == expected
    assert [line.split()[:2] for line in lines[2:]] == [["0", "reserved"], ["2", "busy"]]
    assert lines[2].endswith("alice, train.ipynb (pid 4321000)")
    assert picture.brief == f"{expected} GPU0 alice, GPU2 busy"


def test_who_is_first_in_the_queue() -> None:
    """Who waits behind others reads who comes first, and for what that one waits."""
    first = Ticket(1, "q", None, BOB, "2 GPUs <b>\x1b")
    waiting = Waiting(Request(), 2, 61.0, (RESERVED,), first=first)
    asks = "2 GPUs <b>\N{REPLACEMENT CHARACTER}"
    line = f"First in the queue is bob (/home/bob), who is waiting for {asks}."
    assert ways_out(pictures.wait(waiting)) == [line]
    assert ways_out(pictures.wait(waiting._replace(first=None))) == []


def test_your_own_waiter_is_first_in_the_queue() -> None:
    """A waiter of the reading user is called by its notebook."""
    own = ALICE._replace(owner=own_name())
    waiting = Waiting(Request(), 2, 61.0, (RESERVED,), first=Ticket(1, "q", None, own))
    line = "First in the queue is your train.ipynb, which is waiting for a GPU."
    assert ways_out(pictures.wait(waiting)) == [line]


@pytest.mark.parametrize(
    ("user", "expected"), [("alice", "your train.ipynb"), ("bob", "alice"), (None, "alice")]
)
def test_your_own_holder_in_a_headline(user: str | None, expected: str) -> None:
    """The headline of a refusal calls a holder of the user who reads it by its notebook."""
    picture = refused(RESERVED, user=user)
    assert headline(picture) == f"No free GPU: GPU0 is reserved by {expected}."
    kept = RESERVED._replace(holders=(changed(ALICE, kept_until=time.time() + 30),))
    whose = "alice (train.ipynb)" if user != "alice" else expected
    assert headline(refused(kept, user=user)) == (
        f"No free GPU: GPU0 is kept for the restart of {whose}."
    )


def test_users_are_not_referred_to_themselves() -> None:
    """Each of two users of an idle GPU is referred to the other user."""
    now = time.time()
    row = idle(GPU0, BOB, since=now - 7200)
    shared = row._replace(holders=(*row.holders, ALICE))
    asked, *_ = (line for line in ways_out(refused(shared, user="alice")) if "Ask" in line)
    assert asked == "Ask bob (/home/bob) for GPU0, idle for 2 h."
    assert not any("Ask" in line for line in ways_out(refused(RESERVED, user="alice")))


def test_what_is_likeliest_to_come_free() -> None:
    """Of a wait it is said which reserved GPU has been idle longest, where one is idle."""
    now = time.time()
    devices = (
        idle(GPU0, ALICE, since=now - 1800),
        idle(GPU1, BOB, since=now - 7200),
        DeviceStatus(GPU2, State.RESERVED, COMPUTED_ON, holders=(BOB,)),
    )
    assert ways_out(pictures.wait(Waiting(Request(), 1, 0.0, devices))) == [
        "Probably free next: GPU1, idle for 2 h"
    ]
    assert ways_out(pictures.wait(Waiting(Request(), 1, 0.0, (RESERVED, BUSY)))) == []


SOON = "GPU0 should be free in a few seconds: try again."
PERHAPS_SOON = "If the last holder of GPU0 has just ended, try again in a few seconds."
ENDED = LastHolder(Holder(listed_pid=4321, owner=HOSTILE), None)
FREEING = LastHolder(Holder(listed_pid=4321, owner=HOSTILE), 3.2, is_falling=True)
ZOMBIE = PYTHON._replace(zombie_of=f"{HOSTILE} (pid 11)")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            DeviceStatus(GPU0, State.BUSY, FULL),
            ["As root, find the processes that may hold that memory: fuser -v /dev/nvidia*"],
        ),
        (
            DeviceStatus(GPU0, State.BUSY, FULL._replace(sees_all=False, is_wsl=True)),
            [
                (
                    "If only Windows uses that memory, set in the environment: "
                    "RESERVE_GPU_IDLE_MEMORY=11GiB"
                )
            ],
        ),
        (
            DeviceStatus(GPU0, State.BUSY, FULL._replace(sees_all=False)),
            [],
        ),  # others can end it, unseen
        (DeviceStatus(GPU0, State.RESERVED, FULL, holders=(ALICE,)), []),
        (
            DeviceStatus(GPU0, State.UNKNOWN, Usage(compute=0, sees_all=False)),
            ["GPU0's usage can't be read. If you know it is unused: %reserve_gpu 0"],
        ),
        (DeviceStatus(GPU0, State.UNKNOWN, reason="its lock is a link"), []),
        (
            DeviceStatus(GPU0, State.UNKNOWN, Usage(compute=0, sees_all=False), holders=(A_PART,)),
            [],
        ),
        (DeviceStatus(GPU0, State.UNKNOWN, Usage(compute=1, sees_all=False)), []),
        (
            DeviceStatus(GPU0, State.BUSY, COMPUTED_ON, processes=(ZOMBIE,)),
            [f"alice, python (pid 4321000, a zombie) will go away when {HARMLESS} (pid 11) ends."],
        ),
        (
            DeviceStatus(
                GPU0, State.BUSY, COMPUTED_ON, processes=(PYTHON._replace(left_by=HOSTILE),)
            ),
            [f"GPU0: left over from {HARMLESS}: alice, python (pid 4321000)."],
        ),
        (
            DeviceStatus(GPU0, State.BUSY, FULL, openers=(PYTHON, Process(7))),
            [
                "Your processes python (pid 4321000) 3.4 GiB; pid 7 have opened GPU0.",
                "As root, find the processes that may hold that memory: fuser -v /dev/nvidia*",
            ],
        ),
        (
            DeviceStatus(GPU0, State.BUSY, FULL, last_holder=FREEING),
            [SOON],
        ),
        (
            DeviceStatus(GPU0, State.BUSY, FULL, last_holder=FREEING._replace(is_falling=False)),
            [
                SOON,
                "As root, find the processes that may hold that memory: fuser -v /dev/nvidia*",
            ],
        ),
        (
            DeviceStatus(GPU0, State.BUSY, FULL, last_holder=ENDED),
            [
                PERHAPS_SOON,
                "As root, find the processes that may hold that memory: fuser -v /dev/nvidia*",
            ],
        ),
    ],
)
def test_what_helps_where_a_wait_may_not_end(row: DeviceStatus, expected: list[str]) -> None:
    """A refusal, a wait and a status say what to do about use that nobody is seen to have."""
    in_wait = ways_out(pictures.wait(Waiting(Request(), 1, 0.0, (row,))))
    in_status = [
        phrases.plain(line) for line in Status((row,), frontend=MAGIC).picture().layout.foot
    ]
    in_refusal = ways_out(refused(row))
    no_command = [
        line.replace(": %reserve_gpu 0", ", reserve all of it by number.")
        for line in expected
        if line not in {SOON, PERHAPS_SOON}
    ]
    assert in_wait == no_command
    assert in_status[: len(expected)] == in_refusal[: len(expected)] == expected
    is_vain = row.state is State.UNKNOWN and not (row.usage and row.usage.compute)
    assert any("in the queue: " in line for line in in_refusal) is not is_vain
    assert any("in the queue: " in line for line in in_status) is not is_vain


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (FREEING, f"released 3 s ago by {HARMLESS}, {{}}; its memory is still being freed"),
        (
            ENDED._replace(is_listed=True),
            f"last held by {HARMLESS}, {{}}, which has ended; the driver still lists it",
        ),
        (
            ENDED,
            f"last held by {HARMLESS}, {{}}, which has ended; 3.0 GiB in use by no visible process",
        ),
    ],
)
def test_the_last_holder_of_a_busy_gpu_is_named(last: LastHolder, expected: str) -> None:
    """A busy GPU that no process seems to use is shown with its last holder."""
    row = DeviceStatus(GPU0, State.BUSY, Usage(0, 0, used_mib=3072), last_holder=last)
    assert reasons.reason(row) == expected.format("a process (pid 4321)")


@pytest.mark.parametrize(("user", "expected"), [("alice", True), ("bob", False), (None, False)])
def test_only_the_owner_of_a_process_is_told_to_end_it(user: str | None, *, expected: bool) -> None:
    """The command that ends a process left over from a kernel is shown to the process's user."""
    process = PYTHON._replace(left_by="train.ipynb", started=time.time())
    row = DeviceStatus(GPU0, State.BUSY, COMPUTED_ON, processes=(process,))
    for_program = MAGIC._replace(is_for_program=True)
    command = "To end it: kill 4321000"
    assert any(command in line for line in ways_out(refused(row, user=user))) is expected
    assert "kill" not in "\n".join(ways_out(refused(row, user=user, frontend=for_program)))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (RESERVED, "alice"),
        (DeviceStatus(GPU0, State.RESERVED, holders=(a_holder(user=HOSTILE),)), HARMLESS),
        (DeviceStatus(GPU0, State.RESERVED, holders=(Holder(),)), "reserved"),
        (DeviceStatus(GPU0, State.AWAITED, awaited_by=BOB), "awaited"),
        (DeviceStatus(LOST, State.BROKEN), "broken"),
        (FULL_GPU, "has room for 5.8 GiB"),
    ],
)
def test_waiting_briefly(row: DeviceStatus, expected: str) -> None:
    """In one row there is a word for each device: its holder's name, else its state."""
    brief = pictures.wait(Waiting(Request(), 1, 0.0, (row,))).brief
    assert brief.partition("0 s so far. ")[2] == f"{row.label} {expected}"


@pytest.mark.parametrize(
    ("frontend", "held", "kept_s", "expected"),
    [
        (
            MAGIC,
            [],
            None,
            "Stopped waiting; nothing is reserved. No GPU is visible to this notebook.",
        ),
        (
            SHELL,
            [],
            120.0,
            (
                "Stopped waiting; nothing is reserved.\n"
                "Your place in the queue is kept for 2 min; the same request returns to it."
            ),
        ),
        (MAGIC, [GPU0, GPU1], None, "Stopped waiting. This kernel keeps GPU0 and GPU1."),
        (PYTHON_CODE, [GPU0], None, "Stopped waiting. This process keeps GPU0."),
        (SHELL, [], None, "Stopped waiting; nothing is reserved."),
        (SHELL, [GPU0], None, "Stopped waiting. This process keeps GPU0."),
    ],
)
def test_interrupted(
    frontend: Frontend, held: list[Device], kept_s: float | None, expected: str
) -> None:
    """The message about an interrupted wait says what is reserved and whether a place is kept."""
    assert messages.interrupted(held, frontend, kept_s) == expected
