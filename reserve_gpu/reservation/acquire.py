"""Acquire a reservation for a request, or report why the request can't be satisfied."""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING

from reserve_gpu.allocation import inherited_limit, policy, quota, snapshot, wait
from reserve_gpu.allocation.attempt import AttemptContext, Denied, Granted, LockedDevice, attempt
from reserve_gpu.allocation.request import Deadline, idle_mib, rules
from reserve_gpu.gpus import cuda_environment, names
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.gpus.usage import has_no_memory
from reserve_gpu.locks.directory import MUTEX_LIMIT_S, LockDirectory, preferred_paths
from reserve_gpu.locks.lock import describe_this_process
from reserve_gpu.model.devices import Device, State
from reserve_gpu.model.errors import Failure, ImpossibleError, NoFreeDeviceError, RequestError
from reserve_gpu.model.holders import DeviceStatus, Holder, ProcessInfo
from reserve_gpu.model.requests import End, Request
from reserve_gpu.render import notices as notice
from reserve_gpu.reservation import feature, joining, refresh
from reserve_gpu.reservation.holding import NOTHING
from reserve_gpu.reservation.session import Reservation, Savepoint, Session
from reserve_gpu.system import containers, executor, procfs, settings
from reserve_gpu.system.executor import GivenUpError
from reserve_gpu.system.jupyter_kernel import kernels_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reserve_gpu.locks.queue import QueueEntry
    from reserve_gpu.model.requests import Rules
    from reserve_gpu.reservation.holding import Holding

RETRY_MUTEX_LIMIT_S = 1.0  # mutex timeout in seconds; short, because waiters retry anyway
# Minimum mutex timeout in seconds. Even a request with no time left to wait should not fail just
# because another process briefly holds the mutex.
LEAST_WAIT_S = 1.0
WATCH_S = 0.3  # seconds for which a refusal watches whether the driver is freeing memory


class Acquired:
    """The result of a successful request.

    Attributes:
        reservation: The reservation that satisfies the request.
        notices: Notices for the user.
        savepoint: The state before the request, for undoing the request.
        released: The devices that were held before the request and are not held anymore.
    """

    def __init__(
        self,
        reservation: Reservation,
        notices: list[str],
        savepoint: Savepoint,
        released: Sequence[Device],
    ) -> None:
        self.reservation, self.notices, self.savepoint = reservation, notices, savepoint
        self.released = released


class WouldReserve(Exception):  # noqa: N818 - not an error, but the result of a preview
    """Raised to report the devices that a preview found, and to release their locks."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        super().__init__(devices)
        self.devices = devices


def preview(session: Session, request: Request) -> tuple[Device, ...]:
    """Return the devices that `reserve` would reserve, or raise the error that it would raise."""

    def hold(granted: Granted, _: Request) -> None:
        raise WouldReserve(tuple(locked.device for locked in granted.locked))

    try:
        reserve(session, request, Deadline.after(None), hold)
    except WouldReserve as result:
        return result.devices
    return session.devices


def reserve(
    session: Session,
    request: Request,
    deadline: Deadline,
    hold: Callable[[Granted, Request], object] | None = None,
) -> Acquired:
    """Reserve devices for a request. Must run on the session's thread.

    Args:
        session: The session of this process.
        request: The request.
        deadline: When to stop waiting for a device.
        hold: A function to call with the locked devices instead of `session.hold`. If it is given,
            the request does not wait. Only `preview` passes one.

    Returns:
        The reservation, with notices for the user.

    Raises:
        Failure: The request can't be satisfied. The error's notice gives the reason.
        ImpossibleError: This machine can never satisfy the request.
        RequestError: The request is not valid in this process.
        NoFreeDeviceError: Another thread of this process is waiting for a device.
        DriverError: The driver can't be used.
        LockError: The lock directory can't be used.
    """
    if session.is_waiting:  # another thread is waiting, and keeps waiting
        session.hide_if_unreserved()
        raise NoFreeDeviceError(notice.ANOTHER_THREAD_WAITS)
    session.has_place = False
    notices = _begin(session, request)
    savepoint, before = Savepoint(session.reservation, waits=deadline.waits), session.devices
    try:
        if request.devices:
            inherited_limit.require_absolute(request.devices, session.variables.inherited())
        held, active_rules = session.held, rules()
        request = held.as_held(request) if held else request
        if active_rules:
            now = held or NOTHING
            request, more = quota.allowed(
                request, active_rules, now.lease, now.since_of(request), procfs.now()
            )
            notices += [*active_rules.problems, *more]
        # If the held devices satisfy the request, return the current reservation again.
        outcome = session.satisfy_from_current(request) if held else None
        if outcome is None:
            outcome = _acquire_devices(session, request, deadline, active_rules, hold)
        reservation = _count_caller(session)
        held_uuids = {device.uuid for device in session.devices}
        return Acquired(
            reservation,
            [*notices, *outcome, *_record_notices(session)],
            savepoint,
            released=[device for device in before if device.uuid not in held_uuids],
        )
    except GivenUpError:
        session.roll_back(savepoint)
        raise


def _acquire_devices(
    session: Session,
    request: Request,
    deadline: Deadline,
    active_rules: Rules | None,
    hold: Callable[[Granted, Request], object] | None,
) -> list[str]:
    """Reserve devices that this process does not hold yet, and return notices about them."""
    if active_rules:
        quota.require_amount(request, active_rules)
    # Once CUDA has started, it ignores changes to the environment variables, so this process can
    # reserve only the devices that CUDA already sees.
    if (is_late := cuda_environment.cuda_started()) and not cuda_environment.cuda_uuids():
        raise Failure(notice.TooLate(session.devices))
    with Nvml() as gpus:
        gpus.count()  # if there is no driver, fail before creating the lock directory
        request = _name_held_devices(session.holding, request)
        if is_late:
            request = _only_what_cuda_sees(session, request, gpus)
        with LockDirectory() as locks:
            if not is_late and (parent := procfs.multiprocessing_parent()):
                inherited_limit.adopt_parents_gpus(parent, gpus, locks)
            now = session.holding
            context = AttemptContext(
                request,
                gpus,
                locks,
                inherited=session.variables.inherited(),
                held=now.locks_in(locks.path),
                memory_limit_mib=now.terms.memory_limit_mib,
                idle_mib=idle_mib(),
                driver=gpus.driver_version() if request.needed > 1 else None,
                rules=active_rules,
                is_taking_back=is_late,
            )
            # Lock and read the devices in order. If enough of them can be locked, `hold` sets the
            # environment variables. Otherwise, all new locks are released.
            outcome = attempt(context, hold or session.hold, mutex_limit_s=_mutex_limit_s(deadline))
            changes: list[str] = []
            if isinstance(outcome, Denied):
                outcome, changes = _wait_or_fail(session, context, outcome, deadline, hold)
            return [*changes, *_cautions(context, outcome), *session.variables.notices]


def _mutex_limit_s(deadline: Deadline) -> float:
    # A request that is allowed to wait also waits for the mutex, because a stopped process
    # (SIGSTOP) might hold it.
    return max(LEAST_WAIT_S, deadline.left_s) if deadline.waits else MUTEX_LIMIT_S


def _wait_or_fail(
    session: Session,
    context: AttemptContext,
    denied: Denied,
    deadline: Deadline,
    hold: Callable[[Granted, Request], object] | None,
) -> tuple[Granted, list[str]]:
    """Wait for a denied request to be granted, unless `hold` is given.

    Returns:
        The granted devices, and notices about GPUs that changed during the wait.

    Raises:
        Failure: No suitable devices became free in time, or waiting can't help.
        ImpossibleError: This machine can never satisfy the request.
    """
    changes: list[str] = []
    outcome: Granted | Denied = denied
    if hold is None:
        outcome, changes = _wait(session, context, denied, deadline)
    if isinstance(outcome, Denied):
        raise _failure(session, context, outcome, deadline)
    return outcome, changes


def _count_caller(session: Session) -> Reservation:
    """Record that another caller is using the current reservation, and return the reservation.

    Raises:
        RequestError: Other code in this process has closed the lock files.
    """
    if reservation := session.reservation:
        reservation.count_call(executor.caller())
        return reservation
    raise RequestError(notice.ALREADY_RELEASED)


def _record_notices(session: Session) -> list[str]:
    """Return a notice about any lock files whose records could not be written."""
    if not session.unsigned:
        return []
    devices, (directory, *_), (reason, *_) = zip(*session.unsigned, strict=True)
    is_part = session.holding.terms.memory_limit_mib is not None
    return [notice.unsigned(devices, directory, reason, is_part=is_part)]


def _name_held_devices(held: Holding, request: Request) -> Request:
    """Add the held devices' names to a request that should keep the same devices.

    A process that holds part of a device keeps that device when it requests a part of a different
    size. A joined process keeps its devices when their original holder no longer holds them.
    """
    is_part = None not in (held.terms.memory_limit_mib, request.terms.memory_limit_mib)
    has_lost_holder = held.joined is not None and joining.has_lost_holder(held)
    devices = policy.matching_held(held.devices, request) if is_part or has_lost_holder else None
    if not devices or request.devices:
        return request
    return request._replace(devices=tuple(d.number for d in devices), count=None)


def _begin(session: Session, request: Request) -> list[str]:
    """Prepare the session and its features for a request, and return notices for the user.

    Raises:
        ReserveGPUError: The process can't open enough files for a reservation.
    """
    if not session.devices:
        procfs.require_descriptors()
    if request.terms.memory_limit_mib is not None:
        cuda_environment.read_size_mib(settings.CONTEXT_MEMORY)  # fail early if invalid
    notices = session.renew()
    features = session.features_for(request.terms)
    notices += [notice for each in features for notice in each.begins()]
    return notices + refresh.refresh(session).notices if session.held else notices


def _wait(
    session: Session, context: AttemptContext, denied: Denied, deadline: Deadline
) -> tuple[Granted | Denied, list[str]]:
    """Wait in the queue if waiting can help, and retry whenever a device might be free.

    A request that is not allowed to wait still gives earlier waiters a few seconds to take any free
    devices.

    Returns:
        The outcome of the last attempt, and notices about GPUs that changed during the wait.
    """
    candidates = [row.device for row in denied.rows]

    def try_again(entry: QueueEntry) -> Granted | Denied:
        # During the wait, the rules might have changed, and the current lease might have expired.
        held = session.holding
        current_context = context._replace(
            held=held.locks_in(context.locks.path),
            memory_limit_mib=held.terms.memory_limit_mib,
            rules=rules(),
        )
        limit_s = RETRY_MUTEX_LIMIT_S if deadline.waits else MUTEX_LIMIT_S
        return attempt(current_context, session.hold, entry, limit_s, candidates)

    if not deadline.waits:
        if not policy.is_only_awaited(denied.rows, context.request):
            return denied, []
        try:
            with session.waiting():
                return wait.wait_for_offers(context, try_again, session.between), []
        except BaseException:
            session.hide_if_unreserved()
            raise
    if not policy.may_come_free(denied.rows, context.request) or _is_above(
        session, context, denied
    ):
        return denied, []
    began, start, how = time.time(), time.monotonic(), End.GAVE_UP
    entry = wait.queue_entry(context, denied, deadline)
    try:
        with session.waiting():
            outcome = wait.wait_in_queue(
                context,
                denied,
                deadline,
                entry=entry,
                attempt=try_again,
                between=session.between,
            )
        if isinstance(outcome, Granted):
            how = End.GRANTED
    finally:
        session.has_place = entry.keeps_place
        waited = feature.Wait(deadline.asks, began, time.monotonic() - start, how)
        for each in session.features.values():
            each.waited(waited)
    # GPUs might have been added or removed during the wait.
    return outcome, refresh.refresh(session).notices


def _failure(
    session: Session, context: AttemptContext, denied: Denied, deadline: Deadline
) -> Failure | ImpossibleError:
    """Return the error for a denied request, and hide all GPUs if this process holds none.

    GPUs are not hidden if the request can never be satisfied, or if ancestors of this process hold
    all the devices that it may use.
    """
    request, visible = context.request, context.inherited[cuda_environment.VISIBLE]
    if visible is not None and not denied.rows:
        return Failure(notice.HidesAll(request, visible, context.gpus.count(), session.devices))
    if policy.is_impossible(denied.rows, request):
        return notice.impossible(request, denied.rows, visible)
    is_above = _is_above(session, context, denied)
    if not is_above:
        # Hide the GPUs first, because reading their processes can be slow and can be interrupted.
        session.hide_if_unreserved()
    rows = snapshot.add_processes(context.gpus, denied.rows, context.idle_mib, WATCH_S)
    if is_above:
        environ = {name: context.inherited[name] for name in cuda_environment.CUDA}
        return Failure(notice.ReservedAbove(rows, environ))
    has_waited = deadline.waits and policy.may_come_free(rows, request)
    return Failure(
        notice.Refused(
            request,
            rows,
            kept=session.devices,
            limit=visible,
            waited_s=deadline.limit_s if has_waited else None,
            user=procfs.user_of(os.getpid()),
            problems=context.rules.problems if context.rules else (),
            free=_free_alternatives(context, rows) if request.devices else (),
            siblings=_siblings(rows),
            ahead=[t for t in denied.ahead if any(map(t.could_use, policy.wanted_uuids(rows)))],
        )
    )


def _siblings(rows: Sequence[DeviceStatus]) -> set[int]:
    """Return the pids of holders that have the same parent and command as this process.

    Such processes are usually MPI ranks or Dask workers. Numbers in the commands are ignored,
    because the commands of such processes often differ only in a number. Jupyter kernels are
    excluded, because two kernels of the same Jupyter server are unrelated.
    """
    parent = os.getppid()
    if kernels_file() or parent == 1:  # init adopts unrelated orphans
        return set()
    command = _command_without_numbers(describe_this_process())
    holders = [each for row in rows for each in row.holders]
    pids = {
        each.listed_pid or 0
        for each in holders
        if _command_without_numbers(each.record.who) == command
    }
    return {pid for pid in pids - {os.getpid()} if procfs.lineage(pid)[1:2] == [parent]}


def _command_without_numbers(process: ProcessInfo) -> str:
    return re.sub(r"[0-9]+", "", process.command or "")


def _free_alternatives(context: AttemptContext, rows: Sequence[DeviceStatus]) -> list[DeviceStatus]:
    """Return free devices that could replace the devices named in the request.

    The result is empty if an inherited limit or a rule excludes other devices, or if CUDA has
    started.

    Args:
        context: The context of the attempt.
        rows: The named devices, each with the reason that it is unavailable.
    """
    request = context.request
    is_limited = context.inherited[cuda_environment.VISIBLE] is not None or context.is_taking_back
    if is_limited or any(row.state is State.LIMITED for row in rows):
        return []
    machine = snapshot.take_snapshot(
        context.gpus, idle_mib=context.idle_mib, active_rules=context.rules
    )
    return [
        row
        for row in machine.rows
        if row.state is State.FREE
        and not row.awaited_by
        and not policy.unfit(row.device, request, context.driver)
    ]


def _is_above(session: Session, context: AttemptContext, denied: Denied) -> bool:
    """Return whether ancestors of this process hold all the devices that it is allowed to use."""
    if session.devices or not context.inherited[cuda_environment.VISIBLE]:
        return False
    return policy.is_above(denied.rows, procfs.ancestors())


def _only_what_cuda_sees(session: Session, request: Request, gpus: Nvml) -> Request:
    """Narrow the request to the devices that CUDA sees.

    Once CUDA has started, this process can reserve only the devices that CUDA sees, for example to
    take back devices that it has released.

    Raises:
        Failure: These devices don't satisfy the request.
    """
    everything = [device for device in gpus.walk() if isinstance(device, Device)]
    by_uuid = {names.bare_uuid(device.uuid): device for device in everything}
    visible = [by_uuid[uuid] for uuid in cuda_environment.cuda_uuids() if uuid in by_uuid]
    if narrowed := policy.reclaim(request, visible):
        return narrowed
    # If CUDA sees all GPUs, this process probably never reserved any. In that case, don't suggest
    # reserving all of them.
    is_limited = len(visible) < len(everything) or len(everything) == 1
    held = {device.uuid for device in session.devices}
    is_held = all(device.uuid in held for device in visible)
    can_reserve = is_limited and not is_held
    raise Failure(notice.TooLate(session.devices, visible, can_reserve))


def _cautions(context: AttemptContext, granted: Granted) -> list[str]:
    """Return warnings about the acquired devices."""
    rows = [_caution(context, locked) for locked in granted.locked if not locked.row.is_mine]
    cautions: list[str] = [
        notice.caution(row, context.request)
        for row in rows
        if row.use_state is not State.IDLE or (row.usage and row.usage.awaits_reset)
    ]
    path = context.locks.path
    if containers.is_any_private(preferred_paths(path)):
        cautions.append(notice.private_directory(path, containers.bind_instruction(path)))
    return cautions


def _caution(context: AttemptContext, locked: LockedDevice) -> DeviceStatus:
    """Return an acquired device's status, including only the use that needs a warning.

    Use by this process is left out. When this process reserves a part of the device, use by other
    part holders is also left out, because the reservation attempt has already counted their memory.
    """
    row, is_part = locked.row, context.request.terms.memory_limit_mib is not None
    if row.usage is None or (row.use_state is State.IDLE and not row.holders):
        return row
    known_holders = (Holder(listed_pid=os.getpid()), *row.holders)
    listed = context.gpus.processes(locked.device)
    processes = [
        process
        for process in snapshot.identify_processes(context.gpus, listed, known_holders)
        if process.has_reserved or not has_no_memory(process, row.usage.mode)
    ]
    # In a container, it might be unknown (None) whether another process has reserved the device. If
    # this process reserves only a part, that process might hold another part.
    unreserved = (False,) if is_part else (False, None)
    others = tuple(process for process in processes if process.has_reserved in unreserved)
    is_all_seen = len(processes) >= max(1, (row.usage.compute or 0) + (row.usage.mps or 0))
    is_own = not others and (is_part or is_all_seen)
    use = State.IDLE if is_own else State.BUSY if is_part else row.use_state
    return row._replace(use_state=use, processes=others)
