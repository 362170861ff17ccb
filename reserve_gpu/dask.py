"""Dask: every worker process reserves a GPU of its own before its first task.

    client.register_plugin(ReserveGPU())                                 in the notebook, or
    dask worker SCHEDULER --nworkers 4 --preload reserve_gpu.dask        on each host

A worker that gets no GPU sees none, and says so; with `required` it leaves the cluster. Nannies and
schedulers reserve nothing.
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

# By default: when a worker is killed and replaced at once, its GPU is still in use for a moment,
# until the driver has cleaned up.
WAIT_S = 10.0

# All workers inherit the notebook's variables: they would all use its GPUs, the first one most.
ABOVE = """\
all that it may use is reserved by the process that started it.
Release it there (%reserve_gpu --release), then client.restart().
CUDA_VISIBLE_DEVICES = ''"""

logger = logging.getLogger("distributed.worker.reserve_gpu")  # so client.get_worker_logs() has it


class Wishes(TypedDict, total=False):
    """What a plugin takes besides, as reserve()."""

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
    """Reserves for every worker process, also for those that come back or come later.

    devices and wishes: what reserve() takes. wait: for how long a worker waits in the queue, taking
        no tasks, in seconds or as `90s`, `10m`, `2h`; None for not at all.
    required: whether a worker that gets no GPU leaves the cluster, in place of working without.

    Raises RequestError for what makes no sense on any machine.
    """

    name = "reserve_gpu"  # a plugin registered under the same name replaces the earlier one

    def __init__(
        self,
        devices: DeviceNames | None = None,
        *,
        wait: float | str | None = WAIT_S,
        required: bool = False,
        **wishes: Unpack[Wishes],
    ) -> None:
        if unknown := wishes.keys() - Wishes.__annotations__.keys():
            raise TypeError(f"ReserveGPU() takes no {', '.join(sorted(unknown))}.")
        parsed = request.parse(devices, **wishes)
        if wait is not None:
            parse_duration(wait)
        # An iterator could be read once only, and the plugin is sent to every worker.
        self.arguments = {"wait": wait, **wishes, "devices": parsed.devices or None}
        self.required = required

    async def setup(self, worker: Worker) -> None:
        """Reserve for the process of this worker, or leave it without any GPU.

        After an error Dask would let the worker join anyway, and it would see every GPU. So
        only TooLateError is raised, where the variables have no effect any more, and only by a
        worker that has joined already.
        """
        if self.required:
            _pause(worker)
        if not _is_thread(worker):
            api.hide_if_unreserved()  # first: from here on tasks could run beside us
            process_identity.call_it(f"Dask worker {worker.name} of {worker.scheduler.address}")
        try:
            reservation = await _reserve(self.arguments)
        except errors.TooLateError as error:
            _refuse(worker, error)
        except Exception as error:
            reason = ABOVE if isinstance(error, errors.ReservedAboveError) else error
            leaves = " and leaves" if self.required else ""
            text = f"Dask worker {worker.address} got no GPU{leaves}: {reason}"
            logger.exception(text, exc_info=not isinstance(error, errors.ReserveGPUError))
            if self.required:
                _leave(worker, text)
            else:
                worker.log_event("warn", text)  # the clients show it
        else:
            logger.info("%s", reservation)
            _go_on(worker)


async def _reserve(arguments: Mapping[str, Any]) -> Reservation:
    """Reserve on another thread: the worker answers meanwhile, and can be told to close."""
    closing = threading.Event()

    def stop_if_closing(_waiting: Waiting) -> None:
        if closing.is_set():
            raise InterruptedError("the worker closes")

    def attempt() -> Reservation:
        api.hide_if_unreserved()  # some errors of reserve() change no variable
        return api.reserve(progress=stop_if_closing, **arguments)

    try:
        return await asyncio.to_thread(attempt)
    except asyncio.CancelledError:
        closing.set()  # the process can't end while a thread of it still waits for a GPU
        raise


def _is_thread(worker: Worker) -> bool:
    """Tell whether the worker shares its process with others, and with the client."""
    return str(worker.address).startswith("inproc://")


def _refuse(worker: Worker, error: errors.TooLateError) -> None:
    """Raise to the client that registers the plugin; a worker about to join leaves."""
    if not api.current():
        api.release()  # gives back the variables: CUDA does not read them any more
    has_joined = worker.periodic_callbacks["heartbeat"].is_running()
    if has_joined or _is_thread(worker):
        text = f"Dask worker {worker.address}: {error} client.restart() starts it anew."
        _go_on(worker)
        raise errors.TooLateError(text) from None
    text = f"Dask worker {worker.address} leaves: {error}"
    logger.critical(text)
    _leave(worker, text)


def _pause(worker: Worker) -> None:
    """Have a worker begin no task; Dask sees no difference."""
    worker.handle_stimulus(PauseEvent(stimulus_id="reserve-gpu-pause"))


def _go_on(worker: Worker) -> None:
    if worker.status in (Status.init, Status.running):  # else Dask has paused it, or closes it
        worker.handle_stimulus(UnpauseEvent(stimulus_id="reserve-gpu-go-on"))


def _leave(worker: Worker, text: str) -> None:
    """Have a worker leave the cluster for good, with its nanny; it begins no task any more.

    A worker that is about to join does so before it leaves. If its process ended now, its nanny
    would start it again without end, or bring down all workers of one `dask worker --nworkers`.
    """
    _pause(worker)
    worker.loop.add_callback(_close, worker, text)


async def _close(worker: Worker, text: str) -> None:
    await worker  # until it has joined
    worker.log_event("warn", text)  # the clients show it
    await worker.close_gracefully(restart=False, reason=text)


def _plugin(_context: click.Context, _argument: click.Parameter, words: Sequence[str]) -> Any:
    """Return the plugin that the words after `--preload reserve_gpu.dask` ask for."""
    parser = request_options.Parser("--preload reserve_gpu.dask", add_help=False)
    option.add(request_options.REQUEST_KEYWORDS, parser)
    parser.add_argument("--required", action="store_true")
    parser.set_defaults(wait=WAIT_S)
    try:
        parsed = parser.parse_args(words)
        return ReserveGPU(required=parsed.required, **request_options.wishes(parsed))
    except errors.RequestError as error:
        raise click.UsageError(str(error)) from error


async def _setup(worker: object, plugin: ReserveGPU) -> None:
    if isinstance(worker, Worker):
        await plugin.setup(worker)
    else:
        text = "reserve_gpu.dask is for workers: a %s needs no GPU, so none is reserved"
        logger.error(text, type(worker).__name__)


# What --preload calls. It is a command, as Dask refuses arguments for a plain function; our own
# parser reads the words.
dask_setup = click.Command(
    "reserve_gpu.dask",
    callback=_setup,
    params=[click.Argument(["plugin"], nargs=-1, type=click.UNPROCESSED, callback=_plugin)],
    add_help_option=False,
)
dask_setup.ignore_unknown_options = True
