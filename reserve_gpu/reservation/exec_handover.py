"""Hand over a reservation from one program to the next when a process calls exec.

The lock files' descriptors stay open across that one exec, so the process keeps its locks. So does
an anonymous file in memory with all other data; no other user can open it. An environment variable
contains the process's pid and start time, so that child processes ignore it, and the descriptor of
this file. Nothing that the data says about the locks is trusted unless the operating system
confirms it.
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
from reserve_gpu.locks.lock import HIGH, Lock, kernel_device
from reserve_gpu.model import untrusted
from reserve_gpu.model.clocks import Instant
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import LockError
from reserve_gpu.model.holders import Record
from reserve_gpu.model.requests import Fact
from reserve_gpu.reservation.holding import Holding, Joined
from reserve_gpu.system import procfs, settings, subprocesses
from reserve_gpu.system.file_control import is_sealed, sealed_file, write_lock
from reserve_gpu.system.forks import no_fork

ERRORS = (ValueError, TypeError, KeyError, AttributeError)  # raised for invalid handover data
LIMIT = 100_000  # maximum handover data length in characters; Linux allows 128 KiB per variable
REASON_LIMIT = 5_000  # maximum length of the reason; one character can become 12 in JSON


class Handover(NamedTuple):
    """The data that one program hands over to the next program in the same process.

    Attributes:
        changes: The changes to the environment variables.
        held: The reservation; it has no devices if nothing is reserved.
        reason: The explanation to show to the user if no device is held, or None.
        facts: Values that features pass to the next program.
    """

    changes: cuda_environment.Changes
    held: Holding
    reason: str | None = None
    facts: Mapping[str, Fact] = {}


def offer(handover: Handover) -> None:
    """Pass the data to the program that this process will run after its next exec."""
    for lock in handover.held.locks.values():
        lock.keep_over_exec()
    stamp = procfs.stamp(os.getpid())
    pid, _, began = stamp.partition(" ")
    fields = {
        # procfs.reservation_pid reads the first field if the variable contains all data.
        "began": int(began) if began else None,
        "before": dict(handover.changes.before),
        "written": dict(handover.changes.written),
        "reason": handover.reason and handover.reason[:REASON_LIMIT],
        **handover.facts,
        **serialize(handover.held),
    }
    data = json.dumps(fields)
    descriptor = _store(data) if began else None
    os.environ[settings.HELD] = f"{pid} {data}" if descriptor is None else f"{stamp} {descriptor}"


def _store(data: str) -> int | None:
    """Write data to a file in memory that the next program inherits.

    Returns:
        The file's descriptor, or None if such files are not available.
    """
    with no_fork, suppress(OSError, AttributeError):
        descriptor = sealed_file(data.encode(), HIGH)
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional-only
        return descriptor
    return None


def _stored(value: str) -> str:
    """Return the data of the process that set the variable, and close the file that contains it.

    Args:
        value: The variable, after the pid: the data, or the start time and a descriptor.
    """
    descriptor = value.partition(" ")[2]
    if value.startswith("{") or not descriptor.isdecimal():
        return value
    # The number can belong to another file if the program in between has closed all files. Such a
    # file is not sealed, so it is left alone.
    with no_fork, suppress(OSError, OverflowError, AttributeError):
        if is_sealed(int(descriptor)):
            with open(int(descriptor), "rb") as file:
                return os.pread(file.fileno(), LIMIT + 1, 0).decode(errors="replace")
    return ""


def serialize(held: Holding) -> dict[str, Any]:
    """Return the reservation as values that JSON can represent."""
    locks = [held.locks[device.uuid] for device in held.devices]
    return {
        "devices": [device._asdict() for device in held.devices],
        "locks": [(lock.descriptor, lock.name, is_sharers(lock.name)) for lock in locks],
        # Older versions don't write the next two fields.
        "owned": [(own.descriptor, own.name) if (own := lock.owned) else None for lock in locks],
        "taken": [lock.taken for lock in locks],
        "record": Record(terms=held.terms).to_dict(),
        "guest": held.joined,
    }


def start_follower(
    module: str, held: Holding, about: Mapping[str, Any], open_files: Sequence[int]
) -> None:
    """Start a process that runs a module's `main` and monitors this process after an exec.

    Args:
        module: The module's name.
        held: The reservation of this process.
        about: Additional data for the module's `main`.
        open_files: The descriptors that the new process keeps open.

    Raises:
        OSError: The process can't be started.
    """
    with files.pidfd(os.getpid()) as process:
        data = {"pid": os.getpid(), "process": process, **about, **serialize(held)}
        subprocesses.start_background_module(module, data, (*open_files, process))


def are_still_locked(about: Mapping[str, Any]) -> bool:
    """Return whether the monitored process or its descendants still hold all the locks."""
    names = [os.path.basename(name) for _, name, _ in about["locks"]]
    with LockDirectory() as directory:
        return directory.are_listed(names, about["pid"])


def deserialize(fields: Mapping[str, Any]) -> Holding:
    """Rebuild a reservation, without its locks, from the result of `serialize`.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: The data is invalid.
    """
    joined = fields.get("guest")
    if joined is not None:
        of, name = joined
        joined = Joined(tuple(map(untrusted.number, of)), _text(name))
    terms = Record.from_dict(fields["record"]).terms
    devices = tuple(map(_device, fields["devices"]))
    for device, (_, name, *_) in zip(devices, fields["locks"], strict=True):
        if device_of(os.path.basename(name)) != device_of(lock_name(device.uuid)):
            raise ValueError(name)  # the lock file belongs to another device
    return Holding(devices, {}, terms, joined=joined)


def received() -> Handover | None:
    """Return the data that was handed over to this process, or None if there is no valid data.

    After reading the data, this function deletes the environment variable. If devices are held, it
    keeps this process's pid and start time in the variable.
    """
    value = os.environ.get(settings.HELD, "")
    if procfs.reservation_pid() != os.getpid():
        return None
    try:
        handover = _checked(untrusted.parsed(_stored(value.partition(" ")[2]), LIMIT))
    except (*ERRORS, LockError):
        return None
    if handover and handover.held.devices:
        os.environ[settings.HELD] = procfs.stamp(os.getpid())  # all that child processes need
    elif handover:
        del os.environ[settings.HELD]
    return handover


def _checked(fields: dict[str, Any]) -> Handover | None:
    missing = [None] * len(fields["locks"])
    owned, taken = fields.get("owned", missing), fields.get("taken", missing)
    entries = zip(fields["locks"], owned, taken, strict=True)
    locks = (_adopted_with_record(lock, record, since) for lock, record, since in entries)
    held = deserialize(fields).with_locks(locks)
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


def _adopted_with_record(
    lock: Sequence[Any], owned: Sequence[Any] | None, taken: Sequence[Any] | None
) -> Lock | None:
    """Return a lock that this process held before exec, with the lock on the record file, if any.

    Args:
        lock: The locked file's descriptor and name.
        owned: The record file's descriptor and name; None if the record is in the locked file.
        taken: When the lock was acquired, by the wall clock and the boot clock; None if unknown.
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
    """Return a lock that this process held before exec, or None if it no longer holds the lock.

    The operating system must confirm that the descriptor is open, that its file has the given name,
    and that its file description holds the lock. The descriptor is then set to close on the next
    exec and in forked children.
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
