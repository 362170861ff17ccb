"""What Python code calls, and the magic and the command line: reserve, release, join, leave."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, overload

from reserve_gpu.allocation.request import Deadline, parse
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.names import DeviceNames
from reserve_gpu.model import errors
from reserve_gpu.model.devices import Device
from reserve_gpu.model.errors import Failure
from reserve_gpu.model.holders import Reserved
from reserve_gpu.model.parsing import parse_duration
from reserve_gpu.model.progress import Progress, Waiting
from reserve_gpu.model.requests import Request
from reserve_gpu.model.untrusted import sanitize
from reserve_gpu.render import messages
from reserve_gpu.render import notices as notice
from reserve_gpu.render.durations import duration
from reserve_gpu.render.frontends import MAGIC, PYTHON, Frontend, read_here
from reserve_gpu.reservation import acquire, feature
from reserve_gpu.reservation.session import Reservation, session
from reserve_gpu.system.executor import Call
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import kernels_file

if TYPE_CHECKING:
    from reserve_gpu.render.progress import Live
    from reserve_gpu.reservation.restart_handover import Left

F = TypeVar("F", bound=Callable[[], object])


def reserve(  # noqa: PLR0913 - all but the first are keywords
    devices: DeviceNames | None = None,
    *,
    count: int | None = None,
    min_memory: float | str | None = None,
    name: str | None = None,
    wait: float | str | None = None,
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
    wait: for how long to wait in the queue, in seconds or as `90s`, `10m`, `2h`; True for ever.
    memory: a part of each alone: the most device memory that this process and all that it starts
        will use, the CUDA context included, as `min_memory`, or `50%` of what it has. Others may
        have the rest.
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
        memory=memory,
        note=note,
        for_=for_,
        until=until,
        idle=idle,
        if_wanted=if_wanted,
        end_kernel=end_kernel,
    )

    def of_waits(news: Progress) -> None:
        if callable(progress) and isinstance(news, Waiting):
            progress(news)

    outcome = ask(request, wait, of_waits if callable(progress) else progress, PYTHON)
    reservation = outcome.reservation
    assert reservation  # noqa: S101 - without is_optional there is one
    try:
        for text in outcome.warnings:
            warnings.warn(text, errors.ReserveGPUWarning, stacklevel=2)
        if progress == "auto" and reservation.lease.has_end:
            show_reserved()
    except BaseException:  # of a signal, or as warnings are errors: nobody gets to know of it
        if outcome.is_new:
            session().run_in_any_case(session().forget, reservation)
        raise
    return reservation


class Outcome(NamedTuple):
    """What a request came to.

    Attributes:
        reservation: The reservation, or None if there is none, which `--optional` allows.
        warnings: Warnings and notices about it.
        is_new: Whether the process did not have it before.
        waited_s: The seconds that the request waited in the queue.
        excused: Why there is no reservation.
    """

    reservation: Reservation | None
    warnings: Sequence[str] = ()
    is_new: bool = False
    waited_s: float = 0.0
    excused: errors.ReserveGPUError | None = None

    @property
    def text(self) -> str:
        """Return what to print."""
        if self.excused:
            return go_on_after(self.excused)
        waited = f"Waited for {duration(self.waited_s)}.\n" if self.waited_s >= 1 else ""
        return f"{waited}{self.reservation}"


def ask(
    request: Request,
    wait: float | str | None,
    progress: Callable[[Progress], object] | Literal["auto"] | None,
    frontend: Frontend,
    *,
    is_optional: bool = False,
) -> Outcome:
    """Reserve, for any front end.

    Args:
        request: The request.
        wait: How long to wait in the queue, as in `reserve()`.
        progress: Called while this waits, as in `reserve()`.
        frontend: Where an error is read, which decides how its hints are typed.
        is_optional: Whether to return an outcome without a reservation if no GPU can be reserved.

    Raises:
        ReserveGPUError: As in `reserve()`.
        WaitInterrupted: Ctrl-C ended a wait of the magic.
    """
    this_session, deadline = session(), Deadline.after(wait)
    waited_s: float | None = None  # until there is news of a wait
    acquired: acquire.Acquired | None = None
    if deadline.waits:
        deadline = deadline._replace(asks=messages.asked(request))

    def undo(call: Call[acquire.Acquired]) -> None:
        if call.has_answer:
            this_session.roll_back(call.answer.savepoint)

    try:
        this_session.load(request.terms)
        with nullcontext(progress) if callable(progress) else _display(progress) as show:

            def count_and_show(news: Progress) -> None:
                nonlocal waited_s
                waited_s = news.waited_s if isinstance(news, Waiting) else waited_s
                show(news)

            acquired = this_session.run(
                acquire.reserve,
                this_session,
                request,
                deadline,
                show=count_and_show,
                until=deadline.at,
                undo=undo,
            )
        is_new = acquired.reservation is not acquired.savepoint.reservation
        return Outcome(acquired.reservation, acquired.notices, is_new, waited_s or 0.0)
    except (Failure, errors.ReserveGPUError) as error:
        told = explained(error, frontend)
        if is_optional and isinstance(told, errors.EXCUSED):
            return Outcome(None, excused=told)
        raise told from None
    except BaseException as error:  # what a signal handler has raised
        # Without an answer the session rolls back by itself; this only waits for the end of that.
        savepoint = acquired.savepoint if acquired else None
        this_session.run_in_any_case(this_session.roll_back, savepoint)
        has_waited = deadline.waits or waited_s is not None
        if isinstance(error, KeyboardInterrupt) and has_waited and frontend is MAGIC:
            text = messages.interrupted(this_session.devices, MAGIC)
            raise errors.WaitInterrupted(text) from None
        raise


def explained(
    error: Failure | errors.ReserveGPUError, frontend: Frontend
) -> errors.ReserveGPUError:
    """Return the error in the words of a front end, with what features know of it."""
    if isinstance(error, Failure):
        error = error.reason.error(read_here(frontend))
    for each in session().features.values():
        error = each.explained(error)
    return error


def preview(request: Request, frontend: Frontend) -> tuple[Device, ...]:
    """Return what would be reserved now; nothing is. Raises what `reserve()` raises."""
    session().load(request.terms)
    try:
        return session().run(acquire.preview, session(), request)
    except (Failure, errors.ReserveGPUError) as error:
        raise explained(error, frontend) from None


def show_reserved() -> None:
    """Show in this cell how what it has reserved stands, where there is more to say of that."""
    for each in session().features.values():
        each.show()


def current() -> Reservation | None:
    """Return the reservation that this process holds, None if there is none."""
    return session().reservation


def release() -> tuple[Device, ...]:
    """Release what this process holds; returns the devices that it released.

    The variables get back the values that they had before, also where a failure had emptied
    `CUDA_VISIBLE_DEVICES`.
    """
    if released := session().run_in_any_case(session().release):
        return released
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    return next((left.held.devices for left in all_left() if restart_handover.end(left)), ())


def kept() -> str | None:
    """Return what is kept for this kernel, which has not asked for it yet, and until when."""
    left = None if session().devices else next(all_left(), None)
    return messages.kept(left.held.devices, left.until) if left else None


def all_left() -> "Iterator[Left]":
    """Yield what is kept for this kernel, which has restarted."""
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    if connection_file := kernels_file():
        yield from restart_handover.all_left(connection_file)


def hide_if_unreserved() -> None:
    """Leave this process, if it holds nothing, without any GPU that it could use by mistake."""
    session().run_in_any_case(session().hide_if_unreserved)


def go_on_after(error: errors.ReserveGPUError) -> str:
    """Go on although nothing could be reserved, with no GPU that could be used by mistake.

    Returns how: a line to read.
    """
    # NoFreeDeviceError has seen to it.
    if not isinstance(error, (errors.NoDriverError, errors.NoFreeDeviceError)):
        hide_if_unreserved()
    visible = cuda_environment.read()[cuda_environment.VISIBLE]
    is_above = isinstance(error, errors.ReservedAboveError)
    return messages.going_on(session().devices, visible if is_above else None)


def forget_idleness() -> None:
    """End no reservation for idleness, also where a rule says so.

    For a process that becomes a program which can't know whether it does.
    """
    this_session = session()

    def forget() -> None:
        held = this_session.holding
        if held.lease.idle_s is not None:
            terms = held.terms._replace(lease=held.lease._replace(idle_s=None))
            this_session.set_holding(held._replace(terms=terms), renew_lease=True)

    this_session.run(forget)


def before_exec(reason: str | None = None, *, is_kernel: bool = False) -> None:
    """Leave what this process holds to the program that it becomes with its next exec.

    reason: why it holds nothing, for that program to tell. is_kernel: it is a kernel, which loads
    this package.
    """
    with no_fork:
        from reserve_gpu.reservation import exec_handover

    this_session = session()

    def leave() -> None:
        how = feature.Leaving.KERNEL if is_kernel else feature.Leaving.COMMAND
        facts = this_session.leave_as(how)
        changes = this_session.variables.changes
        exec_handover.offer(exec_handover.Handover(changes, this_session.holding, reason, facts))

    this_session.run(leave)


def join(reserved: Reserved) -> str:
    """Join a reservation of another process of this user, and return what to print.

    Raises RequestError where this process holds something already, or that one nothing any more;
    TooLateError where CUDA has started here; LockError.
    """
    this_session = session()
    if this_session.devices:
        raise notice.holds_already(this_session.devices)
    if cuda_environment.cuda_started():
        raise notice.TooLate(()).error(MAGIC)
    this_session.load()
    this_session.run(this_session.join, reserved)
    reservation = this_session.reservation
    environ = reservation.environ if reservation else {}
    return messages.joined(this_session.devices, reserved.holder.name, environ)


def take_over(connection_file: str | None) -> list[str]:
    """Hold what the kernel before this one has left for its restart; returns what to say of it.

    connection_file: of the kernel that this process is, or becomes.
    """
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    session().load()
    return session().run(restart_handover.take_over, session(), connection_file)


def leave_to_kernel(name: str, seconds: float) -> None:
    """Leave what this process holds to the kernel of that name, which somebody starts by ssh."""
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    session().run(restart_handover.leave, session(), name, seconds)


@overload
def before_end(function: F, *, limit: float | str = "5m") -> F: ...
@overload
def before_end(*, limit: float | str = "5m") -> Callable[[F], F]: ...
def before_end(function: F | None = None, *, limit: float | str = "5m") -> F | Callable[[F], F]:
    """Have a function called before a reservation with `end_kernel`, or its job, ends this process.

    function: takes nothing; it can save a checkpoint. It is called on a thread of its own, in the
        order in which they were given, and may be called again where the end was put off. One of
        the same name replaces the earlier one, as where its cell is run again.
    limit: for how long to wait for it; for all of them together it is at most 10 minutes.
    Returns the function, so that this is a decorator: `@before_end`, or `@before_end(limit=30)`.
    Raises RequestError.
    """
    if function is None:
        return partial(before_end, limit=limit)
    if not callable(function):
        raise errors.RequestError(f"before_end() takes a function, not {sanitize(repr(function))}.")
    with no_fork:
        from reserve_gpu.system import shutdown

    shutdown.of_this_process().call_before(function, parse_duration(limit))
    return function


@contextmanager
def _display(progress: Literal["auto"] | None) -> Iterator[Callable[[Progress], object]]:
    """Yield a function that shows how a wait stands; None shows nothing."""
    with ExitStack() as stack:
        live: Live | None = None

        def show(news: Progress) -> None:
            nonlocal live
            if live is None and progress == "auto":
                with no_fork:
                    from reserve_gpu.render import progress as displays

                live = stack.enter_context(displays.for_people() or nullcontext())
            if live is not None:
                live.show(news)

        yield show
