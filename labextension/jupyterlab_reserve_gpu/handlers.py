"""Addresses below /reserve_gpu of a Jupyter server, behind its own authentication."""

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
    missing = f"Jupyter's server can't import reserve_gpu ({error}). Install it there."
else:
    missing = ""

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from jupyter_server.serverapp import ServerWebApplication

SHARED, RELEASES = "reserve_gpu", "reserve_gpu_releases"  # in the settings of the web application
MOST_RELEASES = 8  # at a time: each needs some threads, for as long as a driver hangs
LIMIT_S = 60.0  # for an answer: a driver that hangs takes 20 s, and the next look begins after it
RETRY_AFTER_S = 5


class Handler(APIHandler):
    """Answers with JSON, for those who may."""

    auth_resource = "reserve_gpu"
    _track_activity = False  # a look keeps no server alive that nobody uses
    _asked: asyncio.Future[str] | None = None
    _has_gone = False

    async def answer(self, asked: Awaitable[str], limit_s: float | None = None) -> None:
        """Answer with JSON, and stop waiting for it when the client has gone.

        Args:
            asked: The answer.
            limit_s: Seconds after which the client is told to try again.
        """
        self._asked = asyncio.ensure_future(asked)
        try:
            self.finish(await asyncio.wait_for(self._asked, limit_s))
        except asyncio.TimeoutError:
            self.refuse("The GPUs don't answer.")
        except asyncio.CancelledError:
            if not self._has_gone:  # the server ends
                raise

    def refuse(self, why: str) -> None:
        """Tell the client to try again."""
        self.set_status(503)
        self.set_header("Retry-After", str(RETRY_AFTER_S))
        self.finish(json.dumps({"message": why}))

    def on_connection_close(self) -> None:
        """Note that the client has gone."""
        super().on_connection_close()
        self._has_gone = True
        if self._asked:
            self._asked.cancel()


class StatusHandler(Handler):
    """How the machine stands; with ?hosts=1, how the others do."""

    @authenticated
    @authorized
    async def get(self) -> None:
        """Answer with the last look, or a new one; with ?new=1 always with a new one."""
        if missing:
            self.finish(json.dumps({"failure": missing}))
            return
        here, others = self.settings[SHARED]
        if self.get_query_argument("hosts", ""):
            asked = others.get()
        else:
            asked = here.get(is_new=bool(self.get_query_argument("new", "")))
        await self.answer(asked, LIMIT_S)


class ReleaseHandler(Handler):
    """What `reserve-gpu release` does, with the pid of a reservation of this user's."""

    @authenticated
    @authorized
    async def post(self) -> None:
        """Release, or end the process."""
        asked = self.get_json_body()
        if not isinstance(asked, dict) or type(asked.get("pid")) is not int or missing:
            raise HTTPError(400, "Give the pid of a reservation.")
        wish = partial(
            look.release, asked["pid"], since=asked.get("since"), is_end=asked.get("end") is True
        )
        running = self.settings[RELEASES]
        if len(running) >= MOST_RELEASES:
            self.refuse("Other releases are under way.")
            return
        released = apart(wish)
        running.add(released)
        released.add_done_callback(running.discard)
        await self.answer(asyncio.shield(released))


def add(application: ServerWebApplication) -> None:
    """Add the addresses to the server."""
    if not missing:
        public.type_in_cells()
        application.settings[RELEASES] = set()
        application.settings[SHARED] = (
            look.Shared(lambda: _look(application.settings["kernel_manager"]), look.EVERY_S),
            look.Shared(lambda: apart(look.look_elsewhere), look.HOSTS_EVERY_S),
        )
    base = application.settings["base_url"]
    application.add_handlers(
        ".*$",
        [
            (url_path_join(base, "reserve_gpu", "status"), StatusHandler),
            (url_path_join(base, "reserve_gpu", "release"), ReleaseHandler),
        ],
    )


def apart(function: Callable[[], dict[str, Any]]) -> asyncio.Future[str]:
    """Call it on a thread whose end the server's does not wait for: the driver may hang.

    Returns its answer as JSON: what is long would keep the server's thread from other requests.
    """
    future: Future[str] = Future()
    future.set_running_or_notify_cancel()  # from now on it can't be cancelled

    def call() -> None:
        try:
            future.set_result(json.dumps(function()))
        except BaseException as error:  # noqa: BLE001 - who asks gets it
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return asyncio.wrap_future(future)


async def _look(manager: Any) -> str:
    """Look at the machine, with the kernels that there are."""
    kernels: dict[int | str, str] = {}
    for id_ in manager.list_kernel_ids():
        kernel = manager.get_kernel(id_)
        provisioner = getattr(kernel, "provisioner", None)
        pid = provisioner.pid if isinstance(provisioner, LocalProvisioner) else None
        if pid:  # else it runs on another machine
            kernels[pid] = id_
        kernels[getattr(kernel, "connection_file", "")] = id_
    return await apart(partial(look.look, kernels))
