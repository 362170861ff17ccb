"""The variable RESERVE_GPU_HELD is believed only if the kernel confirms it."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager, suppress
from fcntl import F_ADD_SEALS, LOCK_EX, LOCK_NB, fcntl, flock
from typing import TYPE_CHECKING, Any

import pytest

from reserve_gpu.reservation import exec_handover
from reserve_gpu.system import procfs
from reserve_gpu.system.file_control import SEALS
from tests.support.locked import have

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.here import Here


DEVICE = {"index": 0, "uuid": "GPU-x"}


def handover(**changes: Any) -> dict[str, Any]:
    """Return the data with which a process hands GPU-x over to its next program.

    In the variable, PID is the pid of the process, "LOCK" a descriptor of the locked GPU-x.lock,
    "FREE" another descriptor of this file, and "OTHER" a descriptor of another locked file.
    """
    return {
        "before": {}, "written": {}, "record": {}, "reason": None,
        "devices": [DEVICE], "locks": [["LOCK", "GPU-x.lock"]], **changes,
    }  # fmt: skip


GENUINE = f"PID {json.dumps(handover())}"
INVALID = {
    "closed": handover(locks=[[999, "GPU-x.lock"]]),
    "another file": handover(locks=[["OTHER", "GPU-x.lock"]]),
    "not locked": handover(locks=[["FREE", "GPU-x.lock"]]),
    "enormous": handover(locks=[[1 << 80, "GPU-x.lock"]]),
    "other lengths": handover(locks=[]),
    "another field": handover(devices=[DEVICE | {"nonsense": 1}]),
    "huge": handover(record={"note": "x" * 110_000}),
}
FORGERIES = {name: f"PID {json.dumps(fields)}" for name, fields in INVALID.items()} | {
    "deep": "PID " + "[" * 50_000,
    "another pid": f"1 {json.dumps(handover())}",
    "an earlier process": f"PID {json.dumps({'began': 1, **handover()})}",
    "surrogates": "PID \udcff\udcfe",
}


@contextmanager
def variable(here: Here, text: str) -> Iterator[None]:
    """Set the variable, and lock GPU-x.lock and other.lock in this process."""
    here.locks.mkdir(mode=0o1777)
    paths = [here.locks / name for name in ("GPU-x.lock", "GPU-x.lock", "other.lock")]
    files = [os.open(path, os.O_RDWR | os.O_CREAT, 0o666) for path in paths]
    lock, _, other = files
    for file in (lock, other):
        flock(file, LOCK_EX | LOCK_NB)
    for name, file in zip(("LOCK", "FREE", "OTHER"), files, strict=True):
        text = text.replace(f'"{name}"', str(file))
    os.environ["RESERVE_GPU_HELD"] = text.replace("PID", str(os.getpid()))
    try:
        yield
    finally:
        del os.environ["RESERVE_GPU_HELD"]
        for file in files:
            with suppress(OSError):  # adopted, and closed already
                os.close(file)


def test_confirmed_reservation_is_adopted(here: Here) -> None:
    with variable(here, GENUINE):
        received = exec_handover.received()
        assert received
        assert [device.uuid for device in received.held.devices] == ["GPU-x"]
        received.held.locks["GPU-x"].release()


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_is_ignored(here: Here, name: str) -> None:
    with variable(here, FORGERIES[name]):
        assert exec_handover.received() is None


def memory_file(text: str, seals: int) -> int:
    """Return the descriptor of a file in memory that contains the text."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(descriptor, text.encode())
    fcntl(descriptor, F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(("seals", "is_read"), [(SEALS, True), (0, False)])
def test_only_a_sealed_file_is_read(here: Here, *, seals: int, is_read: bool) -> None:
    """A file that can still be changed is neither read nor closed, even if its content is valid."""
    with variable(here, GENUINE):
        data = os.environ["RESERVE_GPU_HELD"].partition(" ")[2]
        descriptor = memory_file(data, seals)
        os.environ["RESERVE_GPU_HELD"] = f"{procfs.stamp(os.getpid())} {descriptor}"
        assert (exec_handover.received() is not None) == is_read
    assert os.path.exists(f"/proc/self/fd/{descriptor}") != is_read


@pytest.mark.parametrize("descriptor", ["0", "9" * 30, "x"])
def test_other_descriptor_is_ignored(here: Here, descriptor: str) -> None:
    """A descriptor that is not of a sealed file in memory is ignored."""
    with variable(here, f"{procfs.stamp(os.getpid())} {descriptor}"):
        assert exec_handover.received() is None


@pytest.mark.parametrize("is_absolute", [False, True])
def test_lock_outside_the_lock_directory_is_ignored(here: Here, *, is_absolute: bool) -> None:
    path = here.folder / "elsewhere.lock"
    name = str(path) if is_absolute else f"../{path.name}"
    with have(path) as file:
        fields = handover(locks=[[file, name]])
        with variable(here, f"PID {json.dumps(fields)}"):
            assert exec_handover.received() is None


def test_lock_of_another_file_description_is_ignored(here: Here) -> None:
    """A descriptor of a lock file that another open file description has locked is ignored."""
    uuid = here.uuid("0")
    with here.rival("0"):
        file = os.open(here.locks / f"{uuid}.lock", os.O_RDWR)
        fields = handover(devices=[{"index": 0, "uuid": uuid}], locks=[[file, f"{uuid}.lock"]])
        os.environ["RESERVE_GPU_HELD"] = f"{os.getpid()} {json.dumps(fields)}"
        assert exec_handover.received() is None
        os.close(file)
