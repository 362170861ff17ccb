"""A reservation that outlives exec: how a process leaves it to the program that it becomes.

The locks stay with the process, as their descriptors stay open over that one exec. All other facts
travel in an environment variable, next to the pid and the start time: another process has only
inherited it. Nothing in it is believed that the kernel does not confirm of the locks.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from reserve_gpu.gpus import cuda_environment
from reserve_gpu.locks import files
from reserve_gpu.locks.directory import LockDirectory, default_path, device_of, lock_name
from reserve_gpu.locks.holders import has_owner, is_sharers
from reserve_gpu.locks.lock import Lock, kernel_device
from reserve_gpu.model import untrusted
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import LockError
from reserve_gpu.model.holders import Record
from reserve_gpu.model.requests import Fact
from reserve_gpu.reservation.holding import Holding, Joined
from reserve_gpu.system import procfs, settings, subprocesses
from reserve_gpu.system.file_control import write_lock

ERRORS = (ValueError, TypeError, KeyError, AttributeError)
LIMIT = 100_000  # characters; the kernel's own limit for one variable is 128 KiB
REASON_LIMIT = 5_000  # characters, each of up to 12 in JSON


class Handover(NamedTuple):
    """What one program leaves to the next in the same process.

    changes: to the CUDA variables.
    reason: why there is no device, if there is none and a person should be told.
    facts: what features leave to themselves there.
    """

    changes: cuda_environment.Changes
    held: Holding
    reason: str | None = None
    facts: Mapping[str, Fact] = {}


def offer(handover: Handover) -> None:
    """Leave it to the program that this process becomes with its next exec."""
    for lock in handover.held.locks.values():
        lock.keep_over_exec()
    pid, _, began = procfs.stamp(os.getpid()).partition(" ")
    fields = {
        "began": int(began) if began else None,  # first: procfs.held_by reads it there
        "before": dict(handover.changes.before),
        "written": dict(handover.changes.written),
        "reason": handover.reason and handover.reason[:REASON_LIMIT],
        **handover.facts,
        **described(handover.held),
    }
    os.environ[settings.HELD] = f"{pid} {json.dumps(fields)}"


def described(held: Holding) -> dict[str, Any]:
    """Return what is held, as JSON takes it."""
    locks = [held.locks[device.uuid] for device in held.devices]
    return {
        "devices": [device._asdict() for device in held.devices],
        "locks": [(lock.descriptor, lock.name, is_sharers(lock.name)) for lock in locks],
        # Older versions do not know of these two.
        "owned": [(own.descriptor, own.name) if (own := lock.owned) else None for lock in locks],
        "taken": [lock.taken for lock in locks],
        "record": Record(terms=held.terms).to_dict(),
        "guest": held.joined,
    }


def follow(module: str, held: Holding, about: Mapping[str, Any], open_files: Sequence[int]) -> None:
    """Leave a process that calls `main` of that module, and follows what this process becomes.

    about: what it gets besides what is held. open_files: descriptors that it keeps. Raises OSError.
    """
    with files.pidfd(os.getpid()) as process:
        told = {"pid": os.getpid(), "process": process, **about, **described(held)}
        subprocesses.leave_to(module, told, (*open_files, process))


def are_locked(about: Mapping[str, Any]) -> bool:
    """Tell whether a process that is followed, or what it has left, still has all the locks."""
    names = [os.path.basename(name) for _, name, _ in about["locks"]]
    with LockDirectory() as directory:
        return directory.are_listed(names, about["pid"])


def held_of(fields: Mapping[str, Any]) -> Holding:
    """Return what was described, without its locks. Raises ERRORS for what makes no sense."""
    joined = fields.get("guest")
    if joined is not None:
        of, name = joined
        joined = Joined(tuple(map(untrusted.number, of)), _text(name))
    terms = Record.from_dict(fields["record"]).terms
    devices = tuple(map(_device, fields["devices"]))
    for device, (_, name, *_) in zip(devices, fields["locks"], strict=True):
        if device_of(os.path.basename(name)) != device_of(lock_name(device.uuid)):
            raise ValueError(name)  # the lock of another device
    return Holding(devices, {}, terms, joined=joined)


def received() -> Handover | None:
    """Return what this process was given; None if there is nothing, or it is not true any more."""
    value = os.environ.get(settings.HELD, "")
    if procfs.held_by() != os.getpid():
        return None
    try:
        handover = _checked(untrusted.parsed(value.partition(" ")[2], LIMIT))
    except (*ERRORS, LockError):
        return None
    if handover and handover.held.devices:
        os.environ[settings.HELD] = procfs.stamp(os.getpid())  # processes below need know no more
    elif handover:
        del os.environ[settings.HELD]
    return handover


def _checked(fields: dict[str, Any]) -> Handover | None:
    nothing = [None] * len(fields["locks"])
    owned, taken = fields.get("owned", nothing), fields.get("taken", nothing)
    known = zip(fields["locks"], owned, taken, strict=True)
    locks = (_adopted_both(lock, own, since) for lock, own, since in known)
    held = held_of(fields).with_locks(locks)
    if held is None:
        return None
    changes = cuda_environment.Changes(_variables(fields["before"]), _variables(fields["written"]))
    reason = _text(fields.pop("reason"))
    facts = {name: fact for name, fact in fields.items() if isinstance(fact, str | float | bool)}
    return Handover(changes, held, reason, facts)


def _device(fields: Mapping[str, Any]) -> Device:
    device = Device(**untrusted.fields_of(Device, fields))
    if fields.items() <= device._asdict().items():
        return device
    raise ValueError(fields)


def _variables(values: Mapping[str, Any]) -> dict[str, str | None]:
    return {name: _text(values[name]) for name in cuda_environment.VARIABLES if name in values}


def _text(value: object) -> str | None:
    return None if value is None else untrusted.text(value, LIMIT)


def _adopted_both(
    lock: Sequence[Any], owned: Sequence[Any] | None, taken: Sequence[Any] | None
) -> Lock | None:
    """Return a lock that this process had before exec, with the lock on its record.

    Args:
        lock: The descriptor and the name of the locked file.
        owned: The same of the file with the record.
        taken: The time of the lock, by both clocks.
    """
    now = procfs.now()
    wall, boot = map(untrusted.number, taken) if taken else now
    since = Instant(wall, min(boot, now.boot))
    descriptor, name, *_ = lock
    adopted = _adopted(descriptor, str(name), since)
    if adopted and owned:
        descriptor, name = owned
        if device_of(str(name)) == device_of(adopted.name):
            adopted.owned = _adopted(descriptor, str(name), since)
    return adopted


def _adopted(descriptor: int, name: str, taken: Instant) -> Lock | None:
    """Return the lock that this process had before exec; None if it is not that.

    Only the kernel is believed: the descriptor is open, its file is the one of that name, and this
    very opening of the file has it locked. From now on it is closed in forks and over exec.
    """
    path = os.path.join(default_path(), os.path.basename(name))
    with suppress(OSError, OverflowError, ValueError, TypeError):
        is_that_file = files.is_current(files.NONE, path, descriptor)
        if not is_that_file or kernel_device(descriptor) is None:
            return None
        files.adopt(descriptor)
        lock = Lock(descriptor, path, taken)
        lock.is_write_locked = has_owner(lock.name) and write_lock(descriptor)
        return lock
    return None
