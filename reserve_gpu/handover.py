"""A reservation that outlives exec: how a process leaves it to the program that it becomes.

The locks stay with the process, as their descriptors stay open over that one exec. What else there
is to know travels in an environment variable, beside the pid: a process with another pid has only
inherited it. Nothing in it is believed that the kernel does not confirm of the locks.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from reserve_gpu import cuda, descriptors, files, processes, witness
from reserve_gpu.descriptors import NONE
from reserve_gpu.device import Device, Value
from reserve_gpu.errors import LockError
from reserve_gpu.files import file_name
from reserve_gpu.locks import Lock
from reserve_gpu.myself import TEXT_LIMIT, held_by
from reserve_gpu.settings import HELD, default_path

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT = 100_000  # characters; the kernel's own limit for one variable is 128 KiB
MOST_REASON = 5_000  # characters, each of up to 12 in JSON
NUMBERS = {"index", "memory_mib", "link_width", "instance"}  # of a device; the rest is text


class Handover(Value):
    """What one program leaves to the next in the same process.

    before, written: the CUDA variables before anything was reserved, and those that were set.
    locks: what holds the devices, by UUID.
    reason: why there is no device, if there is none and a person should be told.
    """

    before: Mapping[str, str | None]
    written: Mapping[str, str | None]
    devices: tuple[Device, ...] = ()
    locks: Mapping[str, Lock] = {}
    note: str | None = None
    reason: str | None = None


def offer(what: Handover) -> None:
    """Leave it to the program that this process becomes with its next exec."""
    for lock in what.locks.values():
        lock.keep_over_exec()
    told = {
        "before": dict(what.before),
        "written": dict(what.written),
        "devices": [_told(device) for device in what.devices],
        "locks": [_numbers(what.locks[device.uuid]) for device in what.devices],
        "note": what.note and what.note[:TEXT_LIMIT],
        "reason": what.reason and what.reason[:MOST_REASON],
    }
    os.environ[HELD] = f"{os.getpid()} {json.dumps(told)}"


def received() -> Handover | None:
    """What this process was given; None, without a word, if that is not so or not true any more."""
    value = os.environ.get(HELD, "")
    if held_by() != os.getpid() or len(value) > LIMIT:
        return None
    try:
        found = _checked(json.loads(value.partition(" ")[2]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, LockError):
        return None
    if found:
        _settle(found)
    return found


def _settle(found: Handover) -> None:
    """Leave of the variable what processes below this one need: who holds their GPUs."""
    if found.devices:
        os.environ[HELD] = str(os.getpid())
    else:
        del os.environ[HELD]


def _checked(told: Mapping[str, Any]) -> Handover | None:
    devices = tuple(_device(fields) for fields in told["devices"])
    locks: dict[str, Lock] = {}
    for device, (descriptor, number, shared) in zip(devices, told["locks"], strict=True):
        path = f"{default_path()}/{file_name(device.uuid, shared=shared)}"
        lock = _adopt(descriptor, path, shared=shared, witness_number=number)
        if lock is None:
            return None
        locks[device.uuid] = lock
    before, written = _variables(told["before"]), _variables(told["written"])
    return Handover(before, written, devices, locks, _text(told["note"]), _text(told["reason"]))


def _numbers(lock: Lock) -> tuple[int, int, bool]:
    return lock.descriptor, lock.witness, lock.shared


def _told(device: Device) -> dict[str, Any]:
    return {name: value for name, value in device.__dict__.items() if value is not None}


def _device(fields: Mapping[str, Any]) -> Device:
    """The device that was written down. Raises TypeError for what can't be one."""
    for name, value in fields.items():
        if value is None and name not in ("index", "uuid"):
            continue
        if type(value) is not (int if name in NUMBERS else str):
            raise TypeError(name)
    return Device(**fields)


def _variables(values: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: _text(values[name]) for name in cuda.VARIABLES if name in values}


def _text(value: object) -> str | None:
    if not isinstance(value, str | None):
        raise TypeError(value)
    return value


def _adopt(descriptor: int, path: str, *, shared: bool, witness_number: int = NONE) -> Lock | None:
    """The lock that this process had before exec made it another program; None if it is not that.

    Only the kernel is believed: the descriptor is open, its file is the one at the path, and this
    very opening of the file has it locked. From now on it is closed in forks and over exec.
    """
    with suppress(OSError, OverflowError, ValueError):
        there = files.identity(os.stat(path, follow_symlinks=False))
        is_there = files.identity(os.fstat(descriptor)) == there
        if not is_there or not _has_locked(descriptor, shared=shared):
            return None
        if witness_number != NONE and not witness.is_bound(witness_number, path, shared=shared):
            witness_number = NONE
        record = {} if shared else processes.record(descriptor)
        for number in {descriptor, witness_number} - {NONE}:
            descriptors.adopt(number)
        since = processes.merge(record, None).since
        return Lock(descriptor, path, shared=shared, witness=witness_number, since=since)
    return None


def _has_locked(descriptor: int, *, shared: bool) -> bool:
    """Whether this opening of the file, not another one, has it locked.

    `lock: 1: FLOCK ADVISORY WRITE 4321 00:19:47 0 EOF`: Documentation/filesystems/proc.rst.
    """
    kind = ["FLOCK", "ADVISORY", "READ" if shared else "WRITE"]
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="utf-8") as info:
        return any(line.startswith("lock:") and line.split()[2:5] == kind for line in info)
