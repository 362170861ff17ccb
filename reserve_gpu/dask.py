"""Dask: every worker process reserves a GPU of its own before its first task.

    client.register_plugin(ReserveGPU())                                 in the notebook, or
    dask worker SCHEDULER --nworkers 4 --preload reserve_gpu.dask        on each host

A worker that gets no GPU sees none, and says so. Nannies and schedulers reserve nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from reserve_gpu import choosing, options, quantities, reservation
from reserve_gpu.errors import RequestError, ReservedAboveError, ReserveGPUError, TooLateError

try:
    import click
    from distributed import Worker, WorkerPlugin
except ModuleNotFoundError as error:
    if error.name not in ("click", "distributed"):
        raise
    raise ImportError("reserve_gpu.dask needs Dask: python -m pip install distributed") from None

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reserve_gpu.awaited import Wait
    from reserve_gpu.holding import Reservation
    from reserve_gpu.names import DeviceNames

# Where a worker is killed and replaced, its GPU is in use until the driver has cleaned up.
WAIT_S = 10.0

# With the notebook's variables all workers would use the same GPUs, the first one most.
ABOVE = """\
all that it may use is reserved by the process that started it.
Let go of that there (%reserve_gpu --release), then client.restart().
CUDA_VISIBLE_DEVICES = ''"""

logger = logging.getLogger("distributed.worker.reserve_gpu")  # so client.get_worker_logs() has it


class ReserveGPU(WorkerPlugin):
    """Reserves for every worker process, also for those that come back or come later.

    devices and request: what reserve() takes. wait: for how long a worker waits in line, taking no
        tasks, in seconds or as `90s`, `10m`, `2h`; None for not at all.

    Raises RequestError for what makes no sense on any machine.
    """

    name = "reserve_gpu"  # registered again, it replaces the earlier one

    def __init__(
        self,
        devices: DeviceNames | None = None,
        *,
        wait: float | str | None = WAIT_S,
        **request: Any,
    ) -> None:
        wanted = choosing.request(devices, **request)
        if wait is not None:
            quantities.parse_duration(wait)
        named = {"devices": wanted.devices or None, "exclude": wanted.exclude}
        self.arguments = {"wait": wait, **request, **named}

    async def setup(self, worker: Worker) -> None:
        """Reserve for the process of this worker, or fence it off from every GPU.

        An error would let the worker join as it is and see every GPU. So only TooLateError is
        raised, as then there is no fence either, and only by a worker that has joined.
        """
        if not _is_thread(worker):
            reservation.go_without()  # before anything else can run here
        arguments = self.arguments
        if not reservation.current():
            note = arguments.get("note") or f"Dask worker {worker.address}"
            arguments = {**arguments, "note": note}
        try:
            held = await _reserve(arguments)
        except TooLateError as error:
            _refuse(worker, error)
        except Exception as error:
            why = ABOVE if isinstance(error, ReservedAboveError) else error
            text = f"Dask worker {worker.address} got no GPU: {why}"
            logger.exception(text, exc_info=not isinstance(error, ReserveGPUError))
            worker.log_event("warn", text)  # the clients show it
        else:
            logger.info("%s", held)


async def _reserve(arguments: Mapping[str, Any]) -> Reservation:
    """Reserve on another thread: the worker answers meanwhile, and can be told to close."""
    closing = threading.Event()

    def go_on(_wait: Wait) -> None:
        if closing.is_set():
            raise InterruptedError("the worker closes")

    def attempt() -> Reservation:
        reservation.go_without()  # some errors change no variable
        return reservation.reserve(progress=go_on, **arguments)

    try:
        return await asyncio.to_thread(attempt)
    except asyncio.CancelledError:
        closing.set()  # a thread that waits would keep the process from ending
        raise


def _is_thread(worker: Worker) -> bool:
    """Whether the worker shares its process with others, and with the client."""
    return str(worker.address).startswith("inproc://")


def _refuse(worker: Worker, error: TooLateError) -> NoReturn:
    """Raise to the client that registers the plugin; a worker about to join ends its process."""
    if not reservation.current():
        reservation.release()  # gives back the variables: CUDA does not read them any more
    has_joined = worker.periodic_callbacks["heartbeat"].is_running()
    if has_joined or _is_thread(worker):
        text = f"Dask worker {worker.address}: {error} client.restart() starts it anew."
        raise TooLateError(text) from None
    text = f"Dask worker {worker.address} ends: {error}"
    logger.critical(text)
    raise SystemExit(text) from None  # any other error is logged, and the worker joins


def _plugin(_context: click.Context, _argument: click.Parameter, words: Sequence[str]) -> Any:
    """What the command line of `dask worker` asks for, after `--preload reserve_gpu.dask`."""
    parser = options.Parser(add_help=False)
    for option in options.REQUEST:
        if "--optional" not in option.flags:  # no GPU never ends a worker
            parser.add_argument(*option.flags, **option.settings)
    parser.set_defaults(wait=WAIT_S)
    try:
        arguments = vars(parser.parse_args(words))
        return ReserveGPU(arguments.pop("devices") or None, **arguments)
    except RequestError as error:
        raise click.UsageError(str(error)) from error


async def _setup(worker: object, plugin: ReserveGPU) -> None:
    if isinstance(worker, Worker):
        await plugin.setup(worker)
    else:
        kind = type(worker).__name__
        logger.error(
            "reserve_gpu.dask is for workers: a %s needs no GPU, so none is reserved", kind
        )


# What --preload calls. A command, as Dask refuses arguments for a plain function; what the words
# mean is said in `options`.
dask_setup = click.Command(
    "reserve_gpu.dask",
    callback=_setup,
    params=[click.Argument(["plugin"], nargs=-1, type=click.UNPROCESSED, callback=_plugin)],
    add_help_option=False,
)
dask_setup.ignore_unknown_options = True
