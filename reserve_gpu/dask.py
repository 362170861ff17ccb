"""A Dask plugin that reserves a GPU for each worker process before the worker's first task.

    client.register_plugin(ReserveGPU())                                 in the notebook, or
    dask worker SCHEDULER --nworkers 4 --preload reserve_gpu.dask        on each host

A worker that can't reserve a GPU sees no GPU and logs the reason. With `required`, such a worker
leaves the cluster. Nannies and schedulers don't reserve anything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, TypedDict

from reserve_gpu import api, request_options
from reserve_gpu.allocation import request
from reserve_gpu.model import errors, option
from reserve_gpu.model.parsing import parse_duration
from reserve_gpu.option_parser import Parser
from reserve_gpu.system import process_identity

try:
    import click
    from distributed import Worker, WorkerPlugin
    from distributed.core import Status
    from distributed.worker_state_machine import PauseEvent, UnpauseEvent
except ModuleNotFoundError as error:
    if error.name not in ("click", "distributed"):
        raise
    command = errors.install_command("distributed")
    raise ImportError(f"reserve_gpu.dask needs Dask: {command}") from None

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Unpack

    from reserve_gpu.gpus.names import DeviceNames
    from reserve_gpu.model.progress import Waiting
    from reserve_gpu.reservation.session import Reservation

# Default timeout for a wait, in seconds. Workers wait by default because the GPU of a killed worker
# stays in use until the driver has cleaned up, and the replacement worker starts before then.
WAIT_S = 10.0

# Workers inherit the notebook's CUDA variables. Without this error, workers would share
# the notebook's GPUs.
RESERVED_BY_PARENT = """\
the process that started it has reserved all GPUs that it may use.
Run %reserve_gpu --release there, then client.restart().
CUDA_VISIBLE_DEVICES = ''"""

# The prefix makes the messages appear in client.get_worker_logs().
logger = logging.getLogger("distributed.worker.reserve_gpu")


class RequestKeywords(TypedDict, total=False):
    """Keyword arguments that `ReserveGPU` passes on to `reserve()`."""

    count: int | None
    min_memory: float | str | None
    name: str | None
    memory: float | str | None
    note: str | None
    for_: float | str | None
    until: str | None
    idle: float | str | None
    if_wanted: bool
    end_kernel: bool


class ReserveGPU(WorkerPlugin):
    """A worker plugin that reserves GPUs for each worker process.

    The plugin also applies to workers that restart, or that join the cluster later.

    Args:
        devices: The GPUs to reserve, as in `reserve()`.
        wait: The maximum time to wait in the queue, in seconds or as a string such as `90s`, `10m`
            or `2h`. None does not wait. A new worker starts no tasks while it is waiting.
        required: Whether a worker that can't reserve a GPU leaves the cluster. Otherwise, it works
            without a GPU.
        **keywords: Other keyword arguments for `reserve()`, except `progress`.

    Raises:
        RequestError: The request is invalid on every machine.
        TypeError: A keyword argument is unknown.
    """

    name = "reserve_gpu"  # Dask replaces an earlier plugin with the same name

    def __init__(
        self,
        devices: DeviceNames | None = None,
        *,
        wait: float | str | None = WAIT_S,
        required: bool = False,
        **keywords: Unpack[RequestKeywords],
    ) -> None:
        if unknown := keywords.keys() - RequestKeywords.__annotations__.keys():
            raise TypeError(
                f"ReserveGPU() got unexpected keyword arguments: {', '.join(sorted(unknown))}."
            )
        parsed = request.parse(devices, **keywords)
        if wait is not None:
            parse_duration(wait)
        # Store the parsed devices, because every worker gets the plugin and an iterator works only
        # once.
        self.arguments = {"wait": wait, **keywords, "devices": parsed.devices or None}
        self.required = required

    async def setup(self, worker: Worker) -> None:
        """Reserve GPUs for the worker's process, or hide all GPUs from that process.

        All errors except TooLateError are logged instead of raised, because Dask would let the
        worker join the cluster even after an error.

        Args:
            worker: The worker.

        Raises:
            TooLateError: CUDA has already started in a worker that has joined the cluster.
        """
        if self.required:
            _pause(worker)
        if not _is_thread(worker):
            api.hide_if_unreserved()  # tasks can run as soon as this method awaits something
            process_identity.set_name(f"Dask worker {worker.name} of {worker.scheduler.address}")
        try:
            reservation = await _reserve(self.arguments)
        except errors.TooLateError as error:
            _refuse(worker, error)
        except Exception as error:
            is_reserved_above = isinstance(error, errors.ReservedAboveError)
            reason = RESERVED_BY_PARENT if is_reserved_above else error
            leaves = " and leaves the cluster" if self.required else ""
            text = f"Dask worker {worker.address} got no GPU{leaves}: {reason}"
            logger.exception(text, exc_info=not isinstance(error, errors.ReserveGPUError))
            if self.required:
                _leave(worker, text)
            else:
                worker.log_event("warn", text)  # clients display this event
        else:
            logger.info("%s", reservation)
            _resume(worker)


async def _reserve(arguments: Mapping[str, Any]) -> Reservation:
    """Reserve GPUs on another thread, so that the worker stays responsive and can be closed."""
    closing = threading.Event()

    def stop_if_closing(_waiting: Waiting) -> None:
        if closing.is_set():
            raise InterruptedError("the worker is closing")

    def attempt() -> Reservation:
        api.hide_if_unreserved()  # reserve() hides the GPUs only for certain errors
        return api.reserve(progress=stop_if_closing, **arguments)

    try:
        return await asyncio.to_thread(attempt)
    except asyncio.CancelledError:
        closing.set()  # the process can't exit while the other thread is waiting for a GPU
        raise


def _is_thread(worker: Worker) -> bool:
    """Return whether the worker runs in the client's process, possibly alongside others."""
    return str(worker.address).startswith("inproc://")


def _refuse(worker: Worker, error: errors.TooLateError) -> None:
    """Raise the error in the client if the worker has joined. Otherwise, make the worker leave."""
    if not api.current():
        api.release()  # restore the CUDA variables, because CUDA no longer reads them
    has_joined = worker.periodic_callbacks["heartbeat"].is_running()
    if has_joined or _is_thread(worker):
        text = f"Dask worker {worker.address}: {error} To restart it, call client.restart()."
        _resume(worker)
        raise errors.TooLateError(text) from None
    text = f"Dask worker {worker.address} leaves the cluster: {error}"
    logger.critical(text)
    _leave(worker, text)


def _pause(worker: Worker) -> None:
    """Keep a worker from starting new tasks, without changing the status that Dask shows."""
    worker.handle_stimulus(PauseEvent(stimulus_id="reserve-gpu-pause"))


def _resume(worker: Worker) -> None:
    if worker.status in (Status.init, Status.running):  # unless Dask has paused or closed it
        worker.handle_stimulus(UnpauseEvent(stimulus_id="reserve-gpu-go-on"))


def _leave(worker: Worker, text: str) -> None:
    """Make a worker and its nanny leave the cluster for good, without starting new tasks.

    A worker that has not joined the cluster yet joins it first. If the worker's process ended
    before then, the nanny would restart the process endlessly, or stop all workers that the same
    `dask worker --nworkers` command has started.
    """
    _pause(worker)
    worker.loop.add_callback(_close, worker, text)


async def _close(worker: Worker, text: str) -> None:
    await worker  # wait until the worker has joined the cluster
    worker.log_event("warn", text)  # clients display this event
    await worker.close_gracefully(restart=False, reason=text)


def _plugin(_context: click.Context, _argument: click.Parameter, words: Sequence[str]) -> Any:
    """Create the plugin from the arguments after `--preload reserve_gpu.dask`."""
    parser = Parser("--preload reserve_gpu.dask", add_help=False)
    option.add(request_options.REQUEST_KEYWORDS, parser)
    parser.add_argument("--required", action="store_true")
    parser.set_defaults(wait=WAIT_S)
    try:
        parsed = parser.parse_args(words)
        return ReserveGPU(required=parsed.required, **request_options.reserve_keywords(parsed))
    except errors.RequestError as error:
        raise click.UsageError(str(error)) from error


async def _setup(worker: object, plugin: ReserveGPU) -> None:
    if isinstance(worker, Worker):
        await plugin.setup(worker)
    else:
        text = "reserve_gpu.dask reserves GPUs only for workers; it does nothing for a %s"
        logger.error(text, type(worker).__name__)


# Dask calls this object for --preload. It is a click command, because Dask does not accept
# arguments for a plain function. The arguments are parsed by `Parser`.
dask_setup = click.Command(
    "reserve_gpu.dask",
    callback=_setup,
    params=[click.Argument(["plugin"], nargs=-1, type=click.UNPROCESSED, callback=_plugin)],
    add_help_option=False,
)
dask_setup.ignore_unknown_options = True
