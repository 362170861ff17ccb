"""The result of a request, and warnings about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from reserve_gpu.features.lease import lease_notices
from reserve_gpu.model import errors
from reserve_gpu.model.devices import Device, Process, State, Usage
from reserve_gpu.model.holders import DeviceStatus
from reserve_gpu.model.progress import Slow
from reserve_gpu.model.requests import Lease, Request, ReservationTerms, Size
from reserve_gpu.render import durations, messages, notices, phrases
from reserve_gpu.render.frontends import MAGIC, PYTHON, SHELL
from reserve_gpu.reservation.session import Reservation
from reserve_gpu.system import executor, settings
from tests.support.pictures import (
    A100,
    COMPUTED_ON,
    EMPTY,
    EXCLUSIVE,
    NOW,
    PAST,
    T4,
    TEN_GB,
    TIME_RULE,
    UNNAMED,
    table,
)
from tests.support.pictures import PYTHON as PYTHON_PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syrupy.assertion import SnapshotAssertion


VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
DIRECTORY, LOCK_FILE = "/run/lock/reserve_gpu", "/run/lock/reserve_gpu/a.lock"


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
    *lease_notices.OVER, lease_notices.JOB_OVER,
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
