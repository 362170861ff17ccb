"""The functions that Python code, the magic and the command line call to change a reservation."""

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
from reserve_gpu.render.frontends import MAGIC, PYTHON, Frontend, for_this_process
from reserve_gpu.reservation import acquire, feature
from reserve_gpu.reservation.session import Reservation, session
from reserve_gpu.system.executor import Call
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import kernels_file

if TYPE_CHECKING:
    from reserve_gpu.render.progress import Live
    from reserve_gpu.reservation.restart_handover import KeptReservation

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
    """Reserve GPUs for this process, and set the CUDA variables for the code that it runs next.

    A process has one reservation. A second call for devices that the process already holds changes
    nothing. A call for fewer devices releases the others, unless CUDA has started.

    Args:
        devices: The GPUs to reserve, in this order: indices (`2`, or `0-3` for four GPUs), UUIDs or
            their unique prefixes, MIG instances (`1:0`), or PCI bus IDs. None reserves the first
            free GPUs.
        count: The number of GPUs if `devices` is None. Defaults to 1.
        min_memory: The minimum total memory of each GPU, such as `16GB` or `16GiB`. A number is in
            MiB and must be at least 1000.
        name: Text that the name of each GPU must contain. Case is ignored.
        wait: The timeout for waiting in the queue, in seconds or as `90s`, `10m` or `2h`. True
            waits without a limit, and None does not wait.
        memory: The size of a part of each GPU, in the format of `min_memory`, or a percentage such
            as `50%`. It must cover the device memory of this process and its children, including
            the CUDA context. Other users can reserve the rest. None reserves whole GPUs.
        note: A note that other users see next to the reservation.
        for_: The duration of the reservation, in seconds or as `30m`, `4h` or `1h30m`.
        until: The end of the reservation in local time, such as `18:00`, `6pm`, `Fri`, `tomorrow`,
            `2026-12-01` or `Fri 18:00`.
        idle: The idle limit, in seconds or as `30m` or `2h`. The reservation ends after this time
            without a running cell and without use of the GPUs by this process or its children.
        if_wanted: Whether the reservation ends only if a waiter could use its GPUs.
        end_kernel: Whether to end this process when the reservation ends and CUDA has started,
            because only that frees the GPU's memory. The functions registered with `before_end()`
            are called first.
        progress: A function that is called about once a second during a wait. `"auto"` displays
            the wait in a notebook, in an IPython shell, or on stderr if that is a terminal. None
            displays nothing.

    Returns:
        The reservation, which can be used as a context manager to release the GPUs at its end.

    Raises:
        RequestError: The request is invalid.
        ImpossibleError: The request exceeds what this machine has.
        TooLateError: CUDA has already started in this process.
        NoFreeDeviceError: No matching GPU is free.
        WaitTimeoutError: The timeout of the wait has passed.
        ReservedAboveError: A parent process has reserved every GPU that this process may use.
        DriverError: The NVIDIA driver is missing or failed.
        LockError: The lock directory can't be used.

    Warns:
        ReserveGPUWarning: A reserved GPU has a fault, another process uses it, or an
            administrator's rule limits the reservation.
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

    def forward_wait(news: Progress) -> None:
        if callable(progress) and isinstance(news, Waiting):
            progress(news)

    outcome = ask(request, wait, forward_wait if callable(progress) else progress, PYTHON)
    reservation = outcome.reservation
    assert reservation  # noqa: S101 - it is None only with is_optional
    try:
        for text in outcome.warnings:
            warnings.warn(text, errors.ReserveGPUWarning, stacklevel=2)
        if progress == "auto" and reservation.lease.has_end:
            show_reserved()
    # A signal handler raised, or a warning filter made the warning an error. The caller does not
    # get the new reservation, so release it.
    except BaseException:
        if outcome.is_new:
            session().run_in_any_case(session().forget, reservation)
        raise
    return reservation


class Outcome(NamedTuple):
    """The result of a request.

    Attributes:
        reservation: The reservation, or None if `--optional` excuses a refusal.
        warnings: The warnings and notices about the reservation.
        is_new: Whether the request made or changed the reservation.
        waited_s: The time that the request waited in the queue, in seconds.
        excused: The error of a refusal that `--optional` excuses, or None.
    """

    reservation: Reservation | None
    warnings: Sequence[str] = ()
    is_new: bool = False
    waited_s: float = 0.0
    excused: errors.ReserveGPUError | None = None

    @property
    def text(self) -> str:
        """Return the outcome as text to print."""
        if self.excused:
            return continue_after(self.excused)
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
    """Reserve devices for any frontend.

    Args:
        request: The request.
        wait: The timeout for waiting in the queue, as in `reserve()`.
        progress: A function that is called during a wait, as in `reserve()`. It also gets reports
            about slow calls of the driver.
        frontend: The frontend, which determines the syntax of hints in errors.
        is_optional: Whether to return an outcome without a reservation if no GPU can be reserved.

    Returns:
        The outcome of the request.

    Raises:
        ReserveGPUError: The same errors as in `reserve()`.
        WaitInterrupted: Ctrl-C ended a wait of the magic.
    """
    this_session, deadline = session(), Deadline.after(wait)
    waited_s: float | None = None  # None until the first progress report of a wait
    acquired: acquire.Acquired | None = None
    if deadline.waits:
        deadline = deadline._replace(asks=messages.request_text(request))

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
        explained_error = explained(error, frontend)
        if is_optional and isinstance(explained_error, errors.EXCUSED):
            return Outcome(None, excused=explained_error)
        raise explained_error from None
    except BaseException as error:  # raised by a signal handler
        # If `acquired` is None, `undo` rolls back, and this call only waits for it.
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
    """Return an error with hints for a frontend and text that the features add."""
    if isinstance(error, Failure):
        error = error.reason.error(for_this_process(frontend))
    for each in session().features.values():
        error = each.explained(error)
    return error


def preview(request: Request, frontend: Frontend) -> tuple[Device, ...]:
    """Return the devices that a request would reserve now, without reserving them.

    Args:
        request: The request.
        frontend: The frontend, which determines the syntax of hints in errors.

    Raises:
        ReserveGPUError: The same errors as in `reserve()`.
    """
    session().load(request.terms)
    try:
        return session().run(acquire.preview, session(), request)
    except (Failure, errors.ReserveGPUError) as error:
        raise explained(error, frontend) from None


def show_reserved() -> None:
    """Let each feature display a property of the new reservation, such as its end, in this cell."""
    for each in session().features.values():
        each.show()


def current() -> Reservation | None:
    """Return the reservation that this process holds.

    Returns:
        The reservation, or None if the process holds nothing.
    """
    return session().reservation


def release() -> tuple[Device, ...]:
    """Release the reservation of this process, or the devices that are kept for its restart.

    The CUDA variables are restored to their values before the reservation. This also applies if a
    refusal has emptied `CUDA_VISIBLE_DEVICES`.

    Returns:
        The released devices, or an empty tuple if the process held nothing.
    """
    if released := session().run_in_any_case(session().release):
        return released
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    return next(
        (each.held.devices for each in all_left() if restart_handover.end_lock_keeper(each)), ()
    )


def kept() -> str | None:
    """Return a message about the devices that are kept for this restarted kernel, or None."""
    first = None if session().devices else next(all_left(), None)
    return messages.kept_for_restart(first.held.devices, first.until) if first else None


def all_left() -> "Iterator[KeptReservation]":
    """Yield the reservations that are kept for this restarted kernel."""
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    if connection_file := kernels_file():
        yield from restart_handover.kept_reservations(connection_file)


def hide_if_unreserved() -> None:
    """Hide all GPUs from this process if it holds none, so that it can't use one by mistake."""
    session().run_in_any_case(session().hide_if_unreserved)


def continue_after(error: errors.ReserveGPUError) -> str:
    """Continue without a reservation after an error, with all GPUs hidden.

    If the driver is missing, the variables do not change, because no GPU is visible anyway.

    Args:
        error: The error of the refused request.

    Returns:
        A message about the GPUs that this process can use.
    """
    # A refusal with NoFreeDeviceError has already hidden the GPUs.
    if not isinstance(error, (errors.NoDriverError, errors.NoFreeDeviceError)):
        hide_if_unreserved()
    visible = cuda_environment.read()[cuda_environment.VISIBLE]
    is_above = isinstance(error, errors.ReservedAboveError)
    return messages.continuing(session().devices, visible if is_above else None)


def disable_idle_limit() -> None:
    """Remove the idle limit of the reservation, even if an administrator's rule set it.

    Call this before exec of a program whose idleness can't be measured.
    """
    this_session = session()

    def forget() -> None:
        held = this_session.holding
        if held.lease.idle_s is not None:
            terms = held.terms._replace(lease=held.lease._replace(idle_s=None))
            this_session.set_holding(held._replace(terms=terms), renew_lease=True)

    this_session.run(forget)


def before_exec(reason: str | None = None, *, is_kernel: bool = False) -> None:
    """Hand the reservation over to the program that replaces this process in the next exec.

    Args:
        reason: A message that the next program shows if this process has no reservation.
        is_kernel: Whether the program is a kernel that loads this package.

    Raises:
        ReserveGPUError: The reservation can't be handed over.
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
    """Join a reservation of another process of this user.

    Args:
        reserved: The reservation of the other process.

    Returns:
        A message to print.

    Raises:
        RequestError: This process already holds devices, or the other process no longer does.
        TooLateError: CUDA has already started in this process.
        LockError: The lock directory can't be used.
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
    """Take over the devices that the previous kernel left for its restart.

    Args:
        connection_file: The connection file of the kernel that this process is, or will become by
            exec.

    Returns:
        Messages about these devices, or an empty list if none were taken over.
    """
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    session().load()
    return session().run(restart_handover.take_over, session(), connection_file)


def leave_to_kernel(name: str, seconds: float) -> None:
    """Hand the reservation over to a kernel that is about to be started over ssh.

    Args:
        name: The name of the kernel.
        seconds: The time in seconds for which the devices are kept for that kernel.
    """
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    session().run(restart_handover.leave_to_lock_keeper, session(), name, seconds)


@overload
def before_end(function: F, *, limit: float | str = "5m") -> F: ...
@overload
def before_end(*, limit: float | str = "5m") -> Callable[[F], F]: ...
def before_end(function: F | None = None, *, limit: float | str = "5m") -> F | Callable[[F], F]:
    """Register a function that is called before this process is ended to free its GPUs.

    A process can be ended because its reservation or its batch job ends.

    Use it to save a checkpoint, as a decorator: `@before_end` or `@before_end(limit=30)`. Functions
    are called in the order of registration, each on a separate thread. If the end is postponed,
    they may be called again. A function replaces an earlier one of the same name, so the cell that
    defines it can be run again.

    Args:
        function: A function without parameters.
        limit: The timeout of the function, in seconds or as `30s` or `5m`. All functions together
            get at most 10 minutes.

    Returns:
        The function.

    Raises:
        RequestError: `function` is not callable, or `limit` is not a valid duration.
    """
    if function is None:
        return partial(before_end, limit=limit)
    if not callable(function):
        raise errors.RequestError(f"before_end() takes a function, not {sanitize(repr(function))}.")
    with no_fork:
        from reserve_gpu.system import shutdown

    shutdown.process_end().call_before(function, parse_duration(limit))
    return function


@contextmanager
def _display(progress: Literal["auto"] | None) -> Iterator[Callable[[Progress], object]]:
    """Yield a function that displays the progress of a wait, or nothing if `progress` is None."""
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
