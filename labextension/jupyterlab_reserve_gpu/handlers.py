"""Handlers for authenticated requests to /reserve_gpu on a Jupyter server."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado.web import HTTPError, authenticated

try:
    from jupyterlab_reserve_gpu import look
    from reserve_gpu import public
except ImportError as error:
    missing = (
        f"The Jupyter server can't import reserve_gpu ({error}). "
        "Install it in the server's environment."
    )
else:
    missing = ""

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from jupyter_server.serverapp import ServerWebApplication

SHARED, RELEASES = "reserve_gpu", "reserve_gpu_releases"  # keys in the web application's settings
MOST_RELEASES = 8  # maximum number of concurrent releases; each ties up threads if the driver hangs
# Timeout for an answer, in seconds. If the driver hangs, reading the GPUs takes 20 s, and another
# read might have to wait for the first one.
LIMIT_S = 60.0
RETRY_AFTER_S = 5


class Handler(APIHandler):
    """Base class for handlers that send JSON to authorized clients."""

    auth_resource = "reserve_gpu"
    _track_activity = False  # polling must not keep an idle server alive
    _pending: asyncio.Future[str] | None = None
    _is_disconnected = False

    async def answer(self, pending: Awaitable[str], limit_s: float | None = None) -> None:
        """Send a JSON answer once it is available, unless the client disconnects first.

        Args:
            pending: An awaitable that returns the answer as JSON text.
            limit_s: Timeout in seconds. After the timeout, the client is told to retry.
        """
        self._pending = asyncio.ensure_future(pending)
        try:
            self.finish(await asyncio.wait_for(self._pending, limit_s))
        except asyncio.TimeoutError:
            self.refuse("Reading the GPUs timed out.")
        except asyncio.CancelledError:
            if not self._is_disconnected:  # the server is shutting down
                raise

    def refuse(self, reason: str) -> None:
        """Respond with status 503, and tell the client when to retry."""
        self.set_status(503)
        self.set_header("Retry-After", str(RETRY_AFTER_S))
        self.finish(json.dumps({"message": reason}))

    def on_connection_close(self) -> None:
        """Cancel the pending answer when the client disconnects."""
        super().on_connection_close()
        self._is_disconnected = True
        if self._pending:
            self._pending.cancel()


class StatusHandler(Handler):
    """Handles requests for the status of this machine or, with ?hosts=1, of other machines."""

    @authenticated
    @authorized
    async def get(self) -> None:
        """Respond with a recent status. With ?new=1, always read the GPUs again."""
        if missing:
            self.finish(json.dumps({"failure": missing}))
            return
        local, hosts = self.settings[SHARED]
        if self.get_query_argument("hosts", ""):
            pending = hosts.get()
        else:
            pending = local.get(is_new=bool(self.get_query_argument("new", "")))
        await self.answer(pending, LIMIT_S)


class ReleaseHandler(Handler):
    """Handles requests to release one of the user's reservations, as `reserve-gpu release` does."""

    @authenticated
    @authorized
    async def post(self) -> None:
        """Make the requested process release its reservation, or end the process."""
        body = self.get_json_body()
        if not isinstance(body, dict) or type(body.get("pid")) is not int or missing:
            raise HTTPError(400, "The request needs the pid of a reservation.")
        release = partial(
            look.release, body["pid"], since=body.get("since"), is_end=body.get("end") is True
        )
        running = self.settings[RELEASES]
        if len(running) >= MOST_RELEASES:
            self.refuse("Too many releases are in progress.")
            return
        released = run_in_thread(release)
        running.add(released)
        released.add_done_callback(running.discard)
        await self.answer(asyncio.shield(released))


def add(application: ServerWebApplication) -> None:
    """Add the request handlers to the server's web application."""
    if not missing:
        public.type_in_cells()
        application.settings[RELEASES] = set()
        application.settings[SHARED] = (
            look.Shared(lambda: _look(application.settings["kernel_manager"]), look.EVERY_S),
            look.Shared(lambda: run_in_thread(look.look_elsewhere), look.HOSTS_EVERY_S),
        )
    base = application.settings["base_url"]
    application.add_handlers(
        ".*$",
        [
            (url_path_join(base, "reserve_gpu", "status"), StatusHandler),
            (url_path_join(base, "reserve_gpu", "release"), ReleaseHandler),
        ],
    )


def run_in_thread(function: Callable[[], dict[str, Any]]) -> asyncio.Future[str]:
    """Call a function on a daemon thread.

    If the driver hangs, a daemon thread does not keep the server from exiting.

    Returns:
        A future for the result as JSON text. The thread encodes the result, because encoding a long
        answer would block the server's event loop.
    """
    future: Future[str] = Future()
    future.set_running_or_notify_cancel()  # a running call can't be canceled

    def call() -> None:
        try:
            future.set_result(json.dumps(function()))
        except BaseException as error:  # noqa: BLE001 - the future passes the error on
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return asyncio.wrap_future(future)


async def _look(manager: Any) -> str:
    """Return the machine's status as JSON text, with the ids of the server's kernels."""
    kernels: dict[int | str, str] = {}
    for id_ in manager.list_kernel_ids():
        kernel = manager.get_kernel(id_)
        provisioner = getattr(kernel, "provisioner", None)
        pid = provisioner.pid if isinstance(provisioner, LocalProvisioner) else None
        if pid:  # otherwise, the kernel is not a local process
            kernels[pid] = id_
        kernels[getattr(kernel, "connection_file", "")] = id_
    return await run_in_thread(partial(look.look, kernels))
