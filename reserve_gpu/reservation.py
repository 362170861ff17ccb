"""The order of things: read the machine, decide, hold the lock, check again, set the environment.

The one piece of state that a process has, the reservation that it holds, is here.
"""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reserve_gpu import choosing, cuda, fence, processes, report, settings
from reserve_gpu.claim import Claim
from reserve_gpu.errors import NoFreeDeviceError, RequestError, ReserveGPUWarning, TooLateError
from reserve_gpu.locks import LockDirectory
from reserve_gpu.nvml import Nvml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from reserve_gpu.device import Device, Request
    from reserve_gpu.locks import Lock


class Reservation:
    """Devices that this process holds; a context manager that lets go of them at the end.

    devices: in the order in which CUDA numbers them in this process.
    environ: the variables that were set for them.
    """

    def __init__(self, devices: Sequence[Device], locks: Mapping[str, Lock], environ: Mapping[str, str]):
        self.devices = tuple(devices)
        self.environ = dict(environ)
        self._locks = dict(locks)  # by UUID
        self._users = 1  # reserve() calls that were answered with this one

    def release(self) -> None:
        """Let go of the devices and give the variables the values that they had before."""
        own = _own()
        if own.reservation is self:
            own.reservation = None
            own.restore_environment()
        for lock in self._locks.values():
            lock.release()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._users -= 1
        if not self._users:  # else somebody further out asked first, and still uses it
            self.release()

    def __repr__(self) -> str:
        return f"<Reservation of {report.labels(self.devices)}>"

    def __str__(self) -> str:
        return report.reserved(self.devices, self.environ)


@dataclass
class _Own:
    """What this process holds, and what it did to its environment."""

    pid: int = field(default_factory=os.getpid)
    turn: threading.RLock = field(default_factory=threading.RLock)
    reservation: Reservation | None = None
    before: dict[str, str | None] = field(default_factory=dict)
    written: dict[str, str | None] = field(default_factory=dict)

    def outside_environment(self) -> dict[str, str | None]:
        """The variables as somebody outside of this extension set them."""
        now = cuda.read()
        return {
            name: self.before[name] if name in self.written and self.written[name] == value else value
            for name, value in now.items()
        }

    def set_environment(self, values: Mapping[str, str | None]) -> None:
        self.before = self.outside_environment()
        cuda.write(values)
        self.written = dict(values)

    def restore_environment(self) -> None:
        cuda.write(self.outside_environment())
        self.written = {}


_process = _Own()


def _own() -> _Own:
    """The state of this very process: a forked child holds nothing of its parent's."""
    global _process
    if _process.pid != os.getpid():
        _process = _Own()
    return _process


def reserve(devices: str | int | Iterable[str | int] | None = None, *, count: int = 1) -> Reservation:
    """Reserve GPUs for this process and set the CUDA variables for whatever it starts next.

    devices: the ones to take, by index, UUID or its unique prefix, MIG instance (`1:0`) or PCI bus id,
        one or several, in this order; None for the first that are free.
    count: how many, where none are named.

    A process has one reservation. Asking again for what it already holds changes nothing.
    Raises RequestError, TooLateError, NoFreeDeviceError, DriverError, LockError. A ReserveGPUWarning
    tells that a named device is in use by somebody who has not reserved it.
    """
    request = choosing.request(devices, count)
    idle_mib = settings.idle_mib()
    own = _own()
    with own.turn:
        held = current()
        if held and choosing.satisfies(held.devices, request):
            held._users += 1
            return held
        cuda.remember_over_fork()
        if cuda.started():
            raise TooLateError(report.too_late(held.devices if held else ()))
        with Nvml() as nvml, LockDirectory() as directory:
            claim = Claim(nvml, directory, held._locks if held else {}, idle_mib)
            _take(own, claim, request, nvml, directory)
            reservation = _settle(own, claim)
    for warning in claim.warnings:
        warnings.warn(warning, ReserveGPUWarning, stacklevel=2)
    return reservation


def current() -> Reservation | None:
    """The reservation that this process holds, if any."""
    held = _own().reservation
    return held if held and all(lock.held() for lock in held._locks.values()) else None


def release() -> tuple[Device, ...]:
    """Let go of what this process holds; returns the devices that it let go of.

    The variables get back the values that they had before, also where a failure had emptied
    `CUDA_VISIBLE_DEVICES`.
    """
    own = _own()
    held = own.reservation
    if held is None:
        own.restore_environment()
        return ()
    held.release()
    return held.devices


def _take(own: _Own, claim: Claim, request: Request, nvml: Nvml, directory: LockDirectory) -> None:
    """Take the devices, or say why that can't be and leave this process without any."""
    outside = own.outside_environment()
    if request.devices:
        candidates = iter(fence.named(nvml, request.devices, outside))
    else:
        candidates = fence.inside(nvml, outside)
    with directory.mutex(processes.me()):
        if claim.take(candidates, request.count, named=bool(request.devices)):
            return
    if claim.refusals and request.count > len(claim.refusals):
        raise RequestError(report.too_many(request.count, len(claim.refusals)))
    held = current()
    if not held:
        own.set_environment(cuda.NO_DEVICES)
    kept = held.devices if held else ()
    value = outside[cuda.VISIBLE]
    raise NoFreeDeviceError(report.nothing_free(claim.refusals, request.count, kept, value))


def _settle(own: _Own, claim: Claim) -> Reservation:
    """Make the claim this process's reservation: set the environment, sign the locks, let go of the rest."""
    previous = own.reservation
    values = cuda.variables(claim.devices)
    set_values = {name: value for name, value in values.items() if value is not None}
    own.reservation = Reservation(claim.devices, claim.locks, set_values)
    own.set_environment(values)
    for lock in claim.locks.values():
        lock.write(processes.me())
    if previous:
        for uuid, lock in previous._locks.items():
            if uuid not in claim.locks:
                lock.release()
    return own.reservation
