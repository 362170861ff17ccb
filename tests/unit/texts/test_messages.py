"""Messages about reservations, made from values: notices, warnings, errors and hints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.model import errors
from reserve_gpu.model.devices import Device, Fault, Process, State, Unfit, Usage
from reserve_gpu.model.holders import Answer, DeviceStatus, Holder, LastHolder, Reserved
from reserve_gpu.model.progress import Slow
from reserve_gpu.model.requests import Lease, Request, ReservationTerms, Rule, Rules, Size
from reserve_gpu.render import (
    contacts,
    durations,
    messages,
    notices,
    phrases,
    reasons,
    reservation_list,
    rule_text,
)
from reserve_gpu.render.frontends import MAGIC, PYTHON, SHELL, shell
from reserve_gpu.render.notices import HidesAll, ReservedAbove, TooLate, impossible, lost
from reserve_gpu.reservation.session import Reservation
from reserve_gpu.system import executor, settings
from tests.support.holders import a_holder, changed
from tests.support.pictures import (
    A100,
    ALICE,
    BOB,
    BUSY,
    COMPUTED_ON,
    EMPTY,
    EXCLUSIVE,
    FULL,
    FULL_ROW,
    INSTANCE,
    LOST,
    NOW,
    PART_HOLDER,
    PROHIBITED,
    RESERVED,
    STRANGER,
    T4,
    TEN_GB,
    UNNAMED,
    free,
    idle,
    refused,
)
from tests.support.pictures import PYTHON as PYTHON_PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syrupy.assertion import SnapshotAssertion

    from reserve_gpu.render.frontends import Frontend

HOSTILE = "\x1b[31mred\n  GPU1: free\u202e"
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
PROGRAM = MAGIC._replace(is_for_program=True)
DIRECTORY, LOCK_FILE = "/run/lock/reserve_gpu", "/run/lock/reserve_gpu/a.lock"
RULES_FILE = "/etc/reserve_gpu.toml"
TIME_RULE = Rule('time = "24h"', "[limits]", RULES_FILE, 86_400.0)
GPU_RULE = Rule("gpus = 1", "[groups.students]", RULES_FILE, 1.0)
PAST = time.mktime((2001, 11, 20, 18, 0, 0, 0, 0, -1))  # shown with its date


def table(cases: Mapping[str, str]) -> str:
    """Return a line for each named case."""
    return "\n".join(f"{name}: {text}" for name, text in cases.items())


# -- numbers, names and processes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("show", "values"),
    [
        pytest.param(phrases.gib, [0, 5, 300, 1024, 10444.8, 81920], id="memory in MiB"),
        pytest.param(
            durations.duration,
            [0, 0.9, 59.9, 60, 3599, 3600, 7800, 86400, 100800, 864000],
            id="duration in seconds",
        ),
        pytest.param(
            durations.time_limit,
            [0.2, 1 / 3, 1, 1.5, 60, 90, 120, 150, 5400],
            id="time limit in seconds",
        ),
    ],
)
def test_numbers(
    show: Callable[[float], str], values: Sequence[float], snapshot: SnapshotAssertion
) -> None:
    assert table({f"{value:.5g}": show(value) for value in values}) == snapshot


# -- results ---------------------------------------------------------------------------------------

NOTHING_SET = {VISIBLE: None}
GEFORCE = Device(
    2, "GPU-c", "GeForce GTX 1050 Ti", "0000:03:00.0", 4038, "86.07.22.00.A8", link_width=16
)
SET = {VISIBLE: "2", ORDER: "PCI_BUS_ID", "CUDA_DEVICE_MEMORY": "4038"}
RESULTS = {
    "reserved": Reservation([GEFORCE], SET),
    "repr of a reservation": repr(Reservation([T4, UNNAMED], {})),
    "released": messages.released([A100], NOTHING_SET, started=False),
    "released after CUDA": messages.released([A100], NOTHING_SET, started=True),
    "continuing without a GPU": messages.continuing([]),
    "continuing with a variable": messages.continuing([], "0,1"),
    "continuing with an empty variable": messages.continuing([], ""),
    "joined": messages.joined([A100], "train.ipynb", {VISIBLE: "0"}),
    "kept for a restart": messages.kept_for_restart([A100], NOW),
    "left in a notebook": messages.left_with([], MAGIC),
    "left in a shell": messages.left_with([], SHELL),
    "command ends": messages.command_ends(Lease(until=NOW + 3600), NOW),
    "job ends": messages.command_ends(Lease(until=NOW + 3600, is_jobs=True), NOW),
    "slow driver": messages.slow(Slow("", 61.0)),
    "interrupted in a notebook": messages.interrupted([], MAGIC),
    "interrupted in Python": messages.interrupted([A100], PYTHON),
    "interrupted in a shell": messages.interrupted([], SHELL),
    "interrupted with a kept place": messages.interrupted([], SHELL, 120.0),
}


@pytest.mark.parametrize("text", RESULTS.values(), ids=RESULTS)
def test_result(text: object, snapshot: SnapshotAssertion) -> None:
    assert str(text) == snapshot


REQUESTS = {
    "any": Request(),
    "one": Request(count=1),
    "by number": Request(("0", "gpu1:0", "GPU2")),
    "two with memory and a model": Request(count=2, min_memory_mib=16384, model="T4"),
    "part": Request(terms=ReservationTerms(Size(10240))),
    "part in percent": Request(("0",), terms=ReservationTerms(Size(0, percent=50))),
    "part of a large GPU": Request(("0",), terms=ReservationTerms(Size(2048)), min_memory_mib=4096),
}


def test_requests(snapshot: SnapshotAssertion) -> None:
    texts = {name: messages.request_text(request) for name, request in REQUESTS.items()}
    assert table(texts) == snapshot


# -- warnings --------------------------------------------------------------------------------------

USED = DeviceStatus(
    A100, State.BUSY, COMPUTED_ON, processes=(PYTHON_PROCESS,), use_state=State.BUSY
)
GPU0 = Request(("0",))
FAILED_MEMORY = EMPTY._replace(awaits_reset=True)
WARNINGS = {
    "busy": notices.caution(USED, GPU0),
    "busy in exclusive mode": notices.caution(USED._replace(usage=EXCLUSIVE), GPU0),
    "unreadable": notices.caution(USED._replace(usage=Usage(), use_state=State.UNKNOWN), GPU0),
    "busy next to a part": notices.caution(USED, TEN_GB),
    "memory has failed": notices.caution(
        DeviceStatus(A100, State.IDLE, FAILED_MEMORY, use_state=State.IDLE), GPU0
    ),
    "private directory": notices.private_directory(DIRECTORY, "start it with --bind /run/lock"),
    "unsigned": notices.unsigned([A100, T4], DIRECTORY, "No space left", is_part=False),
    "unsigned part": notices.unsigned([A100], DIRECTORY, "No space left", is_part=True),
    "unusable": notices.unusable(A100, "Unknown Error", is_late=False),
    "unusable after CUDA": notices.unusable(A100, "Unknown Error", is_late=True),
    "lost device": notices.lost_device(A100, "GPU is lost", is_late=False),
    "lost device after CUDA": notices.lost_device(A100, "GPU is lost", is_late=True),
    "renumbered": notices.renumbered(A100, T4, is_late=False),
    "renumbered after CUDA": notices.renumbered(A100, T4, is_late=True),
    "used by others": notices.used_by_others(USED),
    "device stays": notices.devices_stay([A100], is_late=False),
    "devices stay after CUDA": notices.devices_stay([A100, T4], is_late=True),
    "variable unset": notices.changed({VISIBLE: None}, [A100], is_late=False, is_restored=True),
    "variable not restored": notices.changed(
        {VISIBLE: "7"}, [A100], is_late=False, is_restored=False
    ),
    "variable set after CUDA": notices.changed(
        {VISIBLE: ""}, [A100], is_late=True, is_restored=True
    ),
    "descriptor closed": notices.relocked(A100, None),
    "lock file deleted": notices.relocked(A100, LOCK_FILE),
    "holder released one": notices.holder_released([A100], "train.ipynb"),
    "shortened by a rule": notices.shortened(TIME_RULE, PAST),
    "memory limit kept": notices.memory_limits_kept(["XLA_PYTHON_CLIENT_MEM_FRACTION"]),
    "PyTorch counted two": notices.early_count(2),
    "limit for PyTorch": notices.framework_limit_hint("torch", "torch.set(0.5)"),
    "more than reserved": notices.exceeded(A100, 11540.0, TEN_GB._replace(devices=("0",)), []),
    "more than reserved, with a limit": notices.exceeded(A100, 11540.0, TEN_GB, ["A"]),
}
CONSTANTS = [
    notices.PART_STAYS, notices.ALREADY_RELEASED, notices.LEASE_EXPIRED, notices.JUST_RELEASED,
    notices.CAPS_ARE_LATE, notices.ANOTHER_THREAD_WAITS, executor.NESTED, errors.TOO_MANY_FILES,
]  # fmt: skip


@pytest.mark.parametrize("text", WARNINGS.values(), ids=WARNINGS)
def test_warning(text: str, snapshot: SnapshotAssertion) -> None:
    assert text == snapshot


def test_constant_messages(snapshot: SnapshotAssertion) -> None:
    assert "\n".join(CONSTANTS) == snapshot


LEFT = PYTHON_PROCESS._replace(left_by="train.ipynb")
LEFT_RUNNING = {
    "one": (LEFT,),
    "two": (LEFT, LEFT._replace(pid=18)),
    "zombie": (LEFT._replace(zombie_of="sh (pid 11)"),),
}


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("agent", ["", "claude"])
@pytest.mark.parametrize("processes", LEFT_RUNNING.values(), ids=LEFT_RUNNING)
def test_left_running(
    processes: tuple[Process, ...],
    agent: str,
    snapshot: SnapshotAssertion,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a person reads the command that ends the processes."""
    monkeypatch.setenv(settings.AGENT, agent)
    assert notices.left_running(USED._replace(processes=processes)) == snapshot


# -- errors ----------------------------------------------------------------------------------------


def unfit(device: Device | Fault, unfit_: Unfit) -> DeviceStatus:
    """Return the row of a device that can't match the request."""
    return DeviceStatus(device, State.UNFIT, unfit=unfit_)


def of_large_parts(gb: float) -> Request:
    """Return a request for a part of so many GB."""
    return Request(terms=ReservationTerms(Size(gb * 1e9 / 2**20, "GB")))


FREE = DeviceStatus(A100, State.FREE)
UNFIT_MODEL, UNKNOWN_SIZE = unfit(T4, Unfit.MODEL), unfit(UNNAMED, Unfit.MEMORY_UNKNOWN)
BROKEN = DeviceStatus(LOST, State.BROKEN)
WITH_RESERVE = unfit(A100._replace(reserve_mib=600), Unfit.PART)
H100 = Request(model="H100")
ALL_BUT_ONE_MIB = Request(terms=ReservationTerms(Size(40959.0, "MiB")), min_memory_mib=1024.0)
ABOVE = [DeviceStatus(device, State.RESERVED, holders=(ALICE,)) for device in (A100, T4)]
ERRORS = {
    "lock deleted": lost(A100, LOCK_FILE, [BOB]),
    "lock closed": lost(A100, None, [ALICE, BOB]),
    "joined": notices.has_joined([A100], "train.ipynb"),
    "holds already": notices.holds_already([A100]),
    "too many GPUs for a rule": notices.too_many(GPU_RULE, Request(count=2)),
    "too long for a rule": notices.too_long(TIME_RULE, 2 * 86_400.0),
    "a rule ends it anyway": notices.ends_anyway(TIME_RULE),
    "a rule forbids more": notices.cannot_extend(TIME_RULE, PAST),
    "no such model": impossible(H100, [UNFIT_MODEL], None),
    "not so much memory": impossible(
        Request(min_memory_mib=190734.86328125, memory_unit="GB"),
        [unfit(A100._replace(index=n), Unfit.MEMORY) for n in range(8)],
        None,
    ),
    "two with memory, one is suitable": impossible(
        Request(count=2, min_memory_mib=20480),
        [FREE, unfit(T4, Unfit.MEMORY), UNKNOWN_SIZE],
        None,
    ),
    "more than visible": impossible(Request(count=9), [FREE._replace(state=State.BUSY)] * 2, "0,1"),
    "GPU and instance": impossible(Request(count=2), [FREE, FREE._replace(device=INSTANCE)], None),
    "second instance": impossible(
        Request(count=2), [FREE, unfit(INSTANCE, Unfit.SECOND_INSTANCE)], None
    ),
    "part of all but the driver's reserve": impossible(ALL_BUT_ONE_MIB, [WITH_RESERVE], None),
    "too large a part": impossible(
        of_large_parts(100), [unfit(each, Unfit.PART) for each in (A100, T4)], None
    ),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_error(error: errors.ReserveGPUError, snapshot: SnapshotAssertion) -> None:
    assert str(error) == snapshot


TRUE = shell(["true"])
NAMED = Request(devices=("1",))
# Errors whose hints depend on the frontend.
HINTED = {
    "above: one": (ReservedAbove([ABOVE[0], UNKNOWN_SIZE], {VISIBLE: "0", ORDER: None}), MAGIC),
    "late: holds one": (TooLate([A100]), MAGIC),
    "late: holds the visible one": (TooLate([A100], [A100]), MAGIC),
    "late: sees two": (TooLate([], [A100, T4]), MAGIC),
    "late: sees two available": (TooLate([], [INSTANCE, T4], can_reserve=True), MAGIC),
    "hidden: magic": (HidesAll(NAMED, "-1", 2), MAGIC),
    "hidden: Python": (HidesAll(NAMED, "-1", 2), PYTHON),
    "hidden: shell": (HidesAll(NAMED, "-1", 2), TRUE),
    "hidden: program": (HidesAll(NAMED, "-1", 2), PROGRAM),
    "hidden: holds one": (HidesAll(Request(count=2), "-1", 2, kept=(A100,)), MAGIC),
}


@pytest.mark.parametrize(("reason", "frontend"), HINTED.values(), ids=HINTED)
def test_error_with_hint(
    reason: ReservedAbove | TooLate | HidesAll, frontend: Frontend, snapshot: SnapshotAssertion
) -> None:
    assert str(reason.error(frontend)) == snapshot


HIDING = [
    *[("", 2), (" ", 2), ("-1", 2), ("NoDevFiles", 2)],
    *[("0,0", 2), ("1,0,1", 2), ("GPU-a,GPU-a", 2), ("7,0,0", 2), ("1", 1), ("GPU-cccc", 4)],
    *[("all", 2), ("cuda:1", 2), ("[0]", 2), ("\x1b[1m", 2)],
]


def test_value_that_hides_all_gpus(snapshot: SnapshotAssertion) -> None:
    """The message says why this value of CUDA_VISIBLE_DEVICES hides every GPU."""
    texts = (str(HidesAll(Request(), limit, total).error(SHELL)) for limit, total in HIDING)
    assert "\n".join(text.partition(" The variable")[0] for text in texts) == snapshot


# -- the rows of a table ---------------------------------------------------------------------------


def reserved(*holders: Holder, **fields: Any) -> DeviceStatus:
    """Return the row of a reserved GPU."""
    return RESERVED._replace(usage=None, holders=holders, **fields)


def busy(usage: Usage | None, *processes: Process, **fields: Any) -> DeviceStatus:
    """Return the row of a busy GPU."""
    return DeviceStatus(A100, State.BUSY, usage, processes=processes, **fields)


OF_JOB = a_holder(17, "bob", agent="claude", origin="lab1", job="4711", job_name="train.sh")
HELD = Usage(0, 0, used_mib=3072)
ENDED = LastHolder(a_holder(4321, HOSTILE), None)
FREEING = LastHolder(a_holder(4321, HOSTILE), 3.2, is_falling=True)
AWAITED = DeviceStatus(A100, State.AWAITED, EMPTY, awaited_by=BOB)
FULL_OF_STRANGERS = FULL_ROW._replace(processes=(STRANGER,), is_unreserved_use=True)
DRAIN = Rule('drain = ["0"]', "[devices]", RULES_FILE, 0.0)
XORG = Process(5, 3000, "root", "Xorg", kind="graphics")
DEAD = Process(6, None, "alice", "python")
ROWS = {
    "reserved": RESERVED,
    "by an unknown user": reserved(Holder()),
    "unverified": reserved(a_holder(17, "bob")),
    "in another container": reserved(a_holder(17, "bob", is_other_namespace=True)),
    "in a job": reserved(OF_JOB),
    "with a stranger": reserved(BOB, processes=(STRANGER,)),
    "with a process next to the holder": reserved(
        BOB, processes=(PYTHON_PROCESS._replace(beside="train.ipynb"),)
    ),
    "joined": reserved(BOB._replace(beside="train.ipynb")),
    "joined a reservation that is gone": reserved(changed(BOB, guest_of=1.0)),
    "killed": reserved(BOB._replace(is_dying=True)),
    "with an error": reserved(ALICE, reason="Unknown Error"),
    "by this kernel": reserved(ALICE, is_mine=True, would_be_taken=True),
    "lost, but reserved": reserved(changed(BOB, label="GPU9"), device=LOST, reason="GPU is lost"),
    "awaited": AWAITED,
    "awaited by another user than the holder": AWAITED._replace(holders=(ALICE,)),
    "used without a reservation": busy(COMPUTED_ON, PYTHON_PROCESS, is_unreserved_use=True),
    "left over": busy(COMPUTED_ON, PYTHON_PROCESS._replace(left_by=HOSTILE)),
    "used in exclusive mode": busy(EXCLUSIVE, PYTHON_PROCESS, is_unreserved_use=True),
    "used by an invisible process": busy(COMPUTED_ON),
    "used by an MPS client": busy(EMPTY._replace(mps=1)),
    "memory in use": busy(FULL),
    "memory in use, in a container": busy(FULL._replace(sees_all=False)),
    "memory in use, under WSL": busy(FULL._replace(sees_all=False, is_wsl=True)),
    "graphics": busy(FULL._replace(graphics_mib=10444.8), background=(XORG,)),
    "process without memory": busy(COMPUTED_ON, background=(DEAD,)),
    "busy for an unknown reason": busy(None),
    "released": busy(HELD, last_holder=FREEING),
    "ended, and listed": busy(HELD, last_holder=ENDED._replace(is_listed=True)),
    "ended": busy(HELD, last_holder=ENDED),
    "prohibited": DeviceStatus(A100, State.PROHIBITED, PROHIBITED),
    "drained": DeviceStatus(A100, State.DRAINED, rule=DRAIN),
    "unknown": DeviceStatus(A100, State.UNKNOWN, Usage()),
    "unknown on the host's memory": DeviceStatus(A100, State.UNKNOWN, Usage(has_host_memory=True)),
    "broken": DeviceStatus(A100, State.BROKEN, reason="Unknown Error"),
    "memory has failed": DeviceStatus(A100, State.FREE, FAILED_MEMORY),
    "unfit: lost": unfit(LOST, Unfit.UNREADABLE),
    "unfit: model": UNFIT_MODEL,
    "unfit: no model": unfit(UNNAMED, Unfit.MODEL),
    "unfit: memory": unfit(T4, Unfit.MEMORY),
    "unfit: part": unfit(T4, Unfit.PART),
    "unfit: unknown memory": UNKNOWN_SIZE,
    "unfit: second instance": unfit(INSTANCE, Unfit.SECOND_INSTANCE),
    "free": DeviceStatus(A100, State.FREE, EMPTY, would_be_taken=True),
    "busy, but named": busy(COMPUTED_ON, would_be_taken=True),
    "full": FULL_ROW,
    "full to the last MiB": FULL_ROW._replace(promisable_mib=0.2, holders=(PART_HOLDER,)),
    "almost full": FULL_ROW._replace(promisable_mib=110.0),
    "full, with this kernel's part": FULL_ROW._replace(is_mine=True),
    "full, with a stranger": FULL_OF_STRANGERS,
}


def text_of_row(row: DeviceStatus) -> str:
    """Return the state and the text of a device in a refusal."""
    entry = refused(row, request=TEN_GB).layout.entries[-1]
    assert entry.state
    lines = [phrases.plain(line) for line in (entry.who, *entry.more) if line]
    return f"{entry.state.value}: {'; '.join(lines)}"


def test_rows(snapshot: SnapshotAssertion) -> None:
    assert table({name: text_of_row(row) for name, row in ROWS.items()}) == snapshot


# -- hints -----------------------------------------------------------------------------------------

ZOMBIE = PYTHON_PROCESS._replace(zombie_of=f"{HOSTILE} (pid 11)")
LEFT_AT = PYTHON_PROCESS._replace(left_by="train.ipynb", started=PAST)
DARK = DeviceStatus(A100, State.UNKNOWN, Usage(compute=0, sees_all=False))
UNSEEN = {
    "memory in use": busy(FULL),
    "memory in use, under WSL": busy(FULL._replace(sees_all=False, is_wsl=True)),
    "memory in use, in a container": busy(FULL._replace(sees_all=False)),
    "memory of a holder": reserved(ALICE)._replace(usage=FULL),
    "memory of an invisible process": busy(FULL._replace(compute=1)),
    "memory of a process that has ended": busy(
        FULL._replace(compute=1), PYTHON_PROCESS._replace(has_ended=True)
    ),
    "unreadable": DARK,
    "unreadable with a reason": DARK._replace(reason="its lock is a link"),
    "unreadable with a holder": DARK._replace(holders=(PART_HOLDER,)),
    "zombie": busy(COMPUTED_ON, ZOMBIE),
    "left over": busy(COMPUTED_ON, LEFT_AT),
    "of another user": busy(COMPUTED_ON, LEFT_AT._replace(user="bob")),
    "opened by one": busy(FULL, openers=(PYTHON_PROCESS,)),
    "freeing": busy(FULL, last_holder=FREEING),
    "released": busy(FULL, last_holder=FREEING._replace(is_falling=False)),
    "ended": busy(FULL, last_holder=ENDED),
}


@pytest.mark.parametrize(
    ("frontend", "user"),
    [
        pytest.param(MAGIC, "alice", id="owner"),
        pytest.param(PROGRAM, "alice", id="program of the owner"),
        pytest.param(None, None, id="waiter"),
    ],
)
def test_hints_about_use_that_cannot_be_seen(
    frontend: Frontend | None, user: str | None, snapshot: SnapshotAssertion
) -> None:
    """Only the owner of processes reads the command that ends them, unless it is a program."""
    texts = {
        name: " | ".join(map(phrases.plain, reasons.unseen([row], frontend, user)))
        for name, row in UNSEEN.items()
    }
    assert table(texts) == snapshot


EVAL = a_holder(4322, "alice", "eval.ipynb", seen=True)
LATE = changed(EVAL, lease=Lease(until=NOW - 60), since=NOW - 7200)
DAY_LATE = changed(BOB, lease=Lease(until=NOW - 86400), since=NOW - 172800)
IDLE_FOR_2H = idle(A100, ALICE, since=NOW - 7200)
THREE = tuple(IDLE_FOR_2H._replace(device=A100._replace(index=index)) for index in range(3))
EVALS = tuple(idle(A100._replace(index=index), EVAL, since=NOW - 3600) for index in (3, 5))
USED_LATE = DeviceStatus(A100._replace(index=7), State.RESERVED, COMPUTED_ON, holders=(LATE,))
NEW = idle(T4, BOB, since=NOW - 60)
SHARERS = tuple(a_holder(pid, name, since=1.0) for pid, name in enumerate("abcd", 1))
LISTS = {
    "longest idle first": (
        idle(A100, ALICE, since=NOW - 9000, cell=NOW - 1800),
        idle(T4, BOB, since=NOW - 7200),
        idle(UNNAMED, a_holder(5, "carol"), since=NOW - 9000, cell=NOW - 3600),
        RESERVED._replace(device=INSTANCE),
    ),
    "three of six": tuple(
        idle(A100._replace(index=pid), a_holder(pid, f"u{pid}"), since=NOW - 7200 - pid)
        for pid in range(6)
    ),
    "idle and overdue": (THREE[0], USED_LATE),
    "reserved for less than ten minutes": (idle(A100, BOB, since=NOW - 599),),
    "reserved for ten minutes": (idle(A100, BOB, since=NOW - 600),),
    "idle for an unknown time": (idle(A100, BOB),),
    "shared by four": (RESERVED._replace(holders=SHARERS, is_unused=True),),
    "drained": (IDLE_FOR_2H._replace(state=State.DRAINED),),
    "killed": (RESERVED._replace(holders=(LATE._replace(is_dying=True),)),),
    "many": tuple(
        IDLE_FOR_2H._replace(device=A100._replace(index=2 * index)) for index in range(14)
    ),
}


def test_users_to_ask(snapshot: SnapshotAssertion) -> None:
    texts = {name: phrases.plain(contacts.users_to_ask(rows, NOW)) for name, rows in LISTS.items()}
    assert table(texts) == snapshot


KEPT = changed(ALICE, kept_until=NOW + 30, since=NOW - 60)
OWN = {
    "idle for 2 h": (IDLE_FOR_2H,),
    "one of two devices is idle": (IDLE_FOR_2H, RESERVED._replace(device=T4)),
    "idle for less than a minute": (idle(A100, ALICE, since=NOW - 9000, cell=NOW - 59),),
    "reserved for less than ten minutes": (idle(A100, ALICE, since=NOW - 599),),
    "without a name": (idle(A100, a_holder(5, "alice", seen=True), since=NOW - 7200),),
    "of another user": (NEW,),
    "unverified": (idle(A100, a_holder(5, "alice"), since=NOW - 7200),),
    "kept for a restart": (reserved(KEPT),),
    "four": tuple(
        idle(A100, a_holder(pid, "alice", seen=True), since=NOW - 7200) for pid in range(1, 5)
    ),
}


def test_own_reservations(snapshot: SnapshotAssertion) -> None:
    """Only the user who holds a GPU reads how to release it, unless it is a program."""
    texts = {
        name: " | ".join(map(phrases.plain, contacts.own_reservations(rows, NOW, "alice", MAGIC)))
        for name, rows in OWN.items()
    }
    assert table(texts) == snapshot
    (line,) = contacts.own_reservations((IDLE_FOR_2H,), NOW, "alice", SHELL, "ssh lab1 ")
    assert phrases.plain(line).endswith(" ssh lab1 reserve-gpu release 4321000")
    for user, frontend in ((None, MAGIC), ("alice", PROGRAM)):
        assert contacts.own_reservations((IDLE_FOR_2H,), NOW, user, frontend) == []


def leased(**lease: Any) -> Holder:
    """Return a holder that has held a device for two hours, with this lease."""
    return changed(ALICE, since=NOW - 7200, lease=Lease(**lease))


NEXT_FREE = {
    "longest idle": (idle(A100, ALICE, since=NOW - 1800), idle(T4, BOB, since=NOW - 7200)),
    "first to end": (
        reserved(leased(until=NOW + 7200)),
        reserved(leased(until=NOW + 3600), device=T4),
        IDLE_FOR_2H,
    ),
    "overdue": (idle(A100, DAY_LATE, since=NOW - 172800),),
    "past its end": (reserved(leased(until=NOW - 60, if_wanted=True)),),
    "idle limit": (IDLE_FOR_2H._replace(holders=(leased(idle_s=10800.0),)),),
    "kept for a restart": (reserved(KEPT),),
    "one of two ends": (reserved(leased(until=NOW + 60), BOB),),
}


def test_next_free(snapshot: SnapshotAssertion) -> None:
    texts = {name: phrases.plain(contacts.next_free(rows, NOW)) for name, rows in NEXT_FREE.items()}
    assert table(texts) == snapshot


# -- rules -----------------------------------------------------------------------------------------

IDLE_RULE = Rule('idle = "2h"', "[limits]", RULES_FILE, 7200.0)
END_RULE = Rule('after_cuda = "end"', "[limits]", RULES_FILE, 0.0)
ALL_RULES = Rules(
    RULES_FILE, "alice", "Maintenance on Friday\x1b", GPU_RULE, TIME_RULE, IDLE_RULE, END_RULE
)
RULES = {
    "all": ALL_RULES,
    "nothing to end": Rules(RULES_FILE, "alice", gpus=GPU_RULE, after_cuda=END_RULE),
    "problem": Rules(RULES_FILE, "alice", problems=("unknown key 'gpu'",)),
    "drained": Rules(RULES_FILE, "alice", drained=("0", "7", "GPU-")),
}


def test_rules_in_a_status(snapshot: SnapshotAssertion) -> None:
    rows = (free(0), free(1))
    texts = {
        name: " | ".join(map(phrases.plain, [*rule_text.head(rules), *rule_text.foot(rules, rows)]))
        for name, rules in RULES.items()
    }
    assert table(texts) == snapshot


COUNTED = changed(ALICE, label="GPU1")
LIMITED = DeviceStatus(A100, State.LIMITED, rule=GPU_RULE)
LIMITS = {
    "one": (COUNTED,),
    "two": (COUNTED, changed(PART_HOLDER, label="GPU2")),
    "without details": (Holder(),),
    "none": (),
}


def test_limit_that_is_reached(snapshot: SnapshotAssertion) -> None:
    texts = {
        name: rule_text.limited([RESERVED, LIMITED._replace(counted=counted)])
        for name, counted in LIMITS.items()
    }
    assert table(texts) == snapshot


# -- reservations of a user ------------------------------------------------------------------------

MINE = Reserved(changed(ALICE, since=NOW - 7200), (IDLE_FOR_2H,))
OTHER = Reserved(changed(EVAL, since=NOW - 3600, note="thesis"), EVALS)
QUOTED = Reserved(a_holder(17, "alice", "my notes.ipynb", seen=True), (RESERVED,))
EVERY = [MINE, OTHER, QUOTED]
RELEASE = "reserve-gpu release"
LISTED = {
    "ambiguous": reservation_list.ambiguous(EVERY, RELEASE, NOW),
    "nothing held": reservation_list.no_match("x", [], RELEASE, NOW),
    "no match": reservation_list.no_match("x", EVERY, RELEASE, NOW),
    "no match for root": reservation_list.no_match("x", [MINE], RELEASE, NOW, are_own=False),
    "all": reservation_list.no_match("all", [MINE], RELEASE, NOW),
    "on another machine": reservation_list.no_match("lab1:x", [MINE], RELEASE, NOW),
    "join without --": reservation_list.missing_separator(),
    "no response": reservation_list.signal_warning(MINE, Answer.SILENT, 10.0),
    "no request possible": reservation_list.signal_warning(QUOTED, Answer.PROGRAM, 0.5),
    "still in use": "\n".join(
        reservation_list.still_in_use(
            EVERY, [RESERVED, RESERVED._replace(processes=(STRANGER,)), FREE, BUSY]
        )
    ),
}


@pytest.mark.parametrize("text", LISTED.values(), ids=LISTED)
def test_reservations_of_a_user(text: str, snapshot: SnapshotAssertion) -> None:
    assert text == snapshot


@pytest.mark.parametrize("frontend", [SHELL, PROGRAM], ids=["person", "program"])
def test_answers_to_a_release(frontend: Frontend, snapshot: SnapshotAssertion) -> None:
    """A program is told no command that ends a process."""
    texts = {
        answer.name: reservation_list.released(MINE, answer, EVERY, frontend) for answer in Answer
    }
    assert table(texts) == snapshot
