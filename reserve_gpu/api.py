"""The functions that Python code, the magic and the command line use to manage reservations."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, overload

from reserve_gpu.allocation.request import Deadline, parse
from reserve_gpu.gpus import cuda_environment
from reserve_gpu.gpus.names import DeviceNames
from reserve_gpu.locks.queue import RETURN_LIMIT_S
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
from reserve_gpu.render.phrases import labels
from reserve_gpu.reservation import acquire, feature
from reserve_gpu.reservation.session import Reservation, session
from reserve_gpu.system.executor import Call
from reserve_gpu.system.forks import no_fork
from reserve_gpu.system.jupyter_kernel import kernels_file

if TYPE_CHECKING:
    from reserve_gpu.render.progress import Live
    from reserve_gpu.reservation.restart_handover import KeptReservation

F = TypeVar("F", bound=Callable[[], object])


def reserve(  # noqa: PLR0913 - all but the first are keyword-only
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

    A process has at most one reservation. Calling this function again for GPUs that the process
    already holds keeps these GPUs. Calling it for fewer GPUs releases the others, unless CUDA has
    already started.

    Args:
        devices: The GPUs to reserve, in the given order. They can be specified by index (`2`, or
            `0-3` for four GPUs), UUID, unique UUID prefix, MIG instance (`1:0`), or PCI bus ID.
            None reserves the first free GPUs.
        count: The number of GPUs to reserve if `devices` is None. Defaults to 1.
        min_memory: The minimum total memory of each GPU, such as `16GB` or `16GiB`. A number
            without a unit is in MiB and must be at least 1000.
        name: Text that each GPU's name must contain. Case is ignored.
        wait: The maximum time to wait in the queue, in seconds or as a string such as `90s`, `10m`
            or `2h`. True waits without a time limit, and None does not wait.
        memory: The size of the part to reserve on each GPU, in the same format as `min_memory` or
            as a percentage such as `50%`. The part must be large enough for the GPU memory that
            this process and its children use, including the CUDA context. Other users can reserve
            the rest. None reserves whole GPUs.
        note: A note that other users see next to the reservation.
        for_: The duration of the reservation, in seconds or as a string such as `30m`, `4h` or
            `1h30m`.
        until: The local time at which the reservation ends, such as `18:00`, `6pm`, `Fri`,
            `tomorrow`, `2026-12-01` or `Fri 18:00`.
        idle: The idle limit, in seconds or as a string such as `30m` or `2h`. The reservation ends
            after this time if no cell has run and neither this process nor its children have used
            the GPUs.
        if_wanted: Whether to release the GPUs at the end of the reservation only if a waiter could
            use them.
        end_kernel: Whether to end this process at the end of the reservation if CUDA has started,
            because the GPU memory is not freed otherwise. Functions registered with `before_end()`
            are called first.
        progress: A function that is called with a `Waiting` object about once a second during a
            wait. `"auto"` displays the progress in a notebook, in an IPython shell, or on stderr if
            stderr is a terminal. None displays nothing.

    Returns:
        The reservation. If it is used as a context manager, the GPUs are released at the end of the
        `with` block.

    Raises:
        RequestError: The request is invalid.
        ImpossibleError: The request can never be satisfied on this machine.
        TooLateError: CUDA has already started in this process.
        NoFreeDeviceError: No matching GPU is free.
        WaitTimeoutError: No matching GPU became available within the maximum wait.
        ReservedAboveError: A parent process has reserved every GPU that this process may use.
        DriverError: The NVIDIA driver is missing or has failed.
        LockError: The lock directory can't be used.

    Warns:
        ReserveGPUWarning: A reserved GPU has a fault, another process is using a reserved GPU, or
            an administrator's rule limits the reservation.
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
    assert reservation  # noqa: S101 - ask() returns no reservation only if is_optional is set
    try:
        for text in outcome.warnings:
            warnings.warn(text, errors.ReserveGPUWarning, stacklevel=2)
        if progress == "auto" and reservation.lease.has_end:
            show_reserved()
    # A signal handler raised an exception, or a warning filter turned a warning into an error.
    # Release the new reservation, because the caller never receives it.
    except BaseException:
        if outcome.is_new:
            session().run_in_any_case(session().forget, reservation)
        raise
    return reservation


class Outcome(NamedTuple):
    """The result of a request.

    Attributes:
        reservation: The reservation, or None if the request was refused and `--optional` allows
            continuing without a GPU.
        warnings: The warnings and notices about the reservation.
        is_new: Whether the request created or changed the reservation.
        waited_s: The time that the request spent in the queue, in seconds.
        excused: The error that `--optional` allows the caller to ignore, or None.
        released: The devices that the process held before the request and no longer holds.
    """

    reservation: Reservation | None
    warnings: Sequence[str] = ()
    is_new: bool = False
    waited_s: float = 0.0
    excused: errors.ReserveGPUError | None = None
    released: Sequence[Device] = ()

    @property
    def text(self) -> str:
        """Return the outcome as text to print."""
        if self.excused:
            return continue_after(self.excused)
        waited = f"Waited for {duration(self.waited_s)}.\n" if self.waited_s >= 1 else ""
        released = f"Released {labels(self.released)}.\n" if self.released else ""
        return f"{waited}{released}{self.reservation}"


def ask(
    request: Request,
    wait: float | str | None,
    progress: Callable[[Progress], object] | Literal["auto"] | None,
    frontend: Frontend,
    *,
    is_optional: bool = False,
) -> Outcome:
    """Reserve devices on behalf of a frontend.

    Args:
        request: The request.
        wait: The maximum time to wait in the queue, as in `reserve()`.
        progress: A function to call during a wait, as in `reserve()`. It also receives reports
            about slow driver calls.
        frontend: The frontend, which determines the command syntax in error messages.
        is_optional: Whether to return an outcome without a reservation if no GPU can be reserved.

    Returns:
        The outcome of the request.

    Raises:
        ReserveGPUError: Any error that `reserve()` can raise.
        WaitInterrupted: The user pressed Ctrl-C while the magic or a command was waiting.
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
        return Outcome(
            acquired.reservation,
            acquired.notices,
            is_new,
            waited_s or 0.0,
            released=acquired.released,
        )
    except (Failure, errors.ReserveGPUError) as error:
        explained_error = explained(error, frontend)
        if is_optional and isinstance(explained_error, errors.EXCUSED):
            return Outcome(None, excused=explained_error)
        raise explained_error from None
    except BaseException as error:  # raised by a signal handler
        # If `acquired` is None, `undo` does the rollback, and this call only waits for `undo`.
        savepoint = acquired.savepoint if acquired else None
        this_session.run_in_any_case(this_session.roll_back, savepoint)
        has_waited = deadline.waits or waited_s is not None
        if isinstance(error, KeyboardInterrupt) and has_waited and frontend.program:
            kept_s = RETURN_LIMIT_S if this_session.has_place else None
            text = messages.interrupted(this_session.devices, frontend, kept_s)
            raise errors.WaitInterrupted(text) from None
        raise


def explained(
    error: Failure | errors.ReserveGPUError, frontend: Frontend
) -> errors.ReserveGPUError:
    """Return an error with hints for the frontend, and with any explanations from the features."""
    if isinstance(error, Failure):
        error = error.reason.error(for_this_process(frontend))
    for each in session().features.values():
        error = each.explained(error)
    return error


def preview(request: Request, frontend: Frontend) -> tuple[Device, ...]:
    """Return the devices that a request would reserve now, without reserving them.

    Args:
        request: The request.
        frontend: The frontend, which determines the command syntax in error messages.

    Raises:
        ReserveGPUError: Any error that `reserve()` can raise.
    """
    session().load(request.terms)
    try:
        return session().run(acquire.preview, session(), request)
    except (Failure, errors.ReserveGPUError) as error:
        raise explained(error, frontend) from None


def show_reserved() -> None:
    """Let each feature show details of the new reservation, such as its end time, in this cell."""
    for each in session().features.values():
        each.show()


def current() -> Reservation | None:
    """Return the reservation that this process holds.

    Returns:
        The reservation, or None if the process has no reservation.
    """
    return session().reservation


def release() -> tuple[Device, ...]:
    """Release this process's reservation, or the devices that are kept for this restarted kernel.

    The CUDA variables are restored to the values that they had before the reservation. They are
    also restored if a refused request has emptied `CUDA_VISIBLE_DEVICES`.

    Returns:
        The released devices, or an empty tuple if there was nothing to release.
    """
    if released := session().run_in_any_case(session().release):
        return released
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    return next(
        (
            each.held.devices
            for each in kept_reservations()
            if restart_handover.end_lock_keeper(each)
        ),
        (),
    )


def kept() -> str | None:
    """Return a message about the devices that are kept for this restarted kernel, or None."""
    first = None if session().devices else next(kept_reservations(), None)
    return messages.kept_for_restart(first.held.devices, first.until) if first else None


def kept_reservations() -> "Iterator[KeptReservation]":
    """Yield the reservations that are kept for this restarted kernel."""
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    if connection_file := kernels_file():
        yield from restart_handover.kept_reservations(connection_file)


def hide_if_unreserved() -> None:
    """Hide all GPUs from this process if it holds none, so that it can't use one by mistake."""
    session().run_in_any_case(session().hide_if_unreserved)


def continue_after(error: errors.ReserveGPUError) -> str:
    """Hide all GPUs so that this process can continue after a refused request.

    If this process already holds GPUs, they stay visible. If the driver is missing, the CUDA
    variables don't change, because no GPU is visible anyway.

    Args:
        error: The error that the refused request raised.

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
    """Remove the reservation's idle limit, even if an administrator's rule has set it.

    Call this function before exec replaces this process with a program whose idle time can't be
    measured.
    """
    this_session = session()

    def forget() -> None:
        held = this_session.holding
        if held.lease.idle_s is not None:
            terms = held.terms._replace(lease=held.lease._replace(idle_s=None))
            this_session.set_holding(held._replace(terms=terms), renew_lease=True)

    this_session.run(forget)


def before_exec(reason: str | None = None, *, is_kernel: bool = False) -> None:
    """Hand over the reservation to the program that exec will start in this process.

    Args:
        reason: A message for the next program to show if this process has no reservation.
        is_kernel: Whether the next program is a Jupyter kernel that loads this package.

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
    """Join a reservation that another of this user's processes holds.

    Args:
        reserved: The other process's reservation.

    Returns:
        A message to print.

    Raises:
        RequestError: This process already holds devices, or the other process no longer holds any.
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
    """Take over the devices that were kept for this kernel while it was restarting.

    Args:
        connection_file: The connection file of the kernel that this process is running, or will run
            after exec.

    Returns:
        Messages about these devices, or an empty list if no devices were taken over.
    """
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    session().load()
    return session().run(restart_handover.take_over, session(), connection_file)


def leave_to_kernel(name: str, seconds: float) -> None:
    """Hand over the reservation to a kernel that is about to be started over ssh.

    Args:
        name: The ID by which the kernel finds the reservation.
        seconds: The time for which to keep the devices for that kernel, in seconds.
    """
    with no_fork:
        from reserve_gpu.reservation import restart_handover

    session().run(restart_handover.leave_to_lock_keeper, session(), name, seconds)


@overload
def before_end(function: F, *, limit: float | str = "5m") -> F: ...
@overload
def before_end(*, limit: float | str = "5m") -> Callable[[F], F]: ...
def before_end(function: F | None = None, *, limit: float | str = "5m") -> F | Callable[[F], F]:
    """Register a function to call before this process is ended to free its GPUs.

    A process might be ended because its reservation or its batch job ends. The function can save a
    checkpoint, for example. To register a function where it is defined, use `@before_end` or
    `@before_end(limit=30)` as a decorator.

    Functions are called in the order of registration, each on a separate thread. If the process is
    not ended after all, the functions might be called again later. A function replaces any earlier
    function with the same name, so you can run the cell that defines it again.

    Args:
        function: A function without parameters.
        limit: The function's timeout, in seconds or as a string such as `30s` or `5m`. All
            functions together get at most 10 minutes.

    Returns:
        The function, or a decorator if `function` is None.

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
    """Yield a function that displays a wait's progress. It does nothing if `progress` is None."""
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
