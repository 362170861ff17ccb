"""The order of things: read the machine, decide, hold the lock, check again, set the environment.

The one piece of state that a process has, the reservation that it holds, is here.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from reserve_gpu import choosing, cuda, fence, line, processes, report, settings
from reserve_gpu.claim import Claim
from reserve_gpu.device import Holder, Wait
from reserve_gpu.errors import (
    ImpossibleError,
    LockError,
    MutexHeldError,
    NoFreeDeviceError,
    RequestError,
    ReserveGPUWarning,
    TooLateError,
    WaitTimeoutError,
)
from reserve_gpu.locks import LockDirectory, close_strays, file_name
from reserve_gpu.nvml import Nvml
from reserve_gpu.places import default_path, is_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from reserve_gpu.device import Device, Fault, Request
    from reserve_gpu.locks import Lock
    from reserve_gpu.names import DeviceNames


POLL_S = 0.2  # between two looks of a waiter
Variables: TypeAlias = "tuple[dict[str, str | None], dict[str, str | None], dict[str, str | None]]"


class Reservation:
    """Devices that this process holds; a context manager that lets go of them at the end.

    devices: in the order in which CUDA numbers them in this process.
    environ: the variables that were set for them.
    locks: what holds them, by UUID.
    note: what others read beside them.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        locks: Mapping[str, Lock],
        environ: Mapping[str, str],
        note: str | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self.environ = dict(environ)
        self.locks = dict(locks)
        self.note = note
        # Which threads were answered with this one and may still want it, and which of them are in
        # a `with` block: its end is the end of the reservation, unless another one has it too.
        self._answered = [threading.get_ident()]
        self._inside: list[int] = []

    def release(self) -> None:
        """Let go of the devices and give the variables the values that they had before."""
        own = _own()
        with own.turn:
            if own.reservation is self:
                own.restore_environment()
            for lock in self.locks.values():
                lock.release()
            if own.reservation is self:
                own.reservation = None
            close_strays(own.held_locks())

    def again(self, note: str | None) -> Reservation:
        """Answer one more call with this reservation; only a new note changes anything."""
        if threading.get_ident() not in self._inside:
            self._answered.append(threading.get_ident())
        if note is not None:
            self.note = note
            self.sign()
        return self

    def hand_over(self, taken: Mapping[str, Lock]) -> None:
        """Let go of what the next reservation has not taken, and be none any more."""
        for uuid, lock in self.locks.items():
            if taken.get(uuid) is not lock:
                lock.release()
        self.locks = {}

    def sign(self) -> None:
        """Write into the locks who holds them."""
        for lock in self.locks.values():
            lock.write(processes.me(self.note))

    def __enter__(self) -> Self:
        with _own().turn:
            if current() is not self:
                raise RequestError("This reservation has been released; ask for another one.")
            thread = threading.get_ident()
            if thread in self._answered:
                self._answered.remove(thread)
            self._inside.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with _own().turn:
            thread = threading.get_ident()
            self._inside.remove(thread if thread in self._inside else self._inside[-1])
            if not self._inside and not self._answered:
                self.release()

    def __repr__(self) -> str:
        return f"<Reservation of {report.labels(self.devices)}>"

    def __str__(self) -> str:
        return report.reserved(self.devices, self.environ)


class _Own:
    """What this process holds, and what it did to its environment."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.turn = threading.RLock()
        self.reservation: Reservation | None = None
        self.before: dict[str, str | None] = {}
        self.written: dict[str, str | None] = {}

    def outside_environment(self) -> dict[str, str | None]:
        """The variables as somebody outside of this extension set them."""
        now = cuda.read()
        return {
            name: self.before[name]
            if name in self.written and self.written[name] == value
            else value
            for name, value in now.items()
        }

    def variables(self) -> Variables:
        """What the variables are and were, for go_back."""
        return self.before, self.written, cuda.read()

    def go_back(self, variables: Variables) -> None:
        self.before, self.written, values = variables
        cuda.write(values)

    def held_locks(self) -> list[Lock]:
        return list(self.reservation.locks.values()) if self.reservation else []

    def set_environment(self, values: Mapping[str, str | None]) -> None:
        self.before = self.outside_environment()
        self.written = dict(values)  # first: interrupted here, what is not yet written is not ours
        cuda.write(values)

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


def reserve(  # noqa: PLR0913 - all but the first are keywords
    devices: DeviceNames | None = None,
    *,
    count: int | None = None,
    min_memory: float | str | None = None,
    name: str | None = None,
    exclude: DeviceNames = (),
    wait: float | str | None = None,
    share: bool = False,
    note: str | None = None,
    progress: Callable[[Wait], object] = repr,
) -> Reservation:
    """Reserve GPUs for this process and set the CUDA variables for whatever it starts next.

    devices: the ones to take, one or several, in this order, by index, UUID or its unique prefix,
        MIG instance (`1:0`) or PCI bus id; None for the first that are free.
    count: how many, where none are named; 1 by default.
    min_memory: total memory of each, in MiB or as `16GB`, `16GiB`.
    name: text that the name of each must contain, in upper or lower case.
    exclude: devices that will not do.
    wait: for how long to wait in line for them, in seconds or as `90s`, `10m`, `2h`; True for ever.
    share: also take what others use or hold, if nothing else is to be had or if it is named.
    note: a line for others to read.
    progress: called now and then while this waits.

    A process has one reservation. Asking again for what it already holds changes nothing.
    Raises RequestError, TooLateError, NoFreeDeviceError (WaitTimeoutError after a wait),
    DriverError, LockError. A ReserveGPUWarning tells that somebody else uses a device that was
    named or shared.
    """
    request = choosing.request(
        devices,
        count=count,
        min_memory=min_memory,
        name=name,
        exclude=exclude,
        share=share,
        note=note,
    )
    wait_s = None if wait is None else choosing.parse_duration(wait)
    own = _own()
    with own.turn:
        try:
            held = current()
            is_shared = any(lock.shared for lock in own.held_locks())
            if held and choosing.satisfies(held.devices, request, shared=is_shared):
                _renew(held)
                _set_again(held)
                return held.again(request.note)
            cuda.remember_over_fork()
            if cuda.started():
                raise TooLateError(report.too_late(held.devices if held else ()))
            reservation, claim = _claim(own, request, held, wait_s, progress)
        finally:
            close_strays(own.held_locks())
    said = list(claim.warnings.values())
    if is_private(directory := default_path()):
        said.append(report.private(directory))
    try:
        for text in said:
            warnings.warn(text, ReserveGPUWarning, stacklevel=2)
    except ReserveGPUWarning:  # where warnings are errors nobody gets to know of the reservation
        reservation.release()
        raise
    return reservation


def current() -> Reservation | None:
    """The reservation that this process holds, if any."""
    held = _own().reservation
    return held if held and all(lock.held() for lock in held.locks.values()) else None


def release() -> tuple[Device, ...]:
    """Let go of what this process holds; returns the devices that it let go of.

    The variables get back the values that they had before, also where a failure had emptied
    `CUDA_VISIBLE_DEVICES`.
    """
    own = _own()
    with own.turn:
        held = own.reservation
        if held is None:
            own.restore_environment()
            return ()
        held.release()
        return held.devices


def go_without() -> None:
    """Leave this process, which holds nothing, without any GPU that it could use by mistake."""
    own = _own()
    if not current():
        own.set_environment(cuda.NO_DEVICES)


def _set_again(held: Reservation) -> None:
    """Mend the variables, if somebody has changed them since, as long as CUDA will read them."""
    expected = {name: held.environ.get(name) for name in cuda.VARIABLES}
    changed = cuda.read()
    if changed == expected:
        return
    is_late = cuda.started()
    if not is_late:
        cuda.write(expected)
    visible = changed[cuda.VISIBLE]
    warnings.warn(report.changed(visible, held.devices, is_late=is_late), ReserveGPUWarning, 3)


def _renew(held: Reservation) -> None:
    """Lock again what somebody deleted the lock file of: where others look, the device seems free.

    Raises LockError if another process has reserved it meanwhile.
    """
    if all(lock.stands() for lock in held.locks.values()):
        return
    with LockDirectory() as directory, directory.mutex():
        for device in held.devices:
            lock = held.locks[device.uuid]
            if lock.stands():
                continue
            name = file_name(device.uuid, shared=lock.shared)
            found = directory.acquire(name, shared=lock.shared)
            if isinstance(found, Holder):
                raise LockError(report.lost(device, lock.path, found))
            held.locks[device.uuid] = found
            lock.release()
    held.sign()


def _claim(
    own: _Own,
    request: Request,
    held: Reservation | None,
    wait_s: float | None,
    progress: Callable[[Wait], object],
) -> tuple[Reservation, Claim]:
    """Make a claim this process's reservation, or say why there is none to be had."""
    outside, previous, variables = own.outside_environment(), own.reservation, own.variables()
    idle_mib = settings.idle_mib()
    with Nvml() as nvml, LockDirectory() as directory:
        claim = Claim(nvml, directory, request, _standing(held, directory), idle_mib)
        try:
            seen: list[Device | Fault] = []
            if _take(claim, fence.candidates(nvml, request, outside), seen):
                return _settle(own, claim), claim
            may_wait = choosing.may_come_free(claim.refusals, request) and wait_s is not None
            if may_wait and _wait(claim, directory, seen, wait_s or 0.0, progress):
                return _settle(own, claim), claim
            claim.explain()
        except BaseException as error:
            if own.reservation is previous:
                claim.undo()
                own.go_back(variables)
            if isinstance(error, KeyboardInterrupt) and wait_s is not None:
                go_without()
            raise
    visible = outside[cuda.VISIBLE]
    if reason := choosing.impossible(claim.refusals, request):
        raise ImpossibleError(" ".join([reason, *report.limit(visible, len(claim.refusals))]))
    if request.exclude and not claim.refusals:
        raise ImpossibleError("Every GPU that this process may use is excluded.")
    go_without()
    kept = held.devices if held else ()
    text = report.nothing_free(claim.refusals, request.count, kept, visible)
    if wait_s is not None and claim.ticket:
        raise WaitTimeoutError(f"Waited for {report.duration(wait_s)}. {text}")
    raise NoFreeDeviceError(text)


def _take(claim: Claim, candidates: Iterator[Device | Fault], seen: list[Device | Fault]) -> bool:
    """Try the candidates, one by one where the first will do, else all of them together.

    A candidate is touched here, outside of the mutex: that may take seconds, which others need not
    wait for. seen: is given all that were touched.
    """
    one_by_one = choosing.first_will_do(claim.request)
    for one in candidates:
        seen.append(one)
        if one_by_one and claim.take([one]):
            return True
    return not one_by_one and claim.take(seen)


def _wait(
    claim: Claim,
    directory: LockDirectory,
    candidates: Sequence[Device | Fault],
    limit_s: float,
    progress: Callable[[Wait], object],
) -> bool:
    """Stand in line until the claim can be taken, True, or the time is over, False."""
    wants = claim.usable()
    lock, claim.ticket = line.join(directory, wants, processes.me(claim.request.note))
    try:
        start = time.monotonic()
        while True:
            claim.begin()
            with suppress(MutexHeldError):  # another's driver hangs, perhaps not for ever
                if claim.take(candidates):
                    return True
            waited_s = time.monotonic() - start
            if waited_s >= limit_s:
                return False
            place = 1 + sum(not ticket.wants.isdisjoint(wants) for ticket in claim.ahead)
            progress(Wait(claim.request, place, waited_s, tuple(claim.refusals)))
            time.sleep(min(POLL_S, limit_s - waited_s))
    finally:
        lock.release()


def _standing(held: Reservation | None, directory: LockDirectory) -> dict[str, Lock]:
    """The locks of this process that others respect: not deleted, and in the directory of now."""
    return {
        uuid: lock
        for uuid, lock in (held.locks if held else {}).items()
        if lock.stands() and os.path.dirname(lock.path) == directory.path
    }


def _settle(own: _Own, claim: Claim) -> Reservation:
    """Set the variables for what was claimed, and let go of what was held before."""
    before = own.reservation
    values = cuda.variables(claim.devices)
    environ = {name: value for name, value in values.items() if value is not None}
    own.set_environment(values)
    own.reservation = Reservation(claim.devices, claim.locks, environ, claim.request.note)
    if before:
        before.hand_over(claim.locks)
    return own.reservation
