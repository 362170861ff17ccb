"""The road of one reservation: what the magic, the command line and scripts call."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal

from reserve_gpu import calls, host
from reserve_gpu.calls import Late
from reserve_gpu.cells import cells
from reserve_gpu.errors import (
    DriverError,
    NoDriverError,
    NoFreeDeviceError,
    RequestError,
    ReservedAboveError,
    ReserveGPUError,
    ReserveGPUWarning,
    shown,
)
from reserve_gpu.gpus import bindings, names
from reserve_gpu.gpus.bindings import DeviceError
from reserve_gpu.gpus.nvml import Nvml
from reserve_gpu.model import NO_LEASE, Device, Holder, Row, State, Waiting
from reserve_gpu.quantities import parse_duration
from reserve_gpu.reservation import environment, limit
from reserve_gpu.reservation.outcome import NotTaken, TooLate
from reserve_gpu.reservation.request import (
    Deadline,
    idle_mib,
    parse,
    restart_s,
    rules,
    setting_mib,
)
from reserve_gpu.reservation.session import Reservation, session
from reserve_gpu.reservation.taking import take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    from reserve_gpu import machine
    from reserve_gpu.gpus.names import DeviceNames
    from reserve_gpu.history import reading, totals
    from reserve_gpu.model import News, Request, Reserved, Rules
    from reserve_gpu.report import faces, messages, pictures
    from reserve_gpu.report import progress as displays
    from reserve_gpu.report import status as statuses
    from reserve_gpu.report.status import Status
    from reserve_gpu.reservation import caps, elsewhere, guests, journal, quota, restart, wait
    from reserve_gpu.reservation import lease as lease_timer
    from reserve_gpu.reservation.session import Session

    F = TypeVar("F", bound=Callable[[], object])
else:
    # What a reservation that is granted at once never needs.
    displays, pictures = Late("report.progress"), Late("report.pictures")
    faces, messages = Late("report.faces"), Late("report.messages")
    restart, elsewhere = Late("reservation.restart"), Late("reservation.elsewhere")
    guests, journal = Late("reservation.guests"), Late("reservation.journal")
    lease_timer, caps = Late("reservation.lease"), Late("reservation.caps")
    wait, reading = Late("reservation.wait"), Late("history.reading")
    totals, statuses = Late("history.totals"), Late("report.status")
    machine, quota = Late("machine"), Late("reservation.quota")


LATELY_S = 7 * 86400.0  # of which a status tells what one has had
HOURS_EVERY_S = 60.0  # between two readings of that
LEAVE_LIMIT_S = 2.0  # a client kills a kernel that does not end within 5 s
HELD_LIMIT_S = 5.0  # for the driver to answer about what is held: a first touch takes up to 3 s


def reserve(  # noqa: PLR0913 - all but the first are keywords
    devices: DeviceNames | None = None,
    *,
    count: int | None = None,
    min_memory: float | str | None = None,
    name: str | None = None,
    exclude: DeviceNames = (),
    wait: float | str | None = None,
    share: bool = False,
    memory: float | str | None = None,
    note: str | None = None,
    for_: float | str | None = None,
    until: str | None = None,
    idle: float | str | None = None,
    if_wanted: bool = False,
    end_kernel: bool = False,
    progress: Callable[[Waiting], object] | Literal["auto"] | None = "auto",
) -> Reservation:
    """Reserve GPUs for this process and set the CUDA variables for whatever it starts next.

    devices: the ones to take, one or several, in this order, by index (`2`, `0-3` for four), UUID
        or its unique prefix, MIG instance (`1:0`) or PCI bus id; None for the first that are free.
    count: how many, where none are named; 1 by default.
    min_memory: total memory of each, as `16GB`, `16GiB`, or in MiB, which is 1000 or more.
    name: text that the name of each must contain, in upper or lower case.
    exclude: devices that will not do.
    wait: for how long to wait in the queue, in seconds or as `90s`, `10m`, `2h`; True for ever.
    share: together with others who share; who has reserved a GPU without it shares it with nobody.
    memory: a part of each alone: the most device memory that this process and all that it starts
        will use, the CUDA context included, as `min_memory`. The rest is for others who share.
    note: a line for others to read.
    for_: for how long to hold it, in seconds or as `30m`, `4h`, `1h30m`. until: up to a moment in
        local time: `18:00`, `6pm`, `Fri`, `tomorrow`, `2026-12-01`, `Fri 18:00`.
    idle: release it when no cell has run, and no process of this one has used it, for so long.
    if_wanted: release it then only if somebody waits who could use it.
    end_kernel: where CUDA has started by then, end this process: nothing else frees the memory.
        What was given to `before_end()` is called before.
    progress: called about once a second while this waits; by default the wait is shown in a
        notebook, an IPython shell or, on stderr, a terminal; None for silence.

    A process has one reservation. Asking again for what it already holds changes nothing; asking
    for less releases the rest, as long as CUDA has not started.
    Raises RequestError, TooLateError, NoFreeDeviceError (WaitTimeoutError after a wait),
    DriverError, LockError. A ReserveGPUWarning tells that somebody else uses a device that was
    named or shared.
    """
    request = parse(
        devices,
        count=count,
        min_memory=min_memory,
        name=name,
        exclude=exclude,
        share=share,
        memory=memory,
        note=note,
        for_=for_,
        until=until,
        idle=idle,
        if_wanted=if_wanted,
        end_kernel=end_kernel,
    )
    reservation, texts, is_new = ask(request, Deadline.after(wait), _of_waits(progress))
    try:
        for text in texts:
            warnings.warn(text, ReserveGPUWarning, stacklevel=2)
        if progress == "auto" and reservation.lease.has_end:
            show_lease()
    except BaseException:  # of a signal, or as warnings are errors: nobody gets to know of it
        if is_new:
            session().run_in_any_case(session().undo, reservation)
        raise
    return reservation


def ask(
    request: Request,
    deadline: Deadline,
    progress: Callable[[News], object] | Literal["auto"] | None,
    face: faces.Face | None = None,
) -> tuple[Reservation, list[str], bool]:
    """Reserve for any face.

    Returns the reservation, what there is to be said against it, and whether it is a new one.
    face: where an error is read, which decides how its hints are typed; None for Python.
    """
    _load(request, deadline)
    this_session = session()
    before: list[Reservation | None] = []

    def undo() -> None:
        if before:
            reservation = this_session.reservation
            this_session.undo(None if reservation is before[0] else reservation)
            if before[0] or deadline.waits:
                this_session.go_without()

    def meet() -> tuple[Reservation, list[str], bool]:
        if this_session.is_waiting:  # another thread's call, which goes on
            this_session.go_without()
            raise NoFreeDeviceError(messages.ANOTHER_THREAD_WAITS)
        texts = this_session.renew() + _claim(this_session, _kernels_file())
        before.append(this_session.reservation)
        texts += _meet(this_session, request, deadline)
        reservation = this_session.reservation
        if reservation is None:  # other code of this process has closed its locks
            raise RequestError(messages.HAS_ENDED)
        return reservation, texts, reservation is not before[0]

    try:
        with _shown(progress) as show:
            return this_session.run(meet, show=show, until=deadline.at, undo=undo)
    except NotTaken as failure:
        raise failure.error(face or faces.PYTHON) from None
    except ReserveGPUError:
        raise
    except BaseException:  # what a signal handler has raised
        this_session.run_in_any_case(undo)
        raise


def _load(request: Request, deadline: Deadline) -> None:
    """Import, on the thread that asks, what the session's thread needs for what is asked for.

    A signal handler that raises in the midst of an import leaves Python's locks for imports with
    its thread. That thread can import all the same; any other one would wait for it for ever,
    perhaps with the machine's mutex.
    """
    environment.load()
    with suppress(DriverError):  # it is raised where it belongs
        bindings.import_pynvml()
    is_ruled = host.config_file() is not None
    if is_ruled:
        with suppress(ReserveGPUError):  # the same
            rules()
    wanted = {
        lease_timer: request.promise.lease.has_end or is_ruled,
        caps: request.part_mib is not None,
        quota: is_ruled,
        wait: deadline.waits,
        elsewhere: cells().shell is not None,
        restart: cells().shell is not None,
        journal: host.may_keep_history(),
    }
    calls.load(*(module for module, is_wanted in wanted.items() if is_wanted))


def _kernels_file() -> str | None:
    """Return the connection file of the kernel that this very process is."""
    return host.connection_file() if cells().shell else None


def _claim(this_session: Session, connection_file: str | None) -> list[str]:
    """Hold what the kernel before this one has left for its restart; returns what to say of it."""
    if connection_file is None:
        return []
    restart_s()  # a setting that is no number is said first
    left = this_session.claim(connection_file)
    return _cautions(left) if left else []


def _cautions(left: restart.Left) -> list[str]:
    """Return what the driver says against devices that were kept over a restart.

    The kernel that has left them is not meant: the driver may take some seconds to free its memory.
    """
    lines: list[str] = []
    with suppress(DriverError), Nvml(HELD_LIMIT_S) as gpus:
        for device in left.held.devices:
            try:
                reading, listed = gpus.usage(device), gpus.processes(device)
            except DeviceError as error:
                lines.append(messages.unusable(device, str(error)))
                continue
            there = [process for process in listed if process.pid != left.kernel]
            if left.held.is_shared or not gpus.sees_all:  # whose they are can't be told
                there = []
            known = machine.identified(gpus, there, [Holder(os.getpid(), seen=True)])
            if others := tuple(process for process in known if not process.has_reserved):
                row = Row(device, State.RESERVED, reading, processes=others, use=State.BUSY)
                lines.append(messages.kept_but_used(row))
    return lines


def _meet(this_session: Session, request: Request, deadline: Deadline) -> list[str]:
    """Hold what is asked for, on the session's thread; returns what there is to be said of it."""
    if request.part_mib is not None:
        setting_mib(host.CONTEXT_MEMORY)  # a setting that is no size is said first
    limit.require_absolute(request, this_session.inherited())
    texts: list[str] = []
    ruled = rules()
    if ruled:
        request, texts = _allowed(request, ruled, this_session)
    request = this_session.as_held(request)
    met = this_session.met_by(request)
    if met is not None:
        return texts + met
    if ruled:
        quota.require_amount(request, ruled)
    return texts + take(this_session, request, deadline, ruled)


def current() -> Reservation | None:
    """Return the reservation that this process holds, None if there is none."""
    return session().reservation


def release() -> tuple[Device, ...]:
    """Release what this process holds; returns the devices that it released.

    The variables get back the values that they had before, also where a failure had emptied
    `CUDA_VISIBLE_DEVICES`.
    """
    return session().run_in_any_case(session().release) or _end_heir()


def _end_heir() -> tuple[Device, ...]:
    """Release what is kept for this kernel, which has restarted; returns the devices."""
    connection_file = _kernels_file()
    for left in restart.all_left(connection_file) if connection_file else ():
        if restart.end(left):
            return left.held.devices
    return ()


def status() -> Status:
    """Look at every device of this machine that the driver shows.

    Raises DriverError where there is no driver. Where the lock directory can't be used the devices
    are there anyway, and `problem` says why nothing is known of reservations.
    """
    return look()


def look(show: Callable[[News], object] = lambda _: None) -> Status:
    """Look at the machine, for any face. show: is told of a driver that takes long."""
    environment.load()
    calls.load(machine, statuses)  # as in `_load`
    with looking(show) as look_now:
        return look_now()


@contextmanager
def looking(show: Callable[[News], object] = lambda _: None) -> Iterator[Callable[[], Status]]:
    """Yield a function that looks at the machine, in one conversation with the driver.

    show: as of `look`. After a look that failed, or found a broken device, it begins another one:
    that may be over.
    """
    with ExitStack() as conversation:
        gpus: Nvml | None = None

        def look_now() -> Status:
            nonlocal gpus
            visible = session().inherited()[environment.VISIBLE]
            if gpus is None:
                conversation.close()
                gpus = conversation.enter_context(Nvml())
            using, gpus = gpus, None
            ruled = rules()
            drained = ruled.drained if ruled else ()
            seen = machine.look(using, idle_mib=idle_mib(), drained=drained)
            if all(row.state is not State.BROKEN for row in seen.rows):
                gpus = using
            return statuses.Status(
                rows=seen.rows,
                waiting=seen.waiting,
                problem=seen.problem,
                time=time.time(),
                host=host.machine_name(),
                limit=visible,
                rules=ruled,
                is_above=visible is not None and _is_above(seen.rows),
                is_late=environment.cuda_started(),
                user=host.user_of(os.getpid()),
                hours=_own_hours(),
            )

        yield lambda: calls.apart(look_now, show=show)


def _own_hours() -> totals.Hours | None:
    """Return what this user has had lately, by the history; None where none is kept."""
    if not host.may_keep_history():
        return None
    minute = int(time.monotonic() // HOURS_EVERY_S)
    return _hours_of(minute, host.history_directory(), host.state_directory())


@lru_cache(1)
def _hours_of(_minute: int, *_places: str) -> totals.Hours | None:
    """Return the same, read once a minute: JupyterLab's server looks every two seconds."""
    now, total = time.time(), None
    with suppress(OSError):
        if reading.exists():
            total = totals.summed(reading.since(now - LATELY_S, now, is_own=True)).total
    return total


def go_without() -> None:
    """Leave this process, if it holds nothing, without any GPU that it could use by mistake."""
    session().run_in_any_case(session().go_without)


def go_on_after(error: ReserveGPUError) -> str:
    """Go on although nothing could be reserved, with no GPU that could be used by mistake.

    Returns how: a line to read.
    """
    if not isinstance(error, (NoDriverError, NoFreeDeviceError)):  # the last has seen to it
        go_without()
    visible = environment.read()[environment.VISIBLE]
    is_above = isinstance(error, ReservedAboveError)
    return messages.going_on(session().devices, visible if is_above else None)


def forget_idleness() -> None:
    """End no reservation for idleness, also where a rule says so.

    For a process that becomes a program which can't know whether it does.
    """
    session().run(session().forget_idleness)


def before_exec(reason: str | None = None, *, is_kernel: bool = False) -> None:
    """Leave what this process holds to the program that it becomes with its next exec.

    reason: why it holds nothing, for that program to tell. is_kernel: it is a kernel, which loads
    this package.
    """
    this_session = session()
    leave = partial(this_session.leave_to_next_program, reason, is_kernel=is_kernel)
    this_session.run(leave)


def join(reserved: Reserved) -> str:
    """Hold, as a guest, what another process of this user has reserved; returns what to tell.

    Raises RequestError where this process holds something already, or that one nothing any more;
    TooLateError where CUDA has started here; LockError.
    """
    environment.load()
    calls.load(guests)  # as in `_load`
    this_session = session()
    if this_session.devices:
        raise RequestError(messages.holds_already(this_session.devices))
    if environment.cuda_started() and not _sees_only(reserved):
        raise TooLate(()).error(faces.MAGIC)
    this_session.run(this_session.join, reserved)
    reservation = this_session.reservation
    environ = reservation.environ if reservation else {}
    return messages.joined(this_session.devices, reserved.holder.name, environ)


def _sees_only(reserved: Reserved) -> bool:
    """Tell whether CUDA, which has started here, sees the devices of a reservation alone."""
    devices = [row.device for row in reserved.rows if isinstance(row.device, Device)]
    uuids = {names.bare_uuid(device.uuid) for device in devices}
    return set(environment.cuda_uuids()) == uuids


def claim(connection_file: str | None) -> list[str]:
    """Hold what the kernel before this one has left for its restart; returns what to say of it.

    connection_file: of the kernel that this process is, or becomes.
    """
    return session().run(_claim, session(), connection_file)


def leave_to_restart() -> None:
    """Leave what this kernel holds to the next one, which comes as this one restarts.

    Raises what keeps it from that.
    """
    connection_file, seconds = _kernels_file(), restart_s()
    if connection_file and seconds:
        this_session = session()
        leave = this_session.leave_to_restart
        this_session.run_within(LEAVE_LIMIT_S, leave, connection_file, seconds)


def leave_to_kernel(name: str, seconds: float) -> None:
    """Leave what this process holds to the kernel of that name, which somebody starts by ssh."""
    session().run(session().leave_to_restart, name, seconds)


def kept() -> str | None:
    """Return what is kept for this kernel, which has not asked for it yet, and until when."""
    connection_file = _kernels_file()
    if connection_file is None or session().devices:
        return None
    left = next(restart.all_left(connection_file), None)
    return messages.kept(left.held.devices, left.until) if left else None


def own_heirs() -> set[int]:
    """Return the processes that keep something for this kernel, which has restarted."""
    connection_file = _kernels_file()
    return {left.heir for left in restart.all_left(connection_file)} if connection_file else set()


def start_failure() -> str | None:
    """Return why the program before this one, in the same process, has left it no GPU."""
    return session().reason


def device_faults() -> list[str]:
    """Return a line for each held device that the driver can't use any more.

    A driver that does not start says nothing of a device: CUDA may go on using it.
    """
    lines = []
    with suppress(DriverError), Nvml(HELD_LIMIT_S) as gpus:
        for device in session().devices:
            try:
                gpus.usage(device)
            except DeviceError as error:  # noqa: PERF203 - each device may have one
                lines.append(messages.unusable(device, str(error)))
    return lines


def before_end(function: F, *, limit: float | str = "5m") -> F:
    """Have a function called before a reservation with `end_kernel` ends this process.

    function: takes nothing; it can save a checkpoint. It is called on a thread of its own, in the
        order in which they were given, and may be called again where the end was put off. One of
        the same name replaces the earlier one, as where its cell is run again.
    limit: for how long to wait for it; for all of them together it is at most 10 minutes.
    Returns the function, so that this can be used as a decorator. Raises RequestError.
    """
    if not callable(function):
        raise RequestError(f"before_end() takes a function, not {shown(repr(function))}.")
    session().timer.process_end.call_before(function, parse_duration(limit))
    return function


def lease_notices() -> list[str]:
    """Return what a cell that begins has to tell of the end of a reservation, mostly nothing."""
    return session().notices()


def show_lease() -> None:
    """Show a cell that has reserved something until when that is, if it ends; the line changes."""
    session().show_lease()


def note_cell() -> list[str]:
    """Note for others that a cell of this kernel has ended; returns lines to show, mostly none."""
    this_session = session()
    return [
        *this_session.note_cell(),
        *(this_session.note_use(_uses(this_session.devices)) if this_session.part_mib else ()),
    ]


def tell_waiters(is_watched: Callable[[], bool]) -> str | None:
    """Return what to tell at the end of a cell of those who wait for what lies idle here, if any.

    is_watched: tells whether a person reads it.
    """
    return None if os.environ.get(host.TELL_WAITERS) == "0" else session().tell_waiters(is_watched)


def _uses(devices: Sequence[Device]) -> dict[Device, float | None]:
    """Return what this process and its children use of each device, in MiB, where it is seen."""
    pid = os.getpid()
    with suppress(DriverError), Nvml(HELD_LIMIT_S) as gpus:
        if gpus.sees_all:  # else a pid may be another process's in our PID namespace
            return {d: host.uses(gpus.processes(d), {pid})[pid] for d in devices}
    return {}


def _of_waits(
    progress: Callable[[Waiting], object] | Literal["auto"] | None,
) -> Callable[[News], object] | Literal["auto"] | None:
    """Return what to call, so that a function of the user's is told of waits alone."""
    if not callable(progress):
        return progress
    return lambda news: progress(news) if isinstance(news, Waiting) else None


@contextmanager
def _shown(
    progress: Callable[[News], object] | Literal["auto"] | None,
) -> Iterator[Callable[[News], object]]:
    """Yield what to call while this waits: the caller's function, or that of a display."""
    with ExitStack() as stack:
        live: displays.Live | None = None

        def show(news: News) -> None:
            nonlocal live
            if live is None and progress == "auto":
                live = stack.enter_context(displays.for_people() or nullcontext())
            if live is not None:
                live.show(news)

        yield progress if callable(progress) else show


def _is_above(rows: Sequence[Row]) -> bool:
    """Tell whether an ancestor of this process has reserved one of the devices."""
    pids = {h.pid for row in rows if not row.is_mine for h in row.holders if h.seen}
    return bool(pids) and not pids.isdisjoint(host.ancestors())


def _allowed(request: Request, ruled: Rules, this_session: Session) -> tuple[Request, list[str]]:
    """Return the request as the rules allow it, and what to say about it and about them.

    Raises RequestError where they never do.
    """
    lease = this_session.held.lease if this_session.held else NO_LEASE
    request, texts = quota.allowed(
        request, ruled, lease, this_session.since_of(request), time.time()
    )
    return request, [*ruled.problems, *texts]
